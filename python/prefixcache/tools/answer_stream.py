"""The streamed answers of OpenAI's API, as clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import httpx

from prefixcache.exceptions import PrefixCacheError

_SHOWN = 300


class StreamError(PrefixCacheError):
    """A stream is not of the API's form."""


class RefusedStreamError(StreamError):
    """The server answered with an error, at once or within the stream."""


async def stream_events(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of the answer to one POST, without the mark of its end.

    Raises `StreamError`, and httpx's own errors where the server is gone.
    """
    async with client.stream("POST", path, json=body) as reply:
        if reply.is_error:
            await reply.aread()
            check_status(reply)
        async for line in reply.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                yield _event(data)


def check_status(reply: httpx.Response) -> None:
    """Raises `RefusedStreamError` for an error's status; the body has been read."""
    if reply.is_error:
        request = reply.request
        told = f"{request.method} {request.url}: {reply.status_code} {cut(reply.text)}"
        raise RefusedStreamError(told)


def cut(text: str) -> str:
    """As much of the text as an error shows."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _event(data: str) -> dict[str, Any]:
    try:
        event: object = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise StreamError(f"The server sent an event that is no JSON object: {cut(data)}")
    event = cast("dict[str, Any]", event)
    if event.get("error"):
        raise RefusedStreamError(f"The server sent an error: {cut(data)}")
    return event
