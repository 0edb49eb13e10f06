"""What probes, balancers and monitors ask: whether the server lives, is ready, and how it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_jsonable_python
from starlette.responses import Response

from prefixcache.metrics import LabelledMetrics
from prefixcache.server.http.errors import ApiError

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.control import Control
    from prefixcache.events.publisher import EventPublisher
    from prefixcache.server.jobs.served_model import ServedModel


def health_router(
    engine: AsyncEngine,
    served: ServedModel,
    version: str,
    flags: Mapping[str, Any],
    events: EventPublisher | None = None,
) -> APIRouter:
    """The endpoints, for one engine started with `flags`, whose `events` are published."""
    router = APIRouter()
    labelled = LabelledMetrics(
        engine.metrics, prefix=served.metrics_prefix, model_name=served.names[0]
    )

    async def health() -> Response:
        if engine.dead is not None:
            raise engine.dead
        return Response()

    async def ready() -> Response:
        raise_if_not_ready(halted_state(engine.control))
        return Response()

    add_probes(router, health, ready)

    @router.get("/load")
    async def load() -> dict[str, int]:
        gauges = engine.metrics.gauges()
        running, waiting = gauges.num_running, gauges.num_waiting
        return {"server_load": running + waiting, "running": running, "waiting": waiting}

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        control = engine.control
        return {
            "version": version,
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
    async def show_version() -> dict[str, Any]:
        weights = engine.control.weights_info()
        return {
            "version": version,
            "batch_invariant": served.batch_invariant,
            "dtype": served.dtype,
            "cpu_activations": served.activations,
            "weights": None if weights is None else asdict(weights),
            "prefix_hash": None if engine.dead else asdict(engine.control.prefix_hash_info()),
        }

    @router.get("/metrics")
    def metrics() -> Response:
        text = generate_latest(labelled)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    return router


def halted_state(control: Control) -> str | None:
    """What an engine that computes nothing now is called; None where it computes."""
    if control.is_sleeping:
        return "asleep"
    if control.is_paused:
        return "paused"
    return "updating" if control.is_updating else None


def raise_if_not_ready(halted: str | None) -> None:
    """Raises an `ApiError` of status 503 where an engine is `halted`; see `halted_state`."""
    if halted is not None:
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"The engine is {halted}: it computes nothing until an administrator calls it back.",
            code=f"engine_{halted}",
        )


def add_probes(
    router: APIRouter,
    health: Callable[[], Awaitable[Response]],
    ready: Callable[[], Awaitable[Response]],
) -> None:
    """Serves both under all paths and methods that load balancers ask."""
    for path, probe in {"/health": health, "/ping": health, "/ready": ready}.items():
        router.get(path)(probe)
        router.head(path, include_in_schema=False)(probe)
    router.post("/ping", include_in_schema=False)(health)
