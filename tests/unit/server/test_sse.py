"""Streams of server-sent events: what is sent while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from prefixcache.server.http.sse import DONE, EventStream

_SCOPE = {"type": "http"}
_SECONDS = 0.001


async def _receive() -> dict[str, Any]:
    """A client that stays."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_silent_stream_sends_comments_until_an_event_comes():
    sent: list[dict[str, Any]] = []
    enough = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await enough.wait()
        yield DONE

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) == 3:
            enough.set()

    stream = EventStream(events(), ping_seconds=_SECONDS)
    await asyncio.wait_for(stream(_SCOPE, _receive, send), timeout=240)
    assert sent[0]["type"] == "http.response.start"
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[:2] == [b": ping\n\n"] * 2
    assert bodies[-2:] == [DONE, b""]
    assert set(bodies[:-2]) == {b": ping\n\n"}
    assert [message["more_body"] for message in sent[1:]] == [*[True] * (len(bodies) - 1), False]


async def test_nothing_comes_between_while_a_slow_client_takes_the_last_of_it():
    begun: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield DONE

    async def send(message: dict[str, Any]) -> None:
        begun.append(message.get("body", b"head"))
        await asyncio.sleep(20 * _SECONDS)

    stream = EventStream(events(), ping_seconds=_SECONDS)
    await stream(_SCOPE, _receive, send)
    assert begun == [b"head", DONE, b""]
