"""One line a request, as text and as JSON; nothing of a prompt and no key in any of them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from prefixcache.cli.main import app as command
from prefixcache.config.logs import LogFormat, log_handler
from prefixcache.exceptions import FieldError
from prefixcache.server.http.access import AccessRules
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Request, RequestOutput
from support.serving import (
    FakeEngine,
    client_of,
    fake_app,
    running,
    says,
    served_folder,
    wait_until,
)

CANARY = "canary-7f3a"
KEY = "sk-canary-key"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}


@contextmanager
def log(form: LogFormat = "json", **options: Any) -> Generator[io.StringIO, None, None]:
    """What the process writes, at every level."""
    handler: Any = log_handler(form, **options)
    written = io.StringIO()
    handler.setStream(written)
    root, ours = logging.getLogger(), logging.getLogger("prefixcache")
    before = ours.level, root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    ours.setLevel(logging.DEBUG)
    try:
        yield written
    finally:
        root.removeHandler(handler)
        ours.setLevel(before[0])
        root.setLevel(before[1])


def lines(written: io.StringIO, event: str = "request") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in written.getvalue().splitlines()]
    return [line for line in found if line.get("event") == event]


async def test_a_line_tells_what_came_of_a_request(tiny_checkpoint: Callable[..., Path]) -> None:
    body = {"prompt": list(range(10, 60)), "max_tokens": 4, "ignore_eos": True}
    async with served_folder(tiny_checkpoint()) as (client, _):
        with log() as written:
            for stream in (False, True):
                headers = {"X-Request-Id": "mine"}
                await client.post(COMPLETIONS, json={**body, "stream": stream}, headers=headers)
            await client.get("/v1/models")
            await client.post(COMPLETIONS, content=b"{", headers=JSON)
        first, second, models, wrong = lines(written)
    assert first["time"][10] == "T"
    assert first["time"].endswith("Z")
    for line, cached in ((first, 0), (second, 48)):
        assert (line["request_id"], line["client"], line["model"]) == ("mine", "127.0.0.1", "tiny")
        assert (line["method"], line["path"], line["status"]) == ("POST", COMPLETIONS, 200)
        counts = [line[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")]
        assert counts == [50, cached, 4]
        assert line["finish_reason"] == "length"
        assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
    assert "model" not in models
    assert (wrong["status"], wrong["level"]) == (400, "info")


async def test_what_is_polled_is_in_the_log_for_debugging_alone(tokenizer: Tokenizer) -> None:
    polled = ("/health", "/load", "/metrics", "/ping", "/ready")
    async with client_of(fake_app(FakeEngine(says), tokenizer)) as client:
        with log() as written:
            for path in (*polled, "/v1/models"):
                assert (await client.get(path)).status_code == 200, path
    levels = {line["path"]: line["level"] for line in lines(written)}
    assert levels == {**dict.fromkeys(polled, "debug"), "/v1/models": "info"}


async def test_doubled_request_ids_are_two_requests(tiny_checkpoint: Callable[..., Path]) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 30, "ignore_eos": True}
    async with served_folder(tiny_checkpoint()) as (client, _):
        headers = {"X-Request-Id": "same"}
        asked = [client.post(COMPLETIONS, json=body, headers=headers) for _ in range(4)]
        answers = await asyncio.gather(*asked)
        strange = await client.get("/version", headers={"X-Request-Id": "a b\x7f" + "c" * 999})
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [30] * 4
    assert len(strange.headers["x-request-id"]) == 32


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_left_is_logged_with_what_was_computed(
    tokenizer: Tokenizer, streamed: bool
) -> None:
    was_taken = threading.Event()

    async def waits(request: Request) -> AsyncIterator[RequestOutput]:
        yield RequestOutput(request_id=request.request_id, token_ids=(3,), text="one")
        for _ in range(100):  # turns of the loop, in which it is read
            await asyncio.sleep(0)
        was_taken.set()
        await asyncio.Event().wait()

    engine = FakeEngine(waits)
    body = json.dumps({"prompt": [5, 6], "stream": streamed}).encode()
    with log() as written, running(fake_app(engine, tokenizer)) as address:
        _post_and_leave(address, body, was_taken.is_set)
        wait_until(lambda: bool(lines(written)))
    (line,) = lines(written)
    assert (line["status"], line["finish_reason"], line["completion_tokens"]) == (
        499,
        "unfinished",
        1,
    )


def _post_and_leave(address: str, body: bytes, when: Callable[[], bool]) -> None:
    host, port = address.removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=150) as connection:
        connection.sendall(head.encode() + body)
        wait_until(when)


async def _says(request: Request) -> AsyncIterator[RequestOutput]:
    async for output in says(request, CANARY):
        yield output


async def _fails(request: Request) -> AsyncIterator[RequestOutput]:
    yield RequestOutput(request_id=request.request_id, token_ids=(3,), text="one")
    try:
        raise KeyError(CANARY)
    except KeyError as error:
        raise ValueError(f"cannot read {CANARY}") from error


@pytest.mark.parametrize("form", ["text", "json"])
async def test_nothing_of_a_prompt_and_no_key_is_in_the_log(tokenizer, form, monkeypatch):
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"cannot encode {CANARY}")

    with log(form) as written:
        for script in (_says, _fails):
            await _send_canaries(script, tokenizer)
        monkeypatch.setattr(Tokenizer, "encode_batch", broken)
        await _send_canaries(_says, tokenizer)
    logged = written.getvalue()
    assert "ValueError" in logged
    assert "KeyError" in logged
    assert "RuntimeError" in logged
    assert "test_request_log.py" in logged
    assert "--log-prompts shows it" in logged
    assert CANARY not in logged
    assert KEY not in logged


async def _send_canaries(script: Any, tokenizer: Tokenizer) -> None:
    app = fake_app(FakeEngine(script), tokenizer, rules=AccessRules(api_keys=(KEY,)))
    async with client_of(app) as client:
        for key in (KEY, f"{KEY}-wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            for stream in (True, False):
                fields = {"stream": stream, "user": CANARY}
                message = {"role": "user", "content": CANARY}
                chat = {"messages": [message], **fields}
                for path, body in (
                    (COMPLETIONS, {"prompt": CANARY, **fields}),
                    (COMPLETIONS, {"prompt": CANARY, "stop": CANARY, "n": CANARY}),
                    ("/v1/chat/completions", chat),
                    ("/v1/chat/completions", {**chat, "tools": CANARY}),
                    ("/v1/messages", {**chat, "max_tokens": 5}),
                    ("/v1/responses", {"input": CANARY, **fields}),
                    ("/tokenize", {"prompt": CANARY}),
                ):
                    await client.post(path, json=body, headers=headers)
            await client.post(COMPLETIONS, content=f'{{"prompt": "{CANARY}', headers=headers | JSON)


async def test_prompts_are_logged_where_they_are_asked_for(tokenizer: Tokenizer) -> None:
    app = fake_app(FakeEngine(_fails), tokenizer, num_logged_characters=20)
    async with client_of(app) as client:
        with log(shows_prompts=True) as written:
            body = {"prompt": [CANARY, CANARY + "x" * 999, "y"]}
            await client.post(COMPLETIONS, json=body)
    (line,) = lines(written, "prompts")
    assert [CANARY, CANARY[:8]] == line["prompts"]
    assert f"ValueError: cannot read {CANARY}" in written.getvalue()


async def test_what_the_event_loop_finds_shows_no_message(tokenizer: Tokenizer) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.create_future().set_exception(ValueError(CANARY))  # which nobody ever asks for
        seen.append(loop)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with log() as written, running(app) as address:
        httpx.get(address, timeout=240)
        wait_until(lambda: "never retrieved" in written.getvalue())
    assert seen
    assert CANARY not in written.getvalue()


def test_a_log_file_may_be_rotated_and_lost(tmp_path, capfd):
    folder = tmp_path / "logs"
    folder.mkdir()
    handler = log_handler("json", file=folder / "log")
    logger = logging.Logger("logger")
    logger.addHandler(handler)
    logger.info("one\ntwo")
    (folder / "log").rename(folder / "log.1")
    logger.info("three")
    assert json.loads((folder / "log.1").read_text())["message"] == "one\ntwo"
    assert json.loads((folder / "log").read_text())["message"] == "three"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    for _ in range(3):
        logger.info("nobody's request fails")
    logged = capfd.readouterr().err
    assert logged == f"The log {folder / 'log'} cannot be written: No such file or directory.\n"
    folder.mkdir()
    logger.info("four")
    logged = capfd.readouterr().err
    assert logged == f"The log {folder / 'log'} is written again; 3 lines were lost.\n"
    assert json.loads((folder / "log").read_text())["message"] == "four"
    logger.info("%d", "a fault of ours")
    assert "Logging error" in capfd.readouterr().err
    handler.close()


def test_a_full_disk_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    handler = log_handler("text", file=Path("/dev/full"))
    logger = logging.Logger("logger")
    logger.addHandler(handler)
    for _ in range(3):
        logger.info("a line")
    logged = capfd.readouterr().err
    assert logged == "The log /dev/full cannot be written: No space left on device.\n"
    with suppress(OSError):  # the lines that it still holds
        handler.close()


@pytest.mark.parametrize("place", ["", "none/log", "a\0b"])
def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(FieldError, match="log_file cannot be written"):
        log_handler("text", file=tmp_path / place)
    flags = ["--log-file", str(tmp_path)]
    result = CliRunner().invoke(command, ["serve", "/no/such/model", *flags])
    assert result.exit_code == 2
    assert "error: --log-file cannot be written" in result.stderr
