"""Control of a running engine: cache, weights, pause and sleep, at the paths of vLLM and SGLang.

Options are read from the query string, as vLLM's clients send them, and from a JSON body.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from prefixcache.engine.modes import InFlightMode, MemoryTag, SleepMode
from prefixcache.exceptions import InvalidRequestError
from prefixcache.server.backend import EngineClient
from prefixcache.server.body import Fields, parse_fields, parse_object, read_body
from prefixcache.server.model_dirs import ModelDirs
from prefixcache.server.protocol import RequestFields, invalid_field

_LISTS = ("tags",)


class PauseRequest(RequestFields):
    """Options of `POST /pause`."""

    mode: InFlightMode | None = None


class SleepRequest(RequestFields):
    """Options of `POST /sleep`."""

    level: int | None = None
    mode: SleepMode | None = None


class WakeUpRequest(RequestFields):
    """Options of `POST /wake_up`."""

    tags: list[MemoryTag] | None = None


class UpdateWeightsRequest(RequestFields):
    """Options of `POST /update_weights_from_disk`; `abort_all_requests` is mode "abort"."""

    no_effect = frozenset(
        {"recapture_cuda_graph", "token_step", "torch_empty_cache", "weight_version"}
    )
    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "flush_cache": (True,),
        "is_async": (False,),
        "keep_pause": (False,),
        "load_format": ("auto", "safetensors"),
    }

    model_path: str | None = None
    revision: str | None = None
    mode: InFlightMode | None = None
    abort_all_requests: bool | None = None

    def chosen_path(self) -> str:
        """Where the weights are. Raises `InvalidRequestError` when that is left out."""
        if self.model_path is None:
            raise InvalidRequestError("model_path is required.", param="model_path")
        return self.model_path

    def chosen_mode(self) -> InFlightMode:
        """What happens to requests in flight. Raises `InvalidRequestError` for two answers."""
        if not self.abort_all_requests:
            return self.mode or "recompute"
        if self.mode not in (None, "abort"):
            raise InvalidRequestError(
                f"mode is {self.mode!r}, but abort_all_requests is true.", param="mode"
            )
        return "abort"


def admin_router(engine: EngineClient, model_dirs: ModelDirs) -> APIRouter:
    """The endpoints, for one engine."""
    router = APIRouter()
    _add_cache(router, engine)
    _add_pausing(router, engine)
    _add_sleeping(router, engine)

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> dict[str, Any]:
        fields = await read_options(request, UpdateWeightsRequest)
        path, mode = fields.chosen_path(), fields.chosen_mode()
        with model_dirs.checked(path) as found:
            version = await engine.update_weights_from_disk(found, mode, revision=fields.revision)
        message = f"The weights are those of {path}."
        return {"success": True, "message": message, "weight_version": version}

    return router


async def read_options(request: Request, model: type[Fields]) -> Fields:
    """Options of both places; the body's win. Raises `InvalidRequestError` naming a wrong one."""
    given = _query(request, model)
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        given.update(await asyncio.to_thread(parse_object, await read_body(request)))
    return parse_fields(given, model)


def _query(request: Request, model: type[Fields]) -> dict[str, Any]:
    """The query's options, each text read as its field's type wants it."""
    query = request.query_params
    texts = {name: text for name, text in query.items() if name not in _LISTS}
    try:
        given = model.model_validate_strings(texts).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise invalid_field(error) from None
    return given | {name: query.getlist(name) for name in _LISTS if name in query}


def _add_cache(router: APIRouter, engine: EngineClient) -> None:
    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await engine.reset_prefix_cache()
        return Response()

    @router.get("/prefix_cache/stats")
    async def prefix_cache_stats() -> dict[str, Any]:
        return dataclasses.asdict(await engine.prefix_cache_stats())


def _add_pausing(router: APIRouter, engine: EngineClient) -> None:
    @router.post("/pause")
    async def pause(request: Request) -> Response:
        fields = await read_options(request, PauseRequest)
        await engine.pause(fields.mode or "keep")
        return Response()

    @router.post("/resume")
    async def resume() -> Response:
        await engine.resume()
        return Response()

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await engine.is_paused()}


def _add_sleeping(router: APIRouter, engine: EngineClient) -> None:
    @router.post("/sleep")
    async def sleep(request: Request) -> Response:
        fields = await read_options(request, SleepRequest)
        level = 1 if fields.level is None else fields.level
        await engine.sleep(level, fields.mode or "recompute")
        return Response()

    @router.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        fields = await read_options(request, WakeUpRequest)
        await engine.wake_up(fields.tags)
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": await engine.is_sleeping()}
