"""One client's huge body holds nobody up: `/health` of a real process answers in parallel."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from support.repeatable import long
from support.server_process import PREFIXCACHE, server_process
from support.serving import served_folder

# Seconds, beyond what a process that does nothing else waits for at the same time. A busy machine
# delays answers now and then, a server that is held up delays them every time: so one try of
# several must stay below.
_LONGEST_WAIT = 0.1
_TRIES = 10
# Processor seconds of the event loop at once. Copying 30 MB takes up to 0.13, most of it for new
# pages of memory; parsing, checking or encoding such a body takes a second.
_LONGEST_HANDLE = 0.4

_TEXT = " ".join(["word"] * 600)
_MILLION = 1_000_000


def _completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 1, **fields}).encode()


def _many_keys(count: int) -> bytes:
    keys = ",".join(f'"k{number}":0' for number in range(count))
    return b'{"prompt":"x","max_tokens":1,' + keys.encode() + b"}"


def _chat(*messages: object) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


# Path, body, status.
BODIES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "10,000 prompts": ("/v1/completions", lambda: _completion(prompt=[_TEXT] * 10_000), 400),
    "a million messages": (
        "/v1/chat/completions",
        lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * _MILLION) + b"]}",
        400,
    ),
    "a million empty objects": ("/v1/chat/completions", lambda: _chat(*[{}] * _MILLION), 400),
    "the most messages": (
        "/v1/chat/completions",
        lambda: _chat(*[{"role": "user", "content": _TEXT}] * 4096),
        400,
    ),
    "a text of 1.1 MB": (
        "/v1/completions",
        lambda: _completion(prompt="the quick brown fox " * 55_000),
        400,
    ),
    "a message of 1.1 MB": (
        "/v1/chat/completions",
        lambda: _chat({"role": "user", "content": "the quick brown fox " * 55_000}),
        400,
    ),
    "4,096 prompts to probe": (
        "/prefix_cache/probe",
        lambda: _completion(prompt=[_TEXT[:500]] * 4096),
        200,
    ),
    "128 choices of 32 prompts to probe": (
        "/prefix_cache/probe",
        lambda: _completion(prompt=[_TEXT] * 32, n=128),
        200,
    ),
    "10 million ids to detokenize": (
        "/detokenize",
        lambda: b'{"tokens":[' + b",".join([b"5"] * 10 * _MILLION) + b"]}",
        400,
    ),
    "a million ids to detokenize": (
        "/detokenize",
        lambda: json.dumps({"tokens": [100] * _MILLION}).encode(),
        200,
    ),
    "a long text to tokenize": (
        "/tokenize",
        lambda: json.dumps({"prompt": _TEXT * 400, "return_token_strs": True}).encode(),
        200,
    ),
    "2.5 million unknown keys": ("/v1/completions", lambda: _many_keys(2_500_000), 400),
    "the most unknown keys": ("/v1/completions", lambda: _many_keys(60_000), 200),
    "a million stop strings": (
        "/v1/completions",
        lambda: _completion(stop=[f"stop {number}" for number in range(_MILLION)]),
        400,
    ),
    "a million wrong stop strings": (
        "/v1/completions",
        lambda: _completion(stop=[0] * _MILLION),
        400,
    ),
    "a million wrong choices": (
        "/v1/completions",
        lambda: _completion(guided_choice=[0] * _MILLION),
        400,
    ),
    "a million numbers in a schema": (
        "/v1/completions",
        lambda: _completion(guided_json={"enum": [0.1] * _MILLION}),
        400,
    ),
    "a million ids that end the answer": (
        "/v1/completions",
        lambda: _completion(stop_token_ids=[5] * _MILLION),
        400,
    ),
    "65,000 biases": (
        "/v1/completions",
        lambda: _completion(logit_bias={str(number): "x" for number in range(32_000)}),
        400,
    ),
    "30 MB of escapes": (
        "/v1/completions",
        lambda: b'{"prompt":"' + b"\\u4e00" * 5_000_000 + b'"}',
        400,
    ),
    "4,096 prompts to complete": (
        "/v1/completions",
        lambda: _completion(prompt=["word"] * 4096),
        200,
    ),
    "160,000 log probabilities in a stream": (
        "/v1/completions",
        lambda: _completion(prompt=[100] * 8000, echo=True, logprobs=20, stream=True),
        200,
    ),
    "30 MB that an answer repeats": (
        "/v1/responses",
        lambda: json.dumps(
            {"input": "x", "max_output_tokens": 1, "metadata": {"a": "中\n" * 6_000_000}},
            ensure_ascii=False,
        ).encode(),
        200,
    ),
    "a million token ids": ("/v1/completions", lambda: _completion(prompt=[100] * _MILLION), 400),
}

# Of each way that a body can be long, one.
USUAL = {
    "10,000 prompts",
    "a million messages",
    "a message of 1.1 MB",
    "4,096 prompts to probe",
    "2.5 million unknown keys",
    "a million stop strings",
    "30 MB that an answer repeats",
    "a million token ids",
}


@pytest.fixture(scope="module")
def address(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[str, None, None]:
    folder = tiny_checkpoint(max_position_embeddings=1 << 20)
    flags = ["--port", "0", "--dtype", "float32", "--num-blocks", "20000"]
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process([*PREFIXCACHE, "serve", str(folder), *flags], log) as server:
        yield server.address.removeprefix("http://")


@pytest.fixture(scope="module")
def idle_address() -> Generator[str, None, None]:
    """A server of another process, which shows how long this machine makes anybody wait."""
    process = subprocess.Popen([sys.executable, "-c", _IDLE_SERVER], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.communicate()


_IDLE_SERVER = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Handler)
print("127.0.0.1:%d" % server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("name", [one if one in USUAL else long(one) for one in BODIES])
async def test_no_body_holds_the_event_loop_up(tiny_checkpoint, name, monkeypatch):
    """Counted in the loop's own processor time. Other processes lengthen it now and then; a loop
    that is held up takes it each time, so one try of several must stay below.
    """
    longest, run = math.inf, asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest
        begun = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - begun)

    path, make_body, status = BODIES[name]
    body, headers = make_body(), {"Content-Type": "application/json"}
    folder = tiny_checkpoint(max_position_embeddings=1 << 20)
    async with served_folder(folder, num_blocks=20_000) as (client, _):
        await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        gc.disable()  # of the objects of all tests
        for _ in range(_TRIES):
            longest = 0.0
            monkeypatch.setattr(asyncio.Handle, "_run", timed)
            await asyncio.sleep(0)
            response = await client.post(path, content=body, headers=headers)
            await asyncio.sleep(0)
            monkeypatch.undo()
            assert response.status_code == status, response.text[:500]
            if longest <= _LONGEST_HANDLE:
                break
        gc.enable()
    assert 0 < longest <= _LONGEST_HANDLE


@pytest.mark.long
@pytest.mark.parametrize("name", BODIES)
def test_health_answers_in_parallel(address, idle_address, name):
    path, make_body, status = BODIES[name]
    body = make_body()
    waits: list[float] = []
    while not waits or (min(waits) > _LONGEST_WAIT and len(waits) < _TRIES):
        post = _Post(address, path, body)
        waits.append(_longest_wait(post, address, idle_address))
        assert post.status == status, post.answer[:500]
    assert min(waits) <= _LONGEST_WAIT, waits


def _wait(connection: http.client.HTTPConnection) -> float:
    begun = time.perf_counter()
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    return time.perf_counter() - begun


class _Post(threading.Thread):
    """Sends a body; `status` and `answer` are there once it has ended."""

    def __init__(self, address: str, path: str, body: bytes) -> None:
        super().__init__()
        self._connection = http.client.HTTPConnection(address, timeout=150)
        self._request = (path, body)
        self.status = 0
        self.answer = b""

    def run(self) -> None:
        path, body = self._request
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        self.status, self.answer = response.status, response.read()
        self._connection.close()


def _longest_wait(post: _Post, address: str, idle_address: str) -> float:
    """How much longer `/health` lets wait while `post` is answered than the idle server does."""
    health = http.client.HTTPConnection(address, timeout=150)
    idle = http.client.HTTPConnection(idle_address, timeout=150)
    waits, idle_waits = [_wait(health)], [_wait(idle)]
    post.start()
    while post.is_alive():
        waits.append(_wait(health))
        idle_waits.append(_wait(idle))
        time.sleep(0.002)
    health.close()
    idle.close()
    return max(waits) - max(idle_waits)
