"""What probes, balancers and monitors ask: whether the server lives, is ready, and how it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_jsonable_python
from starlette.responses import PlainTextResponse, Response

from prefixcache.metrics import LabelledMetrics
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.routes import Router, describes
from prefixcache.server.options.version import VERSION

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.control import Control
    from prefixcache.events.publisher import EventPublisher
    from prefixcache.server.jobs.served_model import ServedModel

# What replicas together answer as one server does.
_PREFIX_HASH = {
    "format": str,
    "block_size": int,
    "root_hash": str,
    "weights_name": str,
    "arithmetic": str,
}
describes_metrics = describes("Prometheus' text.", str)
describes_server_info = describes(
    "What the server was started with, and what block hashes are made of.",
    {"version": str, "prefix_hash": _PREFIX_HASH, "flags": dict},
)
describes_version = describes(
    "The version, what is computed with, and what block hashes are made of.",
    {"version": str, "prefix_hash": (_PREFIX_HASH, None)},
)


def health_router(
    engine: AsyncEngine,
    served: ServedModel,
    flags: Mapping[str, Any],
    events: EventPublisher | None = None,
) -> Router:
    """The endpoints, for one engine started with `flags`, whose `events` are published."""
    router = Router()
    labelled = LabelledMetrics(
        engine.metrics, prefix=served.metrics_prefix, model_name=served.names[0]
    )

    async def health() -> Response:
        if engine.dead is not None:
            raise engine.dead
        return Response()

    async def states() -> list[dict[str, Any]]:
        return [engine_state(engine)]

    add_states(router, health, states)

    @router.get("/server_info")
    @describes_server_info
    async def server_info() -> dict[str, Any]:
        control = engine.control
        return {
            "version": VERSION,
            "model": served.root,
            "served_model_names": served.names,
            "max_model_len": engine.max_model_len,
            "prefix_hash": asdict(control.prefix_hash_info()),
            "groups": control.groups,
            "num_blocks": control.num_blocks,
            "kv_events": None if events is None else events.endpoints,
            "flags": to_jsonable_python(flags, fallback=str),
        }

    @router.get("/version")
    @describes_version
    async def show_version() -> dict[str, Any]:
        control = None if engine.dead else engine.control
        weights = None if control is None else control.weights_info()
        return {
            "version": VERSION,
            "batch_invariant": served.batch_invariant,
            "dtype": served.dtype,
            "kv_cache_dtype": served.kv_dtype,
            "cpu_activations": served.activations,
            "weights": None if weights is None else asdict(weights),
            "prefix_hash": None if control is None else asdict(control.prefix_hash_info()),
        }

    @router.get("/metrics")
    @describes_metrics
    def metrics() -> Response:
        text = generate_latest(labelled)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    return router


def engine_state(engine: AsyncEngine) -> dict[str, Any]:
    """How busy an engine is, and whether it computes."""
    control, gauges = engine.control, engine.metrics.gauges()
    return {
        "running": gauges.num_running,
        "waiting": gauges.num_waiting,
        "is_paused": control.is_paused,
        "is_sleeping": control.is_sleeping,
        "halted": _halted(control),
    }


def _halted(control: Control) -> str | None:
    """What an engine that computes nothing now is called; None where it computes."""
    if control.is_sleeping:
        return "asleep"
    if control.is_paused:
        return "paused"
    return "updating" if control.is_updating else None


def add_states(
    router: Router,
    health: Callable[[], Awaitable[Response]],
    states: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
) -> None:
    """What balancers ask, under all of their paths and methods; see `engine_state`."""

    async def ready() -> Response:
        for state in await states():
            if (halted := state["halted"]) is not None:
                raise ApiError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"The engine is {halted}: it computes nothing until an administrator calls it "
                    "back.",
                    code=f"engine_{halted}",
                )
        return Response()

    probes = (
        ("/health", health, "200 while answers can be computed."),
        ("/ping", health, "As /health, for probes that ask there."),
        ("/ready", ready, "200 while requests are computed: not asleep or paused."),
    )
    for path, probe, summary in probes:
        router.get(path, summary=summary)(probe)
        router.route(path, "HEAD", include_in_schema=False)(probe)
    router.post("/ping", include_in_schema=False)(health)

    @router.get("/load")
    @describes(
        "How many requests the engine has.", {"server_load": int, "running": int, "waiting": int}
    )
    async def load() -> dict[str, int]:
        all_states = await states()
        running, waiting = (
            sum(state[name] for state in all_states) for name in ("running", "waiting")
        )
        return {"server_load": running + waiting, "running": running, "waiting": waiting}

    @router.get("/is_paused")
    @describes("Whether requests wait.", {"is_paused": bool})
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": any(state["is_paused"] for state in await states())}

    @router.get("/is_sleeping")
    @describes("Whether memory was given back.", {"is_sleeping": bool})
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": any(state["is_sleeping"] for state in await states())}
