"""examples/decode_first.py: prompts go to the prefill server until the decode server has enough."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from starlette.applications import Starlette

from prefixcache.engine.async_engine import AsyncEngine
from support.serving import MODEL, client_of, events, running, serve_folder

EXAMPLE = Path(__file__).parents[3] / "examples/decode_first.py"
PROMPT = list(range(40, 90))


def create_app(decode: str, prefill: str, threshold: float) -> Starlette:
    spec = importlib.util.spec_from_file_location("decode_first", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.create_app(decode, prefill, threshold)


@asynccontextmanager
async def two_servers(
    folder: Path,
) -> AsyncGenerator[tuple[httpx.AsyncClient, list[AsyncEngine], list[str]], None]:
    """A client of the example, the engines behind it, decode first, and their addresses."""
    async with AsyncExitStack() as stack:
        engines, addresses = [], []
        for _ in range(2):
            app, engine = serve_folder(folder)
            stack.push_async_callback(engine.shutdown)
            engines.append(engine)
            addresses.append(stack.enter_context(running(app)))
        app = create_app(*addresses, threshold=0.5)
        await stack.enter_async_context(app.router.lifespan_context(app))
        client = await stack.enter_async_context(client_of(app))
        yield client, engines, addresses


def answered_by(engines: list[AsyncEngine]) -> list[int]:
    """Requests that each engine computed, decode first."""
    return [engine.metrics.finished["length"] for engine in engines]


async def test_each_server_answers_what_is_its_own(tiny_checkpoint: Callable[..., Path]) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    async with two_servers(tiny_checkpoint()) as (client, engines, (decode, _)):
        cold = await client.post("/v1/completions", json=body)
        assert answered_by(engines) == [0, 1]
        async with httpx.AsyncClient(timeout=240) as direct:
            await direct.post(decode + "/v1/completions", json=body)
        warm = await client.post("/v1/completions", json=body)
        assert answered_by(engines) == [2, 1]
        streamed = await client.post("/v1/completions", json=body | {"stream": True})
        assert answered_by(engines) == [3, 1]
    (cold_choice,), (warm_choice,) = cold.json()["choices"], warm.json()["choices"]
    assert cold_choice == warm_choice
    text = "".join(event["choices"][0]["text"] for event in events(streamed.text))
    assert text == cold_choice["text"]


async def test_a_refused_stream_shows_nothing_of_it(tiny_checkpoint: Callable[..., Path]) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with two_servers(tiny_checkpoint()) as (client, engines, _):
        streamed = await client.post("/v1/chat/completions", json=chat | {"stream": True})
        assert answered_by(engines) == [0, 1]
        wrong = await client.post("/v1/chat/completions", json=chat | {"max_tokens": -2})
        no_json = await client.post("/v1/completions", json=[1])
    reasons = [event["choices"][0]["finish_reason"] for event in events(streamed.text)]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert (wrong.status_code, no_json.status_code) == (400, 400)
    assert "max_tokens" in wrong.text
