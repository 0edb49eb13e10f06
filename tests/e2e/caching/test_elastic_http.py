"""The cache changes its size under load: answers stay, and everybody reads how far it is."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from typing import Any

import httpx
import pytest

from fakes.fake_runner import StepGate
from support.repeatable import LONG, bounded
from support.server_process import PREFIXCACHE, server_process
from support.serving import MODEL, metric, served_folder

PATH = "/prefix_cache/resize"


def completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def text_of(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def test_a_resize_is_answered_with_how_far_it_is(tiny_checkpoint):
    options = {"num_blocks": 100, "kv_cache_max_memory": "8MiB", "kv_cache_min_memory": "200KiB"}
    async with served_folder(tiny_checkpoint(), **options) as (client, engine):
        start = (await client.get(PATH)).json()
        assert (start["is_done"], start["num_blocks"]) == (True, 100)
        assert start["max_blocks"] == (8 << 20) // start["block_bytes"]
        await text_of(client, completion([*range(200, 5, -1)] * 2, 1))
        grown = await client.post(PATH, json={"memory": "8MiB"})
        assert (grown.status_code, grown.json()["num_blocks"]) == (200, start["max_blocks"])
        least = start["min_blocks"]
        for body, param in (
            ({"num_blocks": least - 1}, "num_blocks"),
            ({"num_blocks": start["max_blocks"] + 1}, "num_blocks"),
            ({"num_blocks": 0}, "num_blocks"),
            ({"num_blocks": "9"}, "num_blocks"),
            ({"memory": "5bit"}, "memory"),
            ({"memory": -1}, "memory"),
            ({}, "memory"),
        ):
            refused = await client.post(PATH, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
        gate = StepGate(engine._engine._steps._runner)
        gate.hold_after(1)
        answer = asyncio.create_task(text_of(client, completion([*range(5, 205)], 150)))
        await gate.until_held()
        shrink = client.post(PATH, json={"num_blocks": least})
        shrunk = await gate.open_for(engine, shrink)
        assert shrunk.status_code == 202
        assert shrunk.json()["blocks_held_above"] > 0
        found = await stats(client)
        assert found["memory"]["held_bytes"] == found["blocks_in_use"] * start["block_bytes"]
        await answer
        while not (end := (await client.get(PATH)).json())["is_done"]:
            await asyncio.sleep(0.001)
        assert end["num_blocks"] == least
        assert end["bytes_given_back"] > 0
        page = (await client.get("/metrics")).text
        assert metric(page, "kv_cache_blocks") == least
        assert metric(page, "kv_cache_resizes_total") == 2
        assert metric(page, "kv_cache_reserved_bytes") == start["max_blocks"] * start["block_bytes"]
        memory = (await stats(client))["memory"]
        assert memory["mapped_bytes"] <= (least + 32) * start["block_bytes"]
        assert memory["held_bytes"] == 0


async def stats(client: httpx.AsyncClient) -> dict[str, Any]:
    return (await client.get("/prefix_cache/stats")).json()


async def test_no_answer_changes_while_the_cache_grows_and_shrinks(tiny_checkpoint, seed):
    choose = random.Random(seed)
    stems = [[choose.randrange(5, 300) for _ in range(120)] for _ in range(4)]
    bodies = [
        completion(choose.choice(stems)[: choose.randrange(20, 120)], choose.randrange(1, 24))
        for _ in range(bounded(40, 2000))
    ]
    async with served_folder(tiny_checkpoint(), num_blocks=150, max_num_seqs=6) as (client, engine):
        alone = {
            str(body): await text_of(client, body)
            for body in {str(body): body for body in bodies}.values()
        }
        await client.post("/reset_prefix_cache")
        in_flight = asyncio.Semaphore(12)
        sizes: set[int] = set()
        ended = asyncio.Event()

        async def ask(body: dict[str, Any]) -> None:
            async with in_flight:
                assert await text_of(client, body) == alone[str(body)]

        async def resize() -> None:
            while not ended.is_set() or len(sizes) < 3:
                answer = await client.post(PATH, json={"num_blocks": choose.randrange(24, 151)})
                assert answer.status_code in (200, 202), answer.text
                sizes.add(answer.json()["num_blocks"])
                await asyncio.sleep(choose.random() / 200)

        resizing = asyncio.create_task(resize())
        await asyncio.gather(*map(ask, bodies))
        ended.set()
        await resizing
        found = await stats(client)
        assert found["blocks_in_use"] == 0
        assert found["hits"] > 0
        await client.post(PATH, json={"num_blocks": 150})
        for first in range(5, 17):  # more than the pool holds: what was used last lies anywhere
            await text_of(client, completion([first, *range(20, 220)], 1))
        await client.post(PATH, json={"num_blocks": 40})
        assert (await stats(client))["memory"]["blocks_moved"] > found["memory"]["blocks_moved"]
        engine.control._cache.core.validate()


async def test_requests_that_no_longer_fit_are_asked_to_come_again(tiny_checkpoint):
    async with served_folder(tiny_checkpoint(), num_blocks=40) as (client, engine):
        body = completion([*range(5, 205)], 100)
        await client.post("/pause")
        streamed = asyncio.create_task(client.post("/v1/completions", json=body | {"stream": True}))
        whole = asyncio.create_task(client.post("/v1/completions", json=body))
        while engine.num_streams < 2:
            await asyncio.sleep(0.001)
        assert (await client.post(PATH, json={"num_blocks": 8})).status_code == 200
        await client.post("/resume")
        answer = await whole
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        error = answer.json()["error"]
        assert error["code"] == "insufficient_kv_cache"
        assert "of the cache's 7" in error["message"]
        events = (await streamed).text.split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"] == error
        assert (await client.post("/v1/completions", json=body)).status_code == 400
        await client.post(PATH, json={"num_blocks": 40})
        assert await text_of(client, body)


@pytest.mark.skipif(not LONG, reason="one of the long tests")
def test_a_server_killed_in_a_shrink_serves_on_after_a_restart(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint()
    command = [*PREFIXCACHE, "serve", "--model", folder, "--port", "0", "--num-blocks", "20000"]
    body = completion([*range(5, 200)], 8) | {"model": str(folder)}
    texts: list[str] = []
    for turn in range(4):
        with server_process(command, tmp_path / f"log-{turn}") as server:
            client = httpx.Client(base_url=server.address, timeout=240)
            texts.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            server.process.send_signal(signal.SIGSTOP)
            with pytest.raises(httpx.TransportError):
                client.post(PATH, json={"num_blocks": 50}, timeout=0.1)
            server.process.send_signal(signal.SIGCONT)
            server.process.kill()
            assert server.end() == -signal.SIGKILL
    assert len(set(texts)) == 1
