"""A served Gemma 3 with pinned windows: a prefix outlives other traffic, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.serving import MODEL, metric, served_folder

PROMPT = [5 + i % 300 for i in range(200)]
KEPT = 192
# Together more than the pool holds, each too short to be pinned.
OTHERS = [[300 - i, *PROMPT[:140]] for i in range(20)]
FLAGS = {"num_blocks": 150, "pin_min_drop_size": 10}


async def ask(client: httpx.AsyncClient, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 5}
    response = await client.post("/v1/completions", json=body | options)
    assert response.status_code == 200, response.text
    return response.json()


def cached(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("pins", [True, False])
async def test_a_pinned_prefix_outlives_other_traffic(
    tiny_checkpoint: Callable[..., Path], pins: bool
) -> None:
    folder = tiny_checkpoint("gemma3")
    async with served_folder(folder, pin_swa_tokens=pins, **FLAGS) as (client, _):
        cold = await ask(client, PROMPT)
        for other in OTHERS:
            await ask(client, other, max_tokens=1)
        again = await ask(client, PROMPT)
        stats = (await client.get("/prefix_cache/stats")).json()
        page = (await client.get("/metrics")).text
    assert again["choices"] == cold["choices"]
    assert (cached(cold), cached(again)) == (0, KEPT if pins else 0)
    counts = ["pinned_blocks", *(f"{name}_total" for name in ("pins", "demotions", "pinned_hits"))]
    for name in counts:
        assert metric(page, name) == stats[name.removesuffix("_total")]
    assert (stats["pins"] > 0) is (stats["pinned_hits"] > 0) is pins
    assert 0 <= stats["pinned_blocks"] <= 0.2 * 149
    assert metric(page, "kv_cache_usage_perc") == stats["blocks_in_use"] == 0


async def test_what_windows_lost_is_counted(tiny_checkpoint: Callable[..., Path]) -> None:
    """Two prompts part in the middle; the second one repairs the prefix for the third.

    The pool has no room for what is behind the windows of the first.
    """
    shared = PROMPT[:96]
    prompts = [[*shared, *range(300 + i, 200 + i, -1)] for i in range(3)]
    async with served_folder(tiny_checkpoint("gemma3"), prefix_cache_max_blocks=32) as (client, _):
        hits = [cached(await ask(client, prompt)) for prompt in prompts]
        stats = (await client.get("/prefix_cache/stats")).json()
        page = (await client.get("/metrics")).text
    assert hits == [0, 0, 96]
    assert stats["window_missed_tokens"] == metric(page, "window_missed_tokens_total") == 96
