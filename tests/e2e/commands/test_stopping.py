"""What clients and the log are sent while the server stops, and of answers that ended badly."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from prefixcache.server.jobs.context import Lifecycle
from prefixcache.server.serve import ServeOptions, Server
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Request, RequestOutput
from support.serving import (
    FakeEngine,
    client_of,
    events,
    fake_app,
    running,
    says,
    serving,
    wait_until,
)

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "stream": True}


class Script:
    """Answers that wait for `may_end` after their first token."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.engine = FakeEngine(self._play)
        self.loop: Any = None

    async def _play(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.loop = asyncio.get_running_loop()
        yield RequestOutput(request_id=request.request_id, token_ids=(3,), text="one")
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)
        async for output in says(request, "two"):
            yield output


@contextmanager
def stoppable(
    engine: FakeEngine, tokenizer: Tokenizer, drain_seconds: int
) -> Generator[tuple[Server, str], None, None]:
    lifecycle = Lifecycle()
    app = fake_app(engine, tokenizer, lifecycle=lifecycle)
    with serving(app, lifecycle, drain_seconds=drain_seconds) as served:
        yield served


@contextmanager
def stream(address: str, **fields: Any) -> Generator[tuple[str, Any], None, None]:
    """An open answer and its first event."""
    body = {**BODY, **fields}
    with httpx.stream("POST", address + COMPLETIONS, json=body, timeout=240) as response:
        parts = response.iter_text()
        yield next(parts), parts


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The access log. Nobody else may have written anything."""
    assert {record.name for record in caplog.records} <= {
        "prefixcache.server.jobs.context",
        "prefixcache.server.serve",
    }
    return [record.getMessage() for record in caplog.records if "context" in record.name]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixcache")


def test_while_answers_end_new_requests_and_probes_hear_503(tokenizer, caplog):
    script = Script()
    with stoppable(script.engine, tokenizer, 600) as (server, address):
        with httpx.Client(base_url=address, timeout=240) as idle, stream(address) as (first, parts):
            assert idle.get("/health").is_success
            server.stop()
            for response in (
                idle.get("/health"),
                httpx.get(f"{address}/health", timeout=240),
                httpx.post(address + COMPLETIONS, json=BODY, timeout=240),
            ):
                assert response.status_code == 503
                assert response.headers["retry-after"] == "1"
                assert response.headers["connection"] == "close"
                assert response.json()["error"]["code"] == "server_stopping"
            script.may_end.set()
            ended = events(first + "".join(parts))
        assert [chunk["choices"][0]["text"] for chunk in ended] == ["one", "two"]
        wait_until(lambda: not _listens(address))
    assert [line for line in logged(caplog) if "200 OK" in line and COMPLETIONS in line]


def _listens(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=150):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("second_signal", [False, True])
def test_what_is_cut_says_so_to_client_and_log(tokenizer, caplog, second_signal):
    script = Script()
    with stoppable(script.engine, tokenizer, 600 if second_signal else 0) as (server, address):
        whole: list[httpx.Response] = []

        def ask() -> None:
            body = {**BODY, "stream": False}
            whole.append(httpx.post(address + COMPLETIONS, json=body, timeout=240))

        asking = threading.Thread(target=ask)
        asking.start()
        with stream(address) as (first, parts):
            wait_until(lambda: script.engine.num_open == 2)
            server.stop()
            if second_signal:
                script.loop.call_soon_threadsafe(server.stop)
            *chunks, last = events(first + "".join(parts))
        asking.join()
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["one"]
    assert last["error"]["code"] == whole[0].json()["error"]["code"] == "server_stopping"
    assert whole[0].status_code == 503
    assert whole[0].headers["retry-after"] == "1"
    assert script.engine.num_open == 0
    lines = logged(caplog)
    assert len(lines) == 2
    assert all("503 Service Unavailable" in line for line in lines)


def test_a_client_that_does_not_read_is_not_waited_for(tokenizer, caplog):
    async def script(request: Request) -> AsyncIterator[RequestOutput]:
        while True:
            await asyncio.sleep(0)
            yield RequestOutput(request_id=request.request_id, token_ids=(3,), text="x" * 65536)

    engine = FakeEngine(script)
    with stoppable(engine, tokenizer, 0) as (server, address), stream(address):
        server.stop()
        wait_until(lambda: not _listens(address))
    assert engine.num_open == 0
    assert len(logged(caplog)) == 1


async def test_an_answer_that_is_cut_may_say_so_whatever_signals_follow(tokenizer):
    server = Server(fake_app(FakeEngine(says), tokenizer), ServeOptions(), Lifecycle())
    is_read = asyncio.Event()

    async def answer() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await is_read.wait()

    answering = asyncio.create_task(answer())
    server.server_state.tasks.add(answering)
    for _ in range(4):
        await asyncio.sleep(0)
        server.stop()
    is_read.set()
    await answering


async def _line(app: Any, caplog: pytest.LogCaptureFixture, **fields: Any) -> str:
    async with client_of(app) as client:
        headers = {"X-Request-Id": "my-id"}
        await client.post(COMPLETIONS, json={**BODY, **fields}, headers=headers)
    return caplog.records[-1].getMessage()


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_log_has_client_tokens_and_reason(tokenizer, caplog, streamed):
    engine = FakeEngine(lambda request: says(request, "a", "b"))
    app = fake_app(engine, tokenizer)
    line = await _line(app, caplog, prompt=[5, 6, 7], stream=streamed)
    assert line.startswith("POST /v1/completions: 200 OK in ")
    assert line.endswith(
        "s, 3 prompt tokens (0 cached), 2 completion tokens, stop from 127.0.0.1 (my-id)"
    )


async def _breaks(request: Request) -> AsyncIterator[RequestOutput]:
    yield RequestOutput(request_id=request.request_id, token_ids=(3,), text="one")
    raise ZeroDivisionError


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_failed_answer_is_no_success(tokenizer, caplog, streamed):
    line = await _line(fake_app(FakeEngine(_breaks), tokenizer), caplog, stream=streamed)
    assert "500 Internal Server Error" in line
    assert "1 completion tokens, unfinished" in line
    (failure,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "my-id" in failure.getMessage()


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_whose_client_left_is_no_success(tokenizer, caplog, streamed):
    script = Script()
    with running(fake_app(script.engine, tokenizer)) as address:
        host, port = address.removeprefix("http://").split(":")
        body = f'{{"prompt": [5, 6], "stream": {str(streamed).lower()}}}'
        with socket.create_connection((host, int(port)), timeout=150) as connection:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            wait_until(lambda: script.engine.num_open == 1)
        wait_until(lambda: script.engine.num_open == 0)
        wait_until(lambda: bool(logged(caplog)))
    (line,) = logged(caplog)
    assert "499 Client Closed Request" in line
    assert "2 prompt tokens (0 cached)" in line
    assert "unfinished" in line
