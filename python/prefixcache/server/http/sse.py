"""Answers that end when the client leaves: its requests are aborted and their blocks freed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prefixcache.server.http.json_text import json_pieces, json_text

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_COMMENT = b": ping\n\n"


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % json_text(payload)


def named_event(payload: dict[str, Any]) -> bytes:
    """One server-sent event under the name that its payload has as `type`."""
    return b"".join(
        (b"event: ", payload["type"].encode(), b"\ndata: ", *json_pieces(payload), b"\n\n")
    )


class EventStream(Response):
    """A `text/event-stream` answer. The generator is closed however the answer ends.

    After `ping_seconds` without an event, and before twice as many, a comment is sent: proxies
    close connections that are silent for long, as they are in the prefill of a long prompt.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, ping_seconds: float = 15) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._ping_seconds = ping_seconds
        self._silent_since: float | None = None  # None while something is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Streams until the events or the client end."""
        ping = partial(self._ping, send)
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, self._stream(send), ping, self._ping_seconds)

    async def _stream(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._events) as events:
            await send(head)
            self._silent_since = clock()
            async for body in events:
                self._silent_since = None
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._silent_since = clock()
        self._silent_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        now = asyncio.get_running_loop().time()
        if self._silent_since is not None and now - self._silent_since >= self._ping_seconds:
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


async def unless_disconnected(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    ping: Callable[[], Awaitable[None]] | None = None,
    ping_seconds: float | None = None,
) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    `ping` is called every `ping_seconds` meanwhile. Raises `ClientDisconnect` when the client
    leaves. The body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    first = partial(asyncio.wait, (working, leaving), return_when=asyncio.FIRST_COMPLETED)
    try:
        while not (await first(timeout=ping_seconds))[0]:
            if ping is not None:
                await ping()
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
