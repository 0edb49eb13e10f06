"""`GET /prefix_cache/snapshot`: all that is cached, for who begins to read KV events in mid-day.

The administrator's: it shows the tokens of prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from prefixcache.exceptions import InvalidRequestError
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.routes import Router, describes
from prefixcache.server.http.workers import Workers

if TYPE_CHECKING:
    from prefixcache.events.publisher import EventPublisher

# Each holds a copy of what is cached, names and tokens, until it is read or its reader is gone.
_MOST_AT_ONCE = 4
_RETRY_SECONDS = 5


def kv_events_router(events: EventPublisher | None, workers: Workers) -> Router:
    """The endpoint, for the cache whose events are published."""
    router, reading = Router(), asyncio.BoundedSemaphore(_MOST_AT_ONCE)

    @router.get("/prefix_cache/snapshot")
    @describes("All that is cached, as a stream of msgpack objects, for readers of KV events.", str)
    async def read_snapshot() -> Response:
        if events is None:
            raise InvalidRequestError(
                "/prefix_cache/snapshot needs a server with --kv-events-config.",
                code="kv_events_off",
            )
        if reading.locked():
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{_MOST_AT_ONCE} snapshots are being read.",
                code="too_many_snapshots",
                retry_after=_RETRY_SECONDS,
            )
        return _SnapshotResponse(events, workers, reading)

    return router


class _SnapshotResponse(StreamingResponse):
    """Takes the snapshot as it is sent, and counts as one until its reader is done or gone."""

    def __init__(
        self, events: EventPublisher, workers: Workers, reading: asyncio.BoundedSemaphore
    ) -> None:
        super().__init__(_parts(events, workers), media_type="application/vnd.msgpack")
        self._reading = reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._reading:
            await super().__call__(scope, receive, send)


async def _parts(events: EventPublisher, workers: Workers) -> AsyncIterator[bytes]:
    snapshot = await workers.in_thread(events.snapshot)
    while part := await workers.in_thread(snapshot.next_part):
        yield part
