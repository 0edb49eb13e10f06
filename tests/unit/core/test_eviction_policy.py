"""The order of eviction that a cache is made with."""

import numpy as np
import pytest

from prefixcache.core import PrefixCache

BLOCK = 4


def serve(cache: PrefixCache, first: int, num_blocks: int) -> int:
    """A request's whole life; how many of its tokens hit."""
    tokens = np.arange(first, first + num_blocks * BLOCK, dtype=np.int32)
    sequence = cache.new_sequence(tokens)
    hits = cache.count_prefix_hits(sequence, len(tokens) - 1)
    assert cache.commit_prefix_plan(sequence, hits, len(tokens) - hits) == hits
    cache.mark_blocks_filled([sequence], [len(tokens)])
    cache.release([sequence])
    return hits


@pytest.mark.parametrize("policy", ["lru", "reuse-queue"])
@pytest.mark.parametrize("threads", ["single_writer", "shared"])
def test_a_cache_serves_in_any_order_of_eviction(policy: str, threads: str) -> None:
    cache = PrefixCache(17, BLOCK, eviction_policy=policy, threads=threads)  # type: ignore[arg-type]
    for first in range(0, 4000, 1000):
        assert serve(cache, first, 5) == 0
    assert serve(cache, 3000, 6) == 5 * BLOCK
    assert cache.num_free_blocks == 16
    cache.validate()


def test_dialogues_in_queues_of_their_own_survive_a_clear_and_a_resize() -> None:
    cache = PrefixCache(33, BLOCK, eviction_policy="reuse-queue", max_blocks=65)
    for turn in range(1, 12):
        serve(cache, 0, turn)
        serve(cache, 5000 * turn, 7)
        cache.validate()
    cache.clear_cache_index()
    assert serve(cache, 0, 11) == 0
    cache.resize(12)
    cache.validate()
    assert serve(cache, 0, 11) <= 10 * BLOCK
    cache.validate()
