"""What clients of any OpenAI-compatible server need: a connection, and answers as streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from prefixcache.config.checked import is_object
from prefixcache.exceptions import PrefixCacheError

T = TypeVar("T")

_SHOWN = 300
_ENDINGS = ("stop", "length", "tool_calls", "function_call")
_CONNECT_SECONDS = 10.0


class StreamError(PrefixCacheError):
    """A server does not answer, or in another form than the API's."""


class RefusedStreamError(StreamError):
    """The server answered with an error, at once or within the stream; `code` is OpenAI's."""

    def __init__(self, message: str, code: object = None) -> None:
        super().__init__(message)
        self.code = code


def server_root(url: str) -> str:
    """The address of a server's own paths; `url` may end in `/v1`, as OpenAI's clients have it."""
    return url.rstrip("/").removesuffix("/v1")


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """The tokens of a prompt that came from a cache, where the server says it."""
    details: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


def open_client(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """A client of the server at `url`; requests may take any time."""
    return httpx.AsyncClient(
        base_url=server_root(url),
        timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )


async def side_by_side(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return; the first that fails ends the others before its error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
            if (event := read_event(line)) is not None:
                yield event


def read_event(line: str) -> dict[str, Any] | None:
    """The event that a line of a stream holds; None for other lines. Raises `StreamError`."""
    data = line.removeprefix("data:").strip()
    return _event(data) if line.startswith("data:") and data != "[DONE]" else None


def choice_text(choice: Mapping[str, Any]) -> str:
    """What an event's choice adds to a completion or a chat, reasoning too.

    Reasoning is `reasoning_content` or, at recent vLLM, `reasoning`; some servers send both.
    """
    delta: Mapping[str, Any] = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return reasoning + (delta.get("content") or choice.get("text") or "")


def check_ending(finish_reason: str) -> None:
    """Raises `RefusedStreamError` where the server left an answer before its end."""
    if finish_reason not in _ENDINGS:
        raise RefusedStreamError(f"The server ended an answer with {cut(finish_reason)}.")


def first_card(models: httpx.Response, named: str | None) -> dict[str, Any]:
    """The first entry of `/v1/models`; nothing where a model is named and the server lists none.

    Raises `StreamError` where none is named either.
    """
    try:
        check_status(models)
        card = models.json()["data"][0]
        if card["id"]:
            return card
    except (RefusedStreamError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, RefusedStreamError) and not named:
            raise
    if named:
        return {}
    raise StreamError(f"{models.request.url} lists no model; name one by --model.")


def has_hit_thresholds(card: Mapping[str, Any]) -> bool:
    """Whether an entry of `/v1/models` is of a server that may refuse what is not cached."""
    return card.get("owned_by") == "prefixcache"


def check_status(reply: httpx.Response) -> None:
    """Raises `RefusedStreamError` for an error's status; the body has been read."""
    if not reply.is_error:
        return
    request, text, code = reply.request, reply.text, None
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        error = reply.json()["error"]
        text, code = str(error["message"]), error.get("code")
    is_page = "html" in reply.headers.get("content-type", "")
    text = "a web page: is this an OpenAI-compatible server?" if is_page else cut(text)
    raise RefusedStreamError(f"{request.method} {request.url}: {reply.status_code} {text}", code)


def reason(error: httpx.HTTPError) -> str:
    """Why a server cannot be reached; some errors of httpx have no text."""
    return str(error) or type(error).__name__


def cut(text: str) -> str:
    """As much of the text as an error shows."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _event(data: str) -> dict[str, Any]:
    try:
        event: object = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not is_object(event):
        raise StreamError(f"The server sent an event that is no JSON object: {cut(data)}")
    if event.get("error"):
        raise RefusedStreamError(f"The server sent an error: {cut(data)}")
    return event
