"""What operators limit: time, memory of bodies, requests of a key; and what probes report."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.server.http.access import AccessRules
from prefixcache.server.jobs import answers
from prefixcache.server.options.limits import ServerLimits
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Ending, Request, RequestOutput, TokenLogprobs
from support.serving import (
    MODEL,
    FakeEngine,
    client_of,
    fake_app,
    serve_folder,
    served_folder,
    until,
)

BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
PATH, JSON = "/v1/completions", {"Content-Type": "application/json"}
SHORT = b'{"prompt": [1, 2, 3]}' + b" " * 10_000
KEYS = AccessRules(api_keys=("a", "b"), admin_api_keys=("root",))


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def in_use(engine: AsyncEngine) -> int:
    return engine.control.stats()["blocks_in_use"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_an_answer_that_takes_too_long_is_a_504_and_gives_its_blocks_back(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    access = {"limits": ServerLimits(request_seconds=600)}
    body = {**BODY, "messages": [{"role": "user", "content": "hi"}]}
    async with served_folder(tiny_checkpoint(), access=access) as (client, engine):
        begin = engine.generate_batches

        async def soon_over(*given: Any, deadline: float, **options: Any) -> Any:
            assert 0 < deadline - time.monotonic() <= 600
            return await begin(*given, deadline=time.monotonic() + 0.05, **options)

        monkeypatch.setattr(engine, "generate_batches", soon_over)
        await engine.run(lambda control: control.pause())
        whole = await client.post(path, json=body)
        streamed = await client.post(path, json={**body, "stream": True})
        await engine.run(lambda control: control.resume())
        await until(lambda: not in_use(engine) and not engine.num_streams)
    assert whole.status_code == 504
    assert whole.headers["X-Should-Retry"] == "false"
    assert whole.json()["error"]["type"] == "timeout_error"
    assert (streamed.status_code, "timeout_error" in streamed.text) == (200, True)


def _grammar(kind: str, text: Any) -> tuple[str, dict[str, Any]]:
    return PATH, {"prompt": "a", "structured_outputs": {kind: text}}


LONG: list[tuple[str, dict[str, Any], str | None]] = [
    (*_grammar("regex", "(" * 250_000), "structured_outputs.regex"),
    (*_grammar("grammar", "start: " + "a" * 250_000), "structured_outputs.grammar"),
    (*_grammar("json", {"type": "a" * 250_000}), "structured_outputs.json"),
    (
        *_grammar("json", {"properties": {"a" * 9999: {"type": "strin"}}}),
        "structured_outputs.json",
    ),
    (PATH, {"prompt": "a", "b" * 10**6: 1}, "b" * 253 + "..."),
    ("/prefix_cache/resize", {"num_blocks": 10**4000}, "num_blocks"),
    ("/sleep", {"level": 10**4000}, "level"),
    ("/update_weights_from_disk", {"model_path": "a" * 4096}, "model_path"),
    ("/" + "a" * 50_000, {}, None),
]


async def test_neither_an_error_nor_the_log_quotes_more_than_a_little(tiny_checkpoint, caplog):
    caplog.set_level(logging.DEBUG, logger="prefixcache")
    async with served_folder(tiny_checkpoint(), served={"strict": True}) as (client, _):
        for path, body, param in LONG:
            caplog.clear()
            answer = await client.post(path, json=body)
            assert answer.status_code in (400, 404)
            error = answer.json()["error"]
            assert error["param"] == param
            assert len(error["message"]) <= 2000
            lines = [record.getMessage() for record in caplog.records if record.name != "httpx"]
            assert lines
            assert all(len(line) < 1200 for line in lines)


@pytest.mark.parametrize(
    ("kind", "text"), [("json", {"$ref": "#"}), ("regex", "[^\\s\\S]")], ids=["endless", "nothing"]
)
async def test_a_grammar_that_no_answer_can_follow_is_refused_in_plain_words(
    tiny_checkpoint: Callable[..., Path], kind: str, text: object
) -> None:
    async with served_folder(tiny_checkpoint()) as (client, _):
        path, body = _grammar(kind, text)
        message = (await client.post(path, json=body)).json()["error"]["message"]
    assert "none of the model's tokens may come next" in message
    assert "NoExtension" not in message


async def test_an_answer_that_nobody_reads_is_cut_and_gives_its_blocks_back(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_UNREAD_OUTPUTS", 5)
    app, engine = serve_folder(tiny_checkpoint())
    may_read, sent = asyncio.Event(), bytearray()
    content = json.dumps({**BODY, "stream": True}).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))
        if sent:
            await may_read.wait()

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"}
    place = {"path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": ""}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    ends = {"client": ("127.0.0.1", 5000), "server": ("127.0.0.1", 80), "headers": headers}
    asking = asyncio.create_task(app({**scope, **place, **ends}, receive, send))
    try:
        await until(lambda: len(sent) > 0 and not in_use(engine))
        may_read.set()
        await asyncio.wait_for(asking, 60)
    finally:
        await engine.shutdown()
    assert b"slow_reader" in sent


async def test_a_key_that_has_too_many_waiting_is_rejected_and_others_are_served(tiny_checkpoint):
    bounds = {"max_waiting_per_client": 2}
    options: dict[str, Any] = {
        "bounds": bounds,
        "access": {"rules": KEYS},
        "max_running_per_key": 1,
    }
    small = {**BODY, "max_tokens": 2}
    async with served_folder(tiny_checkpoint(), **options) as (client, engine):
        await engine.run(lambda control: control.pause())

        def ask(name: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(
                client.post("/v1/completions", json=small, headers=key(name))
            )

        waiting = [ask("a"), ask("a")]
        await until(lambda: engine.num_streams == 2)
        refused = await ask("a")
        waiting.append(ask("b"))
        await until(lambda: engine.metrics.gauges().num_waiting == 3)
        load = (await client.get("/load", headers=key("b"))).json()
        await engine.run(lambda control: control.resume())
        assert [(await task).status_code for task in waiting] == [200] * 3
    assert refused.status_code == HTTPStatus.TOO_MANY_REQUESTS
    assert int(refused.headers["Retry-After"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert load == {"server_load": 3, "running": 0, "waiting": 3}


class Bodies:
    """Sends bodies in parts, of which the last is held back."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.num_sent = 0

    async def parts(self, size: int) -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"x" * size
        self.num_sent += 1
        await self.ends.wait()
        yield b'"}'


async def test_bodies_are_bounded_together_and_the_largest_unfinished_gives_way(tokenizer):
    waiting = asyncio.Event()

    async def held(request: Request) -> AsyncIterator[RequestOutput]:
        await waiting.wait()
        yield RequestOutput(request_id=request.request_id, ending=Ending("stop"))

    engine, bodies = FakeEngine(held), Bodies()
    app = fake_app(engine, tokenizer, limits=ServerLimits(body_bytes=30_000))

    async with client_of(app) as client:

        def post(content: Any) -> asyncio.Task[httpx.Response]:
            headers = {"Content-Type": "application/json"}
            return asyncio.create_task(
                client.post("/v1/completions", content=content, headers=headers)
            )

        slow = [post(bodies.parts(size)) for size in (12_000, 15_000)]
        await until(lambda: bodies.num_sent == 2)
        # No more has room, so the largest that has not come in full gives way to a short one.
        asked: list[asyncio.Task[httpx.Response]] = []
        for number in range(2):
            asked.append(post(SHORT))
            await until(lambda number=number: len(engine.requests) > number)
        bodies.ends.set()
        answers = [await task for task in slow]
        waiting.set()
        assert [(await task).status_code for task in asked] == [200, 200]
    assert [answer.status_code for answer in answers] == [400, 503]  # 12,000 x are no prompt here
    assert answers[1].json()["error"]["code"] == "bodies_full"
    assert answers[1].headers["Retry-After"] == "1"


async def test_a_conversation_counts_as_a_part_of_the_body_that_goes_on_from_it(tokenizer):
    waiting = asyncio.Event()
    waiting.set()

    async def held(request: Request) -> AsyncIterator[RequestOutput]:
        await waiting.wait()
        yield RequestOutput(request_id=request.request_id, ending=Ending("stop"))

    engine = FakeEngine(held)
    app = fake_app(engine, tokenizer, limits=ServerLimits(body_bytes=30_000))
    async with client_of(app) as client:

        async def ask(text: str, name: str | None = None) -> httpx.Response:
            body = {"input": text, "previous_response_id": name, "truncate_prompt_tokens": 8}
            return await client.post("/v1/responses", json=body)

        name = (await ask("x" * 20_000)).json()["id"]
        waiting.clear()
        first = asyncio.create_task(ask("More?", name))
        await until(lambda: len(engine.requests) == 2)
        second = asyncio.create_task(ask("More?", name))
        await until(lambda: second.done() or len(engine.requests) == 3)
        waiting.set()
        assert (await first).status_code == 200
        refused = await second
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "bodies_full"
        assert (await ask("More?", name)).status_code == 200


async def test_a_body_counts_no_more_once_it_is_a_request(tokenizer: Tokenizer) -> None:
    waiting = asyncio.Event()

    async def held(request: Request) -> AsyncIterator[RequestOutput]:
        await waiting.wait()
        yield RequestOutput(request_id=request.request_id, ending=Ending("stop"))

    engine = FakeEngine(held)
    app = fake_app(engine, tokenizer, limits=ServerLimits(body_bytes=15_000))
    asked: list[asyncio.Task[httpx.Response]] = []
    async with client_of(app) as client:
        for number in range(5):
            asked.append(asyncio.create_task(client.post(PATH, content=SHORT, headers=JSON)))
            await until(lambda number=number: len(engine.requests) > number)
        waiting.set()
        assert [(await task).status_code for task in asked] == [200] * 5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_log_probabilities_of_a_whole_answer_are_bounded_and_a_stream_keeps_none(
    tiny_checkpoint: Callable[..., Path], path: str
) -> None:
    access = {"limits": ServerLimits(body_bytes=20_000)}
    many: dict[str, dict[str, Any]] = {
        PATH: {"prompt": "a", "logprobs": 5, "max_tokens": 60},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a"}],
            "logprobs": True,
            "top_logprobs": 5,
            "max_tokens": 60,
        },
        "/v1/responses": {
            "input": "a",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 5,
            "max_output_tokens": 60,
        },
    }
    body = many[path] | {"ignore_eos": True}
    async with served_folder(tiny_checkpoint("qwen3"), access=access) as (client, engine):
        whole = await client.post(path, json=body)
        streamed = await client.post(path, json={**body, "stream": True})
        await until(lambda: not in_use(engine))
        short = await client.post(path, json={**body, "max_tokens": 20, "max_output_tokens": 20})
    error = whole.json()["error"]
    assert (whole.status_code, error["code"]) == (400, "logprobs_too_large")
    assert "20000 bytes" in error["message"]
    assert short.status_code == 200
    assert ("logprobs_too_large" in streamed.text) == (path == "/v1/responses")
    assert streamed.text.count('"top_logprobs"') >= (25 if path == "/v1/responses" else 60)


async def test_log_probabilities_of_all_answers_are_bounded_and_the_largest_gives_way(tokenizer):
    goes_on, has_come = asyncio.Event(), asyncio.Event()
    scored = TokenLogprobs(token_id=5, logprob=-1.0, rank=1)

    async def script(request: Request) -> AsyncIterator[RequestOutput]:
        length = len(request.prompt_token_ids)

        def output(number: int, **fields: Any) -> RequestOutput:
            kept = {"token_ids": (5,) * number, "logprobs": (scored,) * number}
            return RequestOutput(request_id=request.request_id, **kept, **fields)

        yield output(length)
        if length == 50:
            has_come.set()
            await goes_on.wait()
        yield output(length, restarted=True)
        yield output(1, ending=Ending("length"))

    engine = FakeEngine(script)
    limits = ServerLimits(body_bytes=80 * 256)
    app = fake_app(engine, tokenizer, limits=limits)
    async with client_of(app) as client:

        def ask(length: int) -> asyncio.Task[httpx.Response]:
            body = {"prompt": [5] * length, "logprobs": 0}
            return asyncio.create_task(client.post(PATH, json=body))

        large = ask(50)
        await has_come.wait()
        assert (await ask(40)).status_code == 200
        goes_on.set()
        refused = await large
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "logprobs_full")
        assert refused.headers["Retry-After"] == "1"
        assert (await ask(79)).status_code == 200  # nothing counts any more, nor what was void


async def test_probes_need_no_key_and_no_body(tiny_checkpoint):
    paths = ("/health", "/ping", "/ready")
    async with served_folder(tiny_checkpoint(), access={"rules": KEYS}) as (client, engine):
        for path in paths:
            for method in ("GET", "HEAD"):
                response = await client.request(method, path)
                assert (response.status_code, response.content) == (200, b"")
        await engine.run(lambda control: control.pause())
        paused = [await client.get(path) for path in paths]
        await engine.run(lambda control: control.resume())
        await engine.run(lambda control: control.sleep(1))
        asleep = [await client.get(path) for path in paths]
    for replies, code in ((paused, "engine_paused"), (asleep, "engine_asleep")):
        assert [reply.status_code for reply in replies] == [200, 200, 503]
        assert replies[-1].json()["error"]["code"] == code


async def test_server_info_is_the_administrators_and_shows_no_secrets(tiny_checkpoint):
    from prefixcache.config.flags import shown_values
    from prefixcache.server.options.serve_options import ServeOptions

    flags = shown_values(ServeOptions(api_key=("hidden",), max_waiting_per_key=3))
    access = {"rules": KEYS, "flags": flags}
    async with served_folder(tiny_checkpoint(), access=access) as (client, _):
        forbidden = await client.get("/server_info", headers=key("a"))
        shown = await client.get("/server_info", headers=key("root"))
        hashed = (await client.get("/version", headers=key("a"))).json()["prefix_hash"]
    assert forbidden.status_code == 403
    assert "hidden" not in shown.text
    info = shown.json()
    assert (info["prefix_hash"], info["groups"]) == (hashed, ["full"])
    assert (info["flags"]["api_key"], info["flags"]["max_waiting_per_key"]) == (True, 3)
