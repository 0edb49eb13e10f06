"""When something behind the server fails: the form of the errors, and who is closed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prefixcache.exceptions import EngineDeadError
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Ending, Request, RequestOutput
from support.serving import FakeEngine, client_of, events, fake_app, says
from support.tiny_models import EOS, train_tokenizer

PATHS = ["/v1/completions", "/v1/chat/completions"]
BODY = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}


def _output(request: Request, **fields: Any) -> RequestOutput:
    return RequestOutput(request_id=request.request_id, **fields)


async def _breaks(request: Request) -> AsyncIterator[RequestOutput]:
    yield _output(request, token_ids=(3,), text="one ")
    yield _output(request, ending=Ending("error", error="the logits were not finite"))


async def _dies(request: Request) -> AsyncIterator[RequestOutput]:
    yield _output(request, token_ids=(3,), text="one ")
    raise EngineDeadError("The engine stopped: no memory.")


async def _surprises(request: Request) -> AsyncIterator[RequestOutput]:
    yield _output(request, token_ids=(3,), text="one ")
    raise ZeroDivisionError("secret detail")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("script", "status", "reported"),
    [(_breaks, 500, "not finite"), (_dies, 503, "no memory"), (_surprises, 500, "log")],
)
async def test_a_failure_has_its_status(tokenizer, path, script, status, reported):
    async with client_of(fake_app(FakeEngine(script), tokenizer)) as client:
        response = await client.post(path, json=BODY)
    assert response.status_code == status
    assert reported in response.json()["error"]["message"]
    assert "secret" not in response.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("script", "reported"), [(_breaks, "not finite"), (_dies, "no memory"), (_surprises, "log")]
)
async def test_a_failure_in_a_stream_is_an_event(tokenizer, path, script, reported):
    async with client_of(fake_app(FakeEngine(script), tokenizer)) as client:
        response = await client.post(path, json={**BODY, "stream": True})
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert "one " in json.dumps(chunks)
    assert reported in last["error"]["message"]
    assert "secret" not in response.text


async def test_one_failing_choice_ends_the_others(tokenizer):
    async def script(request: Request) -> AsyncIterator[RequestOutput]:
        if request.request_id.endswith("-1"):
            yield _output(request, ending=Ending("error", error="broken"))
        await asyncio.sleep(3600)

    engine = FakeEngine(script)
    async with client_of(fake_app(engine, tokenizer)) as client:
        response = await client.post(PATHS[0], json={**BODY, "n": 3})
    assert response.status_code == 500
    assert (len(engine.requests), engine.num_open) == (3, 0)


class DeadEngine(FakeEngine):
    """Has no control any more, as a real one."""

    def __getattribute__(self, name):
        if name == "control" and self.dead is not None:
            raise self.dead
        return super().__getattribute__(name)


async def test_a_dead_engine_is_unavailable(tokenizer):
    engine = DeadEngine(says)
    app = fake_app(engine, tokenizer)
    engine.dead = EngineDeadError("The engine stopped.")
    async with client_of(app) as client:
        for path in PATHS:
            for stream in (False, True):
                response = await client.post(path, json={**BODY, "stream": stream})
                assert response.status_code == 503
                assert response.json()["error"]["type"] == "service_unavailable_error"
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/reset_prefix_cache")).status_code == 503
        assert (await client.get("/v1/models")).status_code == 200
        version = (await client.get("/version")).json()
        assert (version["weights"], version["prefix_hash"]) == (None, None)


async def test_what_nobody_expected_is_logged_and_not_shown(tokenizer, caplog):
    engine = FakeEngine(says)
    app = fake_app(engine, tokenizer)
    del engine.max_model_len
    async with client_of(app) as client:
        response = await client.get("/v1/models")
    assert response.status_code == 500
    assert "max_model_len" not in response.text
    assert "max_model_len" in caplog.text
    assert response.headers["x-request-id"]


async def test_held_back_text_makes_no_empty_chunks(tokenizer):
    async with client_of(fake_app(FakeEngine(_holds_back), tokenizer)) as client:
        response = await client.post(PATHS[0], json={**BODY, "stream": True})
    assert [c["choices"][0]["text"] for c in events(response.text)] == ["a", "bc"]


async def _holds_back(request: Request) -> AsyncIterator[RequestOutput]:
    async for output in says(request, "", "a", "", "", "bc"):
        yield output


async def test_text_is_not_escaped_beyond_need(tokenizer):
    script = lambda request: says(request, "🦙 ü\n\n", "data: [DONE]\n\n")  # noqa: E731
    async with client_of(fake_app(FakeEngine(script), tokenizer)) as client:
        response = await client.post(PATHS[0], json={**BODY, "stream": True})
    assert "🦙 ü\\n\\n" in response.text
    texts = [c["choices"][0]["text"] for c in events(response.text)]
    assert texts == ["🦙 ü\n\n", "data: [DONE]\n\n"]


async def test_a_model_without_a_template_takes_no_chats():
    bare = Tokenizer(train_tokenizer(), special_tokens={"eos_token": EOS})
    async with client_of(fake_app(FakeEngine(says), bare)) as client:
        response = await client.post(PATHS[1], json={"messages": BODY["messages"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_health_checks_stay_out_of_the_log(tokenizer, caplog):
    caplog.set_level(logging.INFO, "prefixcache")
    script = lambda request: says(request, "x")  # noqa: E731
    async with client_of(fake_app(FakeEngine(script), tokenizer)) as client:
        await client.get("/health")
        await client.get("/metrics")
        await client.post(PATHS[0], json=BODY)
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [
        "POST /v1/completions: 200 OK"
    ]


async def test_a_server_that_stops_ends_what_is_open(tokenizer):
    async def script(request: Request) -> AsyncIterator[RequestOutput]:
        yield _output(request, token_ids=(3,), text="one ")
        await asyncio.sleep(3600)

    engine = FakeEngine(script)
    async with client_of(fake_app(engine, tokenizer)) as client:
        asking = asyncio.create_task(client.post(PATHS[0], json=BODY))
        while not engine.num_open:
            await asyncio.sleep(0)
        asking.cancel()
        response = await asking
    assert engine.num_open == 0
    assert response.status_code == 503
