"""What one server answers and replicas together do not, each with where to ask instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import APIRouter

from prefixcache.server.http.errors import ApiError

_DIAGNOSES = "`prefixcache serve` explains misses of one cache; /prefix_cache/probe works here."
_PUSHES = "/update_weights_from_disk reaches every replica, from a folder that each can read."
_NOT_SERVED = {
    **{("POST", f"/weights/{call}"): _PUSHES for call in ("begin", "chunk", "end", "abort")},
    ("GET", "/weights/status"): _PUSHES,
    ("POST", "/prefix_cache/explain"): _DIAGNOSES,
    ("GET", "/prefix_cache/misses"): _DIAGNOSES,
    ("GET", "/dashboard"): "/metrics and /prefix_cache/stats tell of each replica.",
    ("GET", "/prefix_cache/snapshot"): (
        "Each replica has a cache of its own, and publishes its events where /server_info says "
        "(`kv_events`); their replay reaches back some way."
    ),
}


def not_served_router() -> APIRouter:
    """Answers 501 by their names, so that nobody takes them for a wrong address."""
    router = APIRouter()
    for (method, path), instead in _NOT_SERVED.items():
        router.add_api_route(
            path, _refusal(path, instead), methods=[method], include_in_schema=False
        )
    return router


def _refusal(path: str, instead: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise ApiError(
            HTTPStatus.NOT_IMPLEMENTED,
            f"{path} is not served by `prefixcache serve-ray`. {instead}",
            code="unsupported_endpoint",
        )

    return refuse
