"""The server on a loopback port: OpenAI's own client, clients that leave, large bodies."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fakes.fake_runner import StepGate
from prefixcache.engine.async_engine import AsyncEngine
from support.serving import MODEL, metric, running, serve_folder, wait_until

GREEDY = {"temperature": 0, "max_tokens": 24}
IGNORE_EOS = {"extra_body": {"ignore_eos": True}}
CHAT = [{"role": "user", "content": "Zwölf 🦙, please."}]
PROMPTS = [f"{'llama ' * (3 * i + 1)}number {i}" for i in range(8)]


@dataclass(frozen=True)
class Served:
    """A server, and the gate before its steps, which stands open."""

    address: str
    engine: AsyncEngine
    gate: StepGate


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Callable[..., Path]) -> Generator[Served, None, None]:
    """A pool of 40 blocks: eight long answers do not fit at once."""
    app, engine = serve_folder(tiny_checkpoint(), num_blocks=41, max_num_seqs=8)
    gate = StepGate(engine._engine._steps._runner)  # pyright: ignore[reportArgumentType]
    with running(app) as url:
        yield Served(url, engine, gate)
    engine.close()


@pytest.fixture
def address(served: Served) -> str:
    return served.address


@pytest.fixture
def client(address: str) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def _metric(address: str, name: str) -> float:
    return metric(httpx.get(f"{address}/metrics", timeout=240).text, name)


def _is_idle(address: str) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(_metric(address, name) for name in names)


def test_openais_client_streams(client):
    options = {"model": MODEL, "messages": CHAT, **GREEDY, **IGNORE_EOS}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    options = {"model": MODEL, "prompt": [5, 6, 7], **GREEDY, **IGNORE_EOS}
    whole = client.completions.create(**options)
    streamed = client.completions.create(**options, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == whole.choices[0].text


async def test_eight_streams_at_once_say_what_each_says_alone(address):
    """The pool is too small for all of them, so that some are preempted and resumed."""
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:

        async def stream(prompt: str) -> str:
            chunks = await client.completions.create(
                model=MODEL, prompt=prompt, temperature=0, max_tokens=120, stream=True, **IGNORE_EOS
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        alone = [await stream(prompt) for prompt in PROMPTS]
        before = _metric(address, "num_preemptions_total")
        async with httpx.AsyncClient(base_url=address, timeout=240) as control:
            await control.post("/pause")  # so that none ends before another begins
            together = asyncio.gather(*map(stream, PROMPTS))
            while metric((await control.get("/metrics")).text, "num_requests_waiting") < 8:
                await asyncio.sleep(0.01)
            await control.post("/resume")
        together = await together
    assert together == alone
    assert _metric(address, "num_preemptions_total") > before
    assert _is_idle(address)


def test_openais_client_gets_its_own_errors(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=1000)
    assert caught.value.param == "temperature"
    assert "temperature" in caught.value.body["message"]


def test_whole_characters_come_out_of_split_ones(client):
    """The model may say the two bytes of é alone: whole characters and broken ones."""
    first, second = _byte_tokens(client, "é")
    options = {
        "model": MODEL,
        "messages": CHAT,
        "max_tokens": 64,
        "logit_bias": {str(first): 100, str(second): 100},
        "logprobs": True,
        "seed": 5,
        "stream": True,
    }
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options)]
    text = "".join(chunk.delta.content for chunk in chunks)
    tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content]
    said = b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace")
    assert text.rstrip("\ufffd") == said.rstrip("\ufffd")
    assert text.count("é") == said.count("é") > 5


def _byte_tokens(client: openai.OpenAI, text: str) -> list[int]:
    url = str(client.base_url).replace("/v1/", "/tokenize")
    ids = httpx.post(url, json={"prompt": text}, timeout=240).json()["tokens"]
    assert len(ids) == len(text.encode())
    return ids


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served, address, path, stream):
    body = {"prompt": "x", "messages": CHAT, "max_tokens": 400, "n": 2, "stream": stream}
    body |= {"ignore_eos": True, "temperature": 0}
    generated = _metric(address, "generation_tokens_total")
    served.gate.hold_after(3)
    with _raw_post(address, f"/v1/{path}", json.dumps(body).encode()):
        asyncio.run(served.gate.until_held())
        assert _metric(address, "num_requests_running") == 2
    wait_until(lambda: served.engine.num_commands > 0)
    served.gate.open()
    wait_until(lambda: _is_idle(address))
    assert 0 < _metric(address, "generation_tokens_total") - generated <= 2 * 4


def _raw_post(address: str, path: str, body: bytes) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_a_body_that_ends_early_harms_nobody(address, client):
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    assert client.models.list().data


@pytest.mark.parametrize("length", [str(2**25 + 1), str(2**63), "0" * 5000 + str(2**25 + 1)])
def test_a_length_over_the_limit_is_refused_before_the_body_comes(address: str, length: str):
    host, port = address.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
        assert connection.recv(13, socket.MSG_WAITALL) == b"HTTP/1.1 413 "


@pytest.mark.slow
def test_a_hundred_megabytes_are_refused(address, client):
    body = b'{"prompt": "' + b"x" * 100_000_000 + b'"}'
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{address}/v1/completions", content=body, headers=headers, timeout=240)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert client.models.list().data


def test_events_are_separate_lines_on_the_wire(address: str) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 5, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=240) as response:
        raw = b"".join(response.iter_raw())
    assert response.headers["content-type"].startswith("text/event-stream")
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert all(line.startswith(b"data: ") for line in raw.split(b"\n\n")[:-1])
