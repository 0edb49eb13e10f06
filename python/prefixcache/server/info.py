"""What operators ask for: the model's name, health, version, metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from prefixcache.metrics import LabelledMetrics
from prefixcache.server.job_maker import JobMaker


def info_router(maker: JobMaker, version: str) -> APIRouter:
    """The endpoints, for one engine."""
    router = APIRouter()
    engine, served = maker.engine, maker.served
    labelled = LabelledMetrics(engine.metrics, model_name=served.names[0])

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(maker, name) for name in served.names]}

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        return _card(maker, maker.check_model(name))

    @router.get("/health")
    async def health() -> Response:
        if engine.dead is not None:
            raise engine.dead
        return Response()

    @router.get("/version")
    async def show_version() -> dict[str, Any]:
        return {
            "version": version,
            "batch_invariant": served.batch_invariant,
            "prefix_hash": None if engine.dead else asdict(engine.control.prefix_hash_info()),
        }

    @router.get("/metrics")
    def metrics() -> Response:
        text = generate_latest(labelled)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    return router


def _card(maker: JobMaker, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": maker.served.created,
        "owned_by": "prefixcache",
        "root": maker.served.root or name,
        "parent": None,
        "max_model_len": maker.engine.max_model_len,
    }
