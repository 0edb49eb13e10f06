"""New weights over HTTP: `POST /weights/begin`, `/weights/chunk`, `/weights/end`, `/weights/abort`.

The body of a chunk is a file of safetensors, or names one in shared memory. Only administrators may
call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

from starlette.requests import ClientDisconnect, Request

from prefixcache.engine.weights.weights_push import DEFAULT_TIMEOUT
from prefixcache.exceptions import InvalidRequestError
from prefixcache.server.admin.admin import NEW_WEIGHTS, read_options, required, weights_fields
from prefixcache.server.http.body import RequestFields, media_type
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.routes import Router, describes, describes_command
from prefixcache.types.modes import InFlightMode

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.control import Control

MAX_CHUNK_BYTES = 256 * 2**20
_BYTES = "application/octet-stream"
_TOUCHES_EVERY = 1.0


class BeginWeightsRequest(RequestFields):
    """Options of `POST /weights/begin`."""

    timeout: float | int | None = None


class WeightsChunkRequest(RequestFields):
    """A chunk that lies in /dev/shm; other bodies of `POST /weights/chunk` are the chunk."""

    max_lengths: ClassVar[dict[str, int]] = {"update_id": 64, "shm_name": 255}

    update_id: str | None = None
    shm_name: str | None = None


class EndWeightsRequest(RequestFields):
    """Options of `POST /weights/end`."""

    max_lengths: ClassVar[dict[str, int]] = {"update_id": 64, "digest": 64}

    update_id: str | None = None
    digest: str | None = None
    weight_version: str | None = None
    mode: InFlightMode | None = None
    full: bool | None = None


class AbortWeightsRequest(RequestFields):
    """Options of `POST /weights/abort`."""

    max_lengths: ClassVar[dict[str, int]] = {"update_id": 64}

    update_id: str | None = None


def weights_push_router(engine: AsyncEngine) -> Router:
    """The endpoints, for one engine."""
    router, push = Router(), engine.control.weights_push
    one_at_a_time = asyncio.Lock()

    @router.post("/weights/begin")
    @describes_command(BeginWeightsRequest, {"update_id": str, "max_chunk_bytes": int})
    async def begin(request: Request) -> dict[str, Any]:
        """Opens an update of the weights that come in chunks."""
        fields = await read_options(request, BeginWeightsRequest)
        timeout = DEFAULT_TIMEOUT if fields.timeout is None else fields.timeout
        update_id = await asyncio.to_thread(push.begin, timeout)
        return {"update_id": update_id, "max_chunk_bytes": MAX_CHUNK_BYTES}

    @router.post("/weights/chunk")
    @describes_command(WeightsChunkRequest, {"num_tensors": int, "staged_bytes": int})
    async def chunk(request: Request) -> dict[str, int]:
        """Takes tensors of an open update: safetensors, in the body or in shared memory."""
        if media_type(request) == _BYTES:
            update_id = required("update_id", request.query_params.get("update_id"))
            async with one_at_a_time:
                pieces = [piece async for piece in _pieces(request, partial(push.touch, update_id))]
                added = await asyncio.to_thread(push.add_pieces, update_id, pieces)
        else:
            fields = await read_options(request, WeightsChunkRequest)
            update_id = required("update_id", fields.update_id)
            name = required("shm_name", fields.shm_name)
            added = await asyncio.to_thread(push.add_shared, update_id, name)
        return {"num_tensors": added, "staged_bytes": push.staged_bytes}

    @router.post("/weights/end")
    @describes_command(EndWeightsRequest, {**NEW_WEIGHTS})
    async def end(request: Request) -> dict[str, Any]:
        """Ends an update: requests are computed with the new weights from then on."""
        fields = await read_options(request, EndWeightsRequest)
        return await engine.run(partial(_end, fields=fields))

    @router.post("/weights/abort")
    @describes_command(AbortWeightsRequest)
    async def abort(request: Request) -> None:
        """Drops an update; the old weights serve on."""
        fields = await read_options(request, AbortWeightsRequest)
        await asyncio.to_thread(push.abort, required("update_id", fields.update_id))

    @router.get("/weights/status")
    @describes(
        "Whether an update of the weights is open, and what has come of it.",
        {"is_open": bool, "staged_bytes": int},
    )
    async def status() -> dict[str, Any]:
        return {"is_open": push.is_open, "staged_bytes": push.staged_bytes}

    return router


def _end(control: Control, fields: EndWeightsRequest) -> dict[str, Any]:
    version = control.weights_push.end(
        required("update_id", fields.update_id),
        digest=fields.digest,
        weight_version=fields.weight_version,
        mode=fields.mode or "recompute",
        full=fields.full is not False,
    )
    return weights_fields(fields.weight_version or version, control.prefix_hash_info())


async def _pieces(request: Request, touch: Any) -> AsyncIterator[bytes]:
    """The body as it comes. `touch` is called now and then, and fails for an unknown update."""
    size, touched = 0, 0.0
    try:
        async for piece in request.stream():
            if time.monotonic() - touched >= _TOUCHES_EVERY:
                # Not on the event loop: it waits while another call uses the update.
                await asyncio.to_thread(touch)
                touched = time.monotonic()
            size += len(piece)
            if size > MAX_CHUNK_BYTES:
                raise ApiError(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"A chunk may have at most {MAX_CHUNK_BYTES} bytes; send the tensors in "
                    "several, or in shared memory.",
                    code="body_too_large",
                )
            yield piece
    except ClientDisconnect:
        raise InvalidRequestError("The client went away before the chunk ended.") from None
