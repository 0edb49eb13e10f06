"""A decode server answers what it has enough of in its cache; the rest goes to a prefill server.

    prefixcache serve MODEL --port 8001
    prefixcache serve MODEL --port 8002
    python examples/decode_first.py --decode http://127.0.0.1:8001 --prefill http://127.0.0.1:8002

Clients use http://127.0.0.1:8000/v1/completions and /v1/chat/completions as they would one server.
The decode server is asked with `cache_hit_threshold`: where less of the prompt is cached, it
computes nothing and its finish reason is `cache_threshold`. Nothing carries KV from one server
to the other: what the decode server is to answer is warmed there, as by POST /prefix_cache/warm.
"""

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


class DecodeFirst:
    """Asks `decode`, and `prefill` where the former has less than `threshold` of a prompt."""

    def __init__(
        self, client: httpx.AsyncClient, decode: str, prefill: str, threshold: float
    ) -> None:
        self._client = client
        self._decode, self._prefill, self._threshold = decode, prefill, threshold

    async def answer(self, request: Request) -> StreamingResponse:
        """What the server that takes the request answers, as it comes."""
        body = await request.body()
        async with AsyncExitStack() as stack:
            response = await stack.enter_async_context(
                self._ask(self._decode, request, with_threshold(body, self._threshold))
            )
            parts = response.aiter_raw()
            begin = await read_beginning(parts)
            if is_refused(begin):
                await stack.aclose()
                response = await stack.enter_async_context(self._ask(self._prefill, request, body))
                begin, parts = b"", response.aiter_raw()
            kept = stack.pop_all()
        return StreamingResponse(
            pass_on(kept, begin, parts),
            response.status_code,
            media_type=response.headers["content-type"],
        )

    def _ask(self, server: str, request: Request, body: bytes) -> Any:
        names = ("authorization", "content-type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        url = server + request.url.path
        return self._client.stream(
            "POST", url, content=body, headers=headers | {"accept-encoding": "identity"}
        )


def with_threshold(body: bytes, threshold: float) -> bytes:
    """The request with a threshold, unless it has one; a wrong one is the server's to refuse."""
    with suppress(ValueError, TypeError):
        return json.dumps({"cache_hit_threshold": threshold} | json.loads(body)).encode()
    return body


async def read_beginning(parts: AsyncIterator[bytes]) -> bytes:
    """A whole answer, or a stream up to its first token or its end."""
    begin = b""
    async for part in parts:
        begin += part
        if any(has_begun(choice) for choice in choices(begin)):
            break
    return begin


def choices(answer: bytes) -> list[dict[str, Any]]:
    """The choices of an answer, or of the events of a stream."""
    found: list[dict[str, Any]] = []
    for line in answer.decode(errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError):  # half an event, [DONE], an error
            found += json.loads(line.removeprefix("data: "))["choices"]
    return found


def has_begun(choice: dict[str, Any]) -> bool:
    """Whether this is part of an answer: a chat's first event has the role alone."""
    return bool(choice.get("text")) or any(
        value for name, value in choice.get("delta", {}).items() if name != "role"
    )


def is_refused(answer: bytes) -> bool:
    """Whether a server had too little of the prompt."""
    return any(choice.get("finish_reason") == "cache_threshold" for choice in choices(answer))


async def pass_on(
    kept: AsyncExitStack, begin: bytes, parts: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """The rest; a client that leaves ends the request at the server as well."""
    async with kept:
        yield begin
        async for part in parts:
            yield part


def create_app(decode: str, prefill: str, threshold: float) -> Starlette:
    """Both endpoints."""
    client = httpx.AsyncClient(timeout=None)

    @asynccontextmanager
    async def closing_client(_app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    first = DecodeFirst(client, decode, prefill, threshold)
    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [Route(path, first.answer, methods=["POST"]) for path in paths]
    return Starlette(routes=routes, lifespan=closing_client)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decode", required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument(
        "--threshold", type=float, default=0.5, help="share of the prompt (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    app = create_app(args.decode, args.prefill, args.threshold)
    uvicorn.run(app, host="127.0.0.1", port=args.port)
