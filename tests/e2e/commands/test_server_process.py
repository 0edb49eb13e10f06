"""The server as a process: start, busy port, and how signals end it."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from prefixcache.cli.main import app
from prefixcache.server.http.listener import listening
from prefixcache.server.options.serve_options import ServeOptions
from support.server_process import PREFIXCACHE, ServerProcess, server_process
from support.serving import events, wait_until

_FLAGS = ["--dtype", "float32", "--num-blocks", "100", "--served-model-name", "tiny"]


@contextmanager
def _serving(
    folder: Path, tmp_path: Path, *flags: str, **options: Any
) -> Generator[ServerProcess, None, None]:
    command = [*PREFIXCACHE, "serve", str(folder), "--port", "0", *_FLAGS, *flags]
    with server_process(command, tmp_path / "log", **options) as server:
        yield server


@contextmanager
def _open_stream(address: str, max_tokens: int) -> Generator[httpx.Response, None, None]:
    body = {"prompt": "x", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    url = f"{address}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=240) as response:
        yield response


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint(max_position_embeddings=8192)


def test_sigterm_lets_open_answers_end(folder, tmp_path):
    with _serving(folder, tmp_path, "--drain-seconds", "600") as server:
        with _open_stream(server.address, max_tokens=300) as response:
            parts = response.iter_text()
            text = next(parts)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0


@pytest.mark.slow
def test_a_second_sigint_ends_at_once(tiny_checkpoint, tmp_path):
    """The first one begins a drain that the answer would take minutes of; the second cuts it."""
    folder = tiny_checkpoint(max_position_embeddings=1 << 17)
    flags = ["--drain-seconds", "600", "--num-blocks", "8000"]
    with (
        _serving(folder, tmp_path, *flags) as server,
        _open_stream(server.address, max_tokens=120_000) as response,
    ):
        parts = response.iter_text()
        next(parts)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: not _is_healthy(server.address))
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        assert events("".join(parts))[-1]["error"]["code"] == "server_stopping"


_NO_LOAD_IS_SLOWER = """
from prefixcache.cli.main import main
from prefixcache.scheduler import loading
loading.StepTimeModel.seconds = lambda *_: 0.0
loading._MOST_SECONDS = 600
main()
"""


@dataclass
class OnADisk:
    """Servers over one folder whose calls hang or fail while `switch` is there."""

    model: Path
    folder: Path

    @property
    def switch(self) -> Path:
        return self.folder / "switch"

    def __post_init__(self) -> None:
        source = Path(__file__).parents[2] / "failing_files.c"
        command = ["cc", "-shared", "-fPIC", "-o", self.folder / "shim.so", source, "-ldl"]
        subprocess.run(command, check=True)

    def serving(self) -> AbstractContextManager[ServerProcess]:
        disk = self.folder / "disk"
        flags = [*_FLAGS, "--port", "0", "--num-blocks", "16", "--max-model-len", "240"]
        flags += ["--disk-cache-memory", "64MiB", "--disk-cache-dir", str(disk)]
        flags += ["--disk-cache-min-uses", "1", "--drain-seconds", "600"]
        command = [sys.executable, "-c", _NO_LOAD_IS_SLOWER, "serve", str(self.model), *flags]
        environment = {
            "LD_PRELOAD": str(self.folder / "shim.so"),
            "FAILING_FOLDER": str(disk),
            "FAILING_SWITCH": str(self.switch),
        }
        return server_process(command, self.folder / "log", env=os.environ | environment)

    def log(self) -> str:
        return (self.folder / "log").read_text()


def _ask(server: ServerProcess, first: int) -> httpx.Response:
    body = {"prompt": [3 + (first + 7 * i) % 300 for i in range(150)], "max_tokens": 6}
    body |= {"temperature": 0, "logprobs": 1}
    return httpx.post(f"{server.address}/v1/completions", json=body, timeout=240)


def _disk(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.address}/metrics", timeout=240).text
    (value,) = re.findall(rf"^prefixcache:disk_{name}\S* (\S+)$", text, re.MULTILINE)
    return float(value)


def _evict(server: ServerProcess, first: int) -> None:
    for other in (first, first + 1):
        assert _ask(server, other).is_success


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_signals_while_a_disk_hangs_and_a_disk_that_fails(tiny_checkpoint, tmp_path):
    disk = OnADisk(tiny_checkpoint(), tmp_path)
    with disk.serving() as server, ThreadPoolExecutor(1) as pool:
        expected = _ask(server, 0).json()["choices"]
        _evict(server, 1)
        wait_until(lambda: _disk(server, "blocks") >= 9)
        disk.switch.touch()
        answer = pool.submit(_ask, server, 0)
        wait_until(lambda: _disk(server, "loads_total") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not _is_healthy(server.address))
        server.process.send_signal(signal.SIGINT)
        assert answer.result().status_code == 503
        assert server.end() == 0
        assert "Evicted blocks are written" not in disk.log()
    disk.switch.unlink()
    with disk.serving() as server:
        wait_until(lambda: _disk(server, "blocks") >= 9)
        answer = _ask(server, 0).json()
        assert answer["choices"] == expected
        assert answer["usage"]["prompt_tokens_details"]["disk_cached_tokens"] == 144
        disk.switch.write_text(str(errno.ENOSPC))
        _evict(server, 3)
        wait_until(lambda: _disk(server, "failures_total") == 1)
        assert _ask(server, 0).json()["choices"] == expected
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        assert "is idle: " in disk.log()


@pytest.mark.slow
def test_a_busy_port_is_an_error_at_once_and_the_example_works_with_the_key(folder, tmp_path):
    variables = {"VLLM_API_KEY": "s3cret", "VLLM_HOST_IP": "h1dden", "VLLM_USE_V1": "1"}
    with _serving(folder, tmp_path, env=os.environ | variables) as server:
        port = server.address.rpartition(":")[2]
        second = subprocess.run(
            [*PREFIXCACHE, "serve", str(folder), "--port", port],
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 1
        assert f"127.0.0.1:{port}" in second.stderr
        assert "in use" in second.stderr
        assert len(second.stderr.splitlines()) == 1
        assert "for clients with the key of VLLM_API_KEY\n" in server.start_lines
        assert "s3cret" not in server.start_lines + server.example
        words = shlex.split(server.example.replace("$VLLM_API_KEY", "s3cret"))
        headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
        answer = httpx.post(words[1], content=words[-1], headers=headers, timeout=240).json()
        assert answer["model"] == json.loads(words[-1])["model"] == "tiny"
        assert json.loads(words[-1])["temperature"] == 0
        assert answer["choices"][0]["message"]["role"] == "assistant"
        os.kill(server.process.pid, signal.SIGINT)
        assert server.end() == 0
    log = (tmp_path / "log").read_text()
    assert "have no effect here: VLLM_HOST_IP, VLLM_USE_V1." in log
    assert "s3cret" not in log
    assert "h1dden" not in log
    for chosen in (
        "float32 on cpu with",
        "100 blocks of 16 tokens (0.00 GiB), prefix cache on, eviction lru",
        "a step 64 sequences and 2048 tokens",
    ):
        assert chosen in log


@pytest.mark.parametrize(("host", "form"), [("127.0.0.1", "json"), ("0.0.0.0", "text")])
def test_the_command_serves_until_it_is_stopped(tiny_checkpoint, host, form, caplog, monkeypatch):
    """In this process, which asks itself from another thread and then stops itself."""
    ports: list[int] = []

    @contextmanager
    def watched(options: ServeOptions) -> Generator[socket.socket, None, None]:
        with listening(options) as listener:
            ports.append(listener.getsockname()[1])
            yield listener

    monkeypatch.setattr("prefixcache.server.serve.listening", watched)
    monkeypatch.setattr("prefixcache.server.dashboard.samples._PERIOD", 0.1)
    answers: list[bytes] = []
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True}

    def ask_and_stop() -> None:
        try:
            wait_until(lambda: ports != [])
            address = f"http://127.0.0.1:{ports[0]}"
            wait_until(lambda: _is_healthy(address))
            answers.append(httpx.get(f"{address}/v1/models", timeout=240).content)
            answers.append(httpx.post(f"{address}/v1/completions", json=body, timeout=240).content)
            answers.append(_answer_to_the_larger_of_two_bodies(ports[0]))
            wait_until(lambda: _has_history(address))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask_and_stop)
    asking.start()
    command = ["serve", str(tiny_checkpoint()), "--host", host, "--port", "0", *_FLAGS]
    limits = ["--request-timeout", "0.0001", "--max-total-body-bytes", "32MiB"]
    result = CliRunner().invoke(app, [*command, *limits, "--log-format", form])
    asking.join()
    assert result.exit_code == 0
    shown = "localhost" if host == "0.0.0.0" else host
    address = f"http://{shown}:{ports[0]}"
    if form == "json":
        (record,) = map(json.loads, result.stdout.splitlines())
        assert (record["event"], record["address"], record["model"]) == ("ready", address, "tiny")
        assert record.keys() >= {"time", "level", "logger", "message"}
    else:
        assert f"Chat {address}/chat, dashboard http://" in result.output
        assert f"curl {address}/v1/chat/completions" in result.output
    for expected, answer in zip(
        (b"tiny", b"request_timeout", b"bodies_full"), answers, strict=True
    ):
        assert expected in answer
    assert ("WITHOUT A KEY, EVERYBODY" in caplog.text) == (host == "0.0.0.0")


def _has_history(address: str) -> bool:
    """Whether a page that is opened now gets points of the time before."""
    with httpx.stream("GET", f"{address}/dashboard/events", timeout=240) as answer:
        hello = next(line for line in answer.iter_lines() if line.startswith("data: "))
    return len(json.loads(hello.removeprefix("data: "))["points"]) > 0


def _answer_to_the_larger_of_two_bodies(port: int) -> bytes:
    """Two bodies of 33 MiB together, neither of which ends; the larger hears it as it goes on."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 33554432\r\n\r\n"
    )
    with ExitStack() as stack:
        larger, smaller = (
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 150))
            for _ in range(2)
        )
        larger.sendall(head + b" " * 20 * 2**20)
        smaller.sendall(head + b" " * 13 * 2**20)
        while not select.select([larger], [], [], 0.03)[0]:
            larger.sendall(b" ")
        answer = HTTPResponse(larger)
        answer.begin()
        return answer.read()


def _is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=240).is_success
    except httpx.TransportError:
        return False
