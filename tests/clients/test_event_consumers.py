"""Dynamo's consumer, from its wheel, knows of every prompt how much of it the server has cached.

It reads events over ZMQ and hashes token ids by itself. Each request checks what it said before:
the server reports the tokens that it found.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import time
from collections.abc import Generator
from typing import Any

import httpx
import pytest
from dynamo.llm import SelectionService

from conftest import ROOT, SERVER, started

BLOCK_SIZE = 16
NUM_BLOCKS = 48
FREE_PORT = "tcp://127.0.0.1:*"
EVENTS = {"enable_kv_cache_events": True, "endpoint": FREE_PORT, "replay_endpoint": FREE_PORT}
WRITE_MODEL = (
    "import sys; from support.tiny_models import make_checkpoint; make_checkpoint(sys.argv[1])"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client, None, None]:
    """A client of a tiny model's server that has few blocks."""
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([SERVER, "-c", WRITE_MODEL, str(folder)], cwd=ROOT / "tests", check=True)
    options = ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)]
    with (
        started(
            [str(folder), *options, "--kv-events-config", json.dumps(EVENTS)], folder / "log"
        ) as address,
        httpx.Client(base_url=address, timeout=240) as client,
    ):
        yield client


class Consumer:
    """Dynamo's selection service, subscribed to one server."""

    def __init__(self, server: httpx.Client) -> None:
        self._service = SelectionService(indexer_threads=1)
        self._endpoints = server.get("/server_info").json()["kv_events"]

    async def subscribe(self) -> None:
        """Its subscription takes effect a moment after this."""
        worker = {
            "worker_id": 1,
            "endpoint": "http://127.0.0.1:1",
            "kv_events_endpoint": self._endpoints["endpoint"],
            "replay_endpoint": self._endpoints["replay_endpoint"],
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": 1024,
        }
        record = await self._service.upsert_worker(worker)
        assert record["lifecycle"] == "schedulable"

    async def num_cached(self, prompt: list[int]) -> int:
        """Leading blocks of the prompt that the server has cached, as Dynamo knows it."""
        scores = await self._service.overlap_scores({"token_ids": prompt})
        return sum(worker["device_blocks"] for worker in scores["workers"])

    async def wait_for(self, prompt: list[int], blocks: int) -> None:
        """Until it knows of these blocks, and so of all before them: events come in order."""
        deadline = time.monotonic() + 240
        while await self.num_cached(prompt) != blocks:
            assert time.monotonic() < deadline, await self.num_cached(prompt)
            await asyncio.sleep(0.01)

    def shutdown(self) -> None:
        self._service.shutdown()


def ask(server: httpx.Client, prompt: list[int]) -> int:
    """Sends a prompt; how many of its blocks were cached."""
    model = server.get("/v1/models").json()["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 1}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] // BLOCK_SIZE


def prompts(seed: int) -> list[list[int]]:
    """Conversations that take turns, of more tokens together than the cache holds."""
    choose = random.Random(seed)
    draw = lambda count: [choose.randrange(300) for _ in range(count)]  # noqa: E731
    talks = [draw(choose.randrange(20, 60)) for _ in range(6)]
    found: list[list[int]] = []
    for _ in range(60):
        talk = choose.choice(talks)
        talk += draw(choose.randrange(1, 30))
        if len(talk) > 300:
            del talk[20:]
        found.append(list(talk))
    return found


def test_dynamo_knows_what_is_cached(server: httpx.Client) -> None:
    asyncio.run(_follow(server))


async def _follow(server: httpx.Client) -> None:
    consumer = Consumer(server)
    await consumer.subscribe()
    await _wait_for_subscription(consumer, server)
    hits = 0
    for prompt in prompts(seed=1):
        said = await consumer.num_cached(prompt)
        cached = ask(server, prompt)
        # The last token is always computed.
        assert cached == min(said, (len(prompt) - 1) // BLOCK_SIZE)
        hits += cached
        await consumer.wait_for(prompt, len(prompt) // BLOCK_SIZE)
    assert hits
    assert server.get("/metrics").text.count("kv_event_blocks_total{model_name") == 2
    server.post("/reset_prefix_cache").raise_for_status()
    await consumer.wait_for(prompt, 0)
    consumer.shutdown()


async def _wait_for_subscription(
    consumer: Consumer, server: httpx.Client, keep: list[int] | None = None
) -> None:
    """Sends prompts until it knows of one: what is published before has no reader yet.

    None of them evicts the prompt `keep`, however long this takes.
    """
    deadline = time.monotonic() + 240
    for token in itertools.cycle(range(300)):
        assert time.monotonic() < deadline, "Dynamo gets no events"
        prompt = [token] * (BLOCK_SIZE + 1)
        ask(server, prompt)
        if keep is not None:
            ask(server, keep)
        await asyncio.sleep(0.05)
        if await consumer.num_cached(prompt):
            return


def test_dynamo_joins_late_and_reads_the_replay(server: httpx.Client) -> None:
    before = [300 - at for at in range(100)]
    ask(server, before)
    asyncio.run(_join(server, before))


async def _join(server: httpx.Client, before: list[int]) -> None:
    consumer = Consumer(server)
    await consumer.subscribe()
    await _wait_for_subscription(consumer, server, keep=before)
    await consumer.wait_for(before, len(before) // BLOCK_SIZE)
    consumer.shutdown()
