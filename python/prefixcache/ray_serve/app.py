"""The ASGI application of an ingress: the server's endpoints, over all replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_jsonable_python
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response

from prefixcache.engine.control import Control
from prefixcache.ray_serve.replicas.commands import CommandClient
from prefixcache.ray_serve.replicas.replica_set import ReplicaSet
from prefixcache.ray_serve.replicas.replica_state import UPDATE_WEIGHTS
from prefixcache.ray_serve.routed_engine import RoutedEngine
from prefixcache.server.admin.admin import (
    add_changes,
    add_commands,
    describes_resizing,
    describes_stats,
)
from prefixcache.server.admin.health import (
    add_states,
    describes_metrics,
    describes_server_info,
    describes_version,
)
from prefixcache.server.admin.model_dirs import ModelDirs
from prefixcache.server.app import client_app, guard
from prefixcache.server.http.access import AccessRules
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.routes import Router
from prefixcache.server.jobs.context import Lifecycle
from prefixcache.server.jobs.job_maker import JobMaker
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.openai.response_store import ResponseStore
from prefixcache.server.options.limits import ServerLimits
from prefixcache.server.options.version import VERSION

# What one server answers and replicas together do not, each with where to ask instead.
_DIAGNOSES = "`prefixcache serve` explains misses of one cache; /prefix_cache/probe works here."
_PUSHES = "/update_weights_from_disk reaches every replica, from a folder that each can read."
_NOT_SERVED = {
    **{("POST", f"/weights/{call}"): _PUSHES for call in ("begin", "chunk", "end", "abort")},
    ("GET", "/weights/status"): _PUSHES,
    ("POST", "/prefix_cache/explain"): _DIAGNOSES,
    ("GET", "/prefix_cache/misses"): _DIAGNOSES,
    ("GET", "/chat"): "`prefixcache chat` talks to the replicas in a terminal.",
    ("GET", "/dashboard"): "/metrics and /prefix_cache/stats tell of each replica.",
    ("GET", "/prefix_cache/snapshot"): (
        "Each replica has a cache of its own, and publishes its events where /server_info says "
        "(`kv_events`); their replay reaches back some way."
    ),
}


def create_ingress_app(
    engine: RoutedEngine,
    replicas: ReplicaSet,
    commands: CommandClient,
    served: ServedModel,
    *,
    rules: AccessRules,
    model_dirs: ModelDirs,
    limits: ServerLimits,
    flags: Mapping[str, Any],
) -> Starlette:
    """The application over the replicas of `engine`: `replicas` asks them, `commands` changes."""
    maker = JobMaker(engine=engine, served=served)
    app = client_app(maker, ResponseStore())
    app.include_router(_health_router(replicas))
    app.include_router(_info_router(replicas, served, flags))
    app.include_router(_command_router(commands, model_dirs))
    app.include_router(_not_served_router())
    guard(app, rules, lifecycle=Lifecycle(), limits=limits, strict=served.strict)
    return app


def _command_router(commands: CommandClient, model_dirs: ModelDirs) -> Router:
    router = Router()
    add_commands(
        router,
        Control.endpoints(),
        lambda command, given: commands.give(command.__name__, **given),
    )
    add_changes(
        router, partial(commands.give, "resize"), partial(commands.give, UPDATE_WEIGHTS), model_dirs
    )
    return router


def _health_router(replicas: ReplicaSet) -> Router:
    router = Router()

    async def health() -> Response:
        await replicas.statuses()
        return Response()

    add_states(router, health, replicas.statuses)
    return router


def _info_router(replicas: ReplicaSet, served: ServedModel, flags: Mapping[str, Any]) -> Router:
    router = Router()
    names = ("batch_invariant", "dtype", "weights", "prefix_hash")

    @router.get("/version")
    @describes_version
    async def show_version() -> dict[str, Any]:
        about = await replicas.about()
        shown = {name: about[0][name] for name in names}
        renamed = {
            "cpu_activations": about[0]["activations"],
            "kv_cache_dtype": about[0]["kv_dtype"],
        }
        return {"version": VERSION, **renamed, **shown}

    @router.get("/server_info")
    @describes_server_info
    async def server_info() -> dict[str, Any]:
        about = await replicas.about()
        return {
            "version": VERSION,
            "model": served.root,
            "served_model_names": served.names,
            "max_model_len": about[0]["max_model_len"],
            "prefix_hash": about[0]["prefix_hash"],
            "replicas": about,
            "flags": to_jsonable_python(flags, fallback=str),
        }

    @router.get("/metrics")
    @describes_metrics
    async def metrics() -> Response:
        text = await replicas.metrics()
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/prefix_cache/stats")
    @describes_stats
    async def prefix_cache_stats() -> dict[str, Any]:
        statuses = await replicas.statuses()
        return {"replicas": {status["replica"]: status["prefix_cache"] for status in statuses}}

    @router.get("/prefix_cache/resize")
    @describes_resizing
    async def resize_status() -> dict[str, Any]:
        statuses = await replicas.statuses()
        return {"replicas": {status["replica"]: status["resize"] for status in statuses}}

    return router


def _not_served_router() -> Router:
    """Answers 501 by their names, so that nobody takes them for a wrong address."""
    router = Router()
    for (method, path), instead in _NOT_SERVED.items():
        router.route(path, method, include_in_schema=False)(_refusal(path, instead))
    return router


def _refusal(path: str, instead: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise ApiError(
            HTTPStatus.NOT_IMPLEMENTED,
            f"{path} is not served by `prefixcache serve-ray`. {instead}",
            code="unsupported_endpoint",
        )

    return refuse
