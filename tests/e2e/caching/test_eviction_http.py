"""Orders of eviction, and what metrics tell of the blocks that go, through a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixcache.config.engine_config import EngineConfig
from prefixcache.exceptions import ConfigError
from support.serving import MODEL, metric, served_folder

HISTOGRAMS = (
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
)
TURNS = 4


async def converse(folder: Path, **flags: Any) -> tuple[list[Any], dict[str, Any], str]:
    """Dialogues that take turns, of more tokens than the pool holds; answers, stats, metrics."""
    answers = []
    async with served_folder(folder, num_blocks=40, **flags) as (client, _):
        prompts = [[5 + i + 7 * number for i in range(60)] for number in range(3)]
        for _ in range(TURNS):
            for prompt in prompts:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
                response = await client.post("/v1/completions", json=body | {"logprobs": 3})
                assert response.status_code == 200, response.text
                answers.append(response.json()["choices"])
                prompt.extend([9] * 70 if len(answers) % 5 else [11] * 20)
        stats = (await client.get("/prefix_cache/stats")).json()
        return answers, stats, (await client.get("/metrics")).text


async def test_the_order_of_eviction_changes_no_answer_and_metrics_tell_what_went(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    folder = tiny_checkpoint("llama")
    plain, _, page = await converse(folder)
    assert not any(name in page for name in HISTOGRAMS)
    flags = {"eviction_policy": "reuse-queue", "kv_cache_metrics": True}
    answers, stats, page = await converse(folder, **flags)
    assert answers == plain
    assert stats["evictions"] > 0
    lifetime, idle, gap = HISTOGRAMS
    assert metric(page, f"{lifetime}_count") == stats["evictions"]
    assert metric(page, f"{idle}_count") == stats["evictions"]
    assert metric(page, f"{idle}_sum") <= metric(page, f"{lifetime}_sum")
    assert metric(page, f"{gap}_count") == stats["hit_tokens"] / stats["block_size"] > 0
    assert metric(page, "kv_block_losses_missed_total") == 0
    readers = [one for one in threading.enumerate() if one.name == "kv-cache-metrics"]
    assert len(readers) <= 1


@pytest.mark.parametrize("wrong", ["lfu", "LRU", 3])
def test_an_unknown_order_of_eviction_is_refused_by_its_flag(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"eviction_policy.*'lru' or 'reuse-queue'"):
        EngineConfig.from_flags(model="x", eviction_policy=wrong)
