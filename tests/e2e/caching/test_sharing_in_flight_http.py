"""A crowd with one prefix, sent at once to an idle server; equal answers that share blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.engine.async_engine import AsyncEngine
from support.serving import MODEL, metric, served_folder

CROWD, PREFIX, TAIL, ANSWER = 64, 1024, 16, 2


def prompts() -> list[list[int]]:
    """Tails differ from their first token on, so that exactly the prefix is shared."""
    prefix = [3 + i % 300 for i in range(PREFIX)]
    return [[*prefix, 310 + i, *range(i, i + TAIL - 1)] for i in range(CROWD)]


@dataclass(frozen=True)
class Run:
    """What a crowd cost and got."""

    answers: list[str]
    cached: list[int]
    computed: int
    waits: int
    hit_tokens: int


@dataclass(frozen=True)
class Watched:
    """Answers, and the most blocks that were held at once."""

    choices: list[dict[str, Any]]
    held: int


@asynccontextmanager
async def served(folder: Path, **flags: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with served_folder(folder, **flags) as (client, _):
        yield client


async def send_crowd(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """All requests wait while the server is paused, so that they start in one and the same step."""
    await client.post("/pause")
    sent = [
        asyncio.ensure_future(
            client.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": p, "max_tokens": ANSWER, "temperature": 0},
            )
        )
        for p in prompts()
    ]
    while metric((await client.get("/metrics")).text, "num_requests_waiting") < CROWD:
        await asyncio.sleep(0.01)
    await client.post("/resume")
    return [response.json() for response in await asyncio.gather(*sent)]


async def run_crowd(folder: Path, **flags: Any) -> Run:
    options = {"num_blocks": 6000, "max_num_seqs": CROWD, "max_num_batched_tokens": 8192}
    async with served(folder, **options | flags) as client:
        replies = await send_crowd(client)
        page = (await client.get("/metrics")).text
    return Run(
        answers=[reply["choices"][0]["text"] for reply in replies],
        cached=[reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies],
        computed=int(metric(page, "iteration_tokens_total_sum")),
        waits=int(metric(page, "in_flight_waits_total")),
        hit_tokens=int(metric(page, "prefix_cache_hits_total")),
    )


async def test_a_crowd_computes_its_prefix_once(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(max_position_embeddings=2048)
    shared = await run_crowd(folder, share_in_flight=True)
    alone = await run_crowd(folder, share_in_flight=False)

    own = CROWD * (TAIL + ANSWER - 1)
    assert shared.computed == PREFIX + own
    assert shared.waits == CROWD - 1
    assert sorted(shared.cached) == [0] + [PREFIX] * (CROWD - 1)
    assert shared.hit_tokens == PREFIX * (CROWD - 1)

    assert alone.waits == 0
    assert alone.computed - own >= 7 * PREFIX
    assert alone.computed > 4 * shared.computed
    assert alone.answers == shared.answers


@pytest.mark.parametrize("merge", [True, False])
async def test_equal_answers_merge_their_blocks_between_steps(tiny_checkpoint, merge):
    """Four equal requests decode side by side: with merging they hold one copy of full blocks."""
    body = {"model": MODEL, "prompt": [5] * 33, "temperature": 0, "ignore_eos": True}
    async with served_folder(tiny_checkpoint(), merge_duplicate_blocks=merge) as (client, engine):
        alone = await client.post("/v1/completions", json={**body, "max_tokens": 100})
        await engine.run(lambda control: control.reset_prefix_cache())
        seen = await watch(engine, client, {**body, "max_tokens": 100})
        again = await client.post("/v1/completions", json={**body, "max_tokens": 100})
    texts = [choice["text"] for choice in seen.choices]
    assert texts == [alone.json()["choices"][0]["text"]] * 4
    assert again.json()["choices"][0]["text"] == texts[0]
    merged = engine._engine._cache.num_merged_blocks
    assert (merged > 0) is merge
    assert seen.held == (8 + 4 if merge else 2 + 4 * 7)


async def watch(engine: AsyncEngine, client: httpx.AsyncClient, body: dict[str, Any]) -> Watched:
    held = 0
    step = engine._engine.step

    def watched_step() -> Any:
        nonlocal held
        outputs = step()
        held = max(held, engine._engine._cache.core.stats()["blocks_in_use"])
        return outputs

    engine._engine.step = watched_step  # type: ignore[method-assign]
    await client.post("/pause")
    sent = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(4)]
    while metric((await client.get("/metrics")).text, "num_requests_waiting") < 4:
        await asyncio.sleep(0.01)
    await client.post("/resume")
    replies = [response.json() for response in await asyncio.gather(*sent)]
    return Watched([reply["choices"][0] for reply in replies], held)
