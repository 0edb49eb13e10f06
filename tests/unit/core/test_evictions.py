"""The order of eviction that a cache is made with, and what a listener is given of the content."""

import numpy as np
import pytest

from prefixcache.core import PrefixCache

BLOCK = 4
CLEARED, EVICTED, RESIZED = 0, 1, 4


def tokens_from(first: int, num_blocks: int) -> np.ndarray:
    return np.arange(first, first + num_blocks * BLOCK, dtype=np.int32)


def serve(cache: PrefixCache, first: int, num_blocks: int) -> int:
    """A request's whole life; how many of its tokens hit."""
    tokens = tokens_from(first, num_blocks)
    sequence = cache.new_sequence(tokens)
    hits = cache.count_prefix_hits(sequence, len(tokens) - 1)
    assert cache.commit_prefix_plan(sequence, hits, len(tokens) - hits) == hits
    cache.mark_blocks_filled([sequence], [len(tokens)])
    cache.release([sequence])
    return hits


def serve_named(cache: PrefixCache, first: int, num_blocks: int) -> list[bytes]:
    """The names of the request's blocks."""
    serve(cache, first, num_blocks)
    hashes = cache.compute_block_hashes(tokens_from(first, num_blocks))
    return [hashes.to_bytes(index) for index in range(num_blocks)]


@pytest.mark.parametrize("threads", ["single_writer", "shared"])
def test_each_evicted_block_is_reported_once_with_its_metadata(threads: str) -> None:
    cache = PrefixCache(5, BLOCK, threads=threads, max_blocks=9, model="m")  # type: ignore[arg-type]
    cache.set_time(10)
    serve(cache, 0, 2)
    cache.set_time(20)
    cache.listen(4, [1, 5, 60])
    cache.set_time(22)
    names = serve_named(cache, 0, 3)
    cache.set_time(23.5)
    others = serve_named(cache, 500, 4)
    lost = cache.take_evictions(100)
    assert lost["cause"].tolist() == [EVICTED] * 3
    assert [bytes(row) for row in lost["hash"]] == names[::-1]
    # The first two are from before the listening, which is as far back as ages go.
    assert lost["age"].tolist() == [1.5, 3.5, 3.5]
    assert lost["idle"].tolist() == [1.5] * 3
    assert lost["hits"].tolist() == [0, 1, 1]
    assert lost["is_last"].all()
    assert set(lost["band"]) == {2}
    assert set(lost["group"]) == {0}
    assert cache.reuse_gaps() == ([0, 2, 0, 0], 4.0)
    assert len(cache.take_evictions(100)["hash"]) == 0

    cache.resize(3)
    cache.clear_cache_index()
    lost = cache.take_evictions(100)
    assert lost["cause"].tolist() == [RESIZED] * 2 + [CLEARED]
    assert {bytes(row) for row in lost["hash"][:2]} < set(others)
    cache.resize(5)
    serve(cache, 900, 4)
    assert len(cache.take_evictions(100)["hash"]) == 0, "cleared content was reported again"


def test_a_full_log_counts_what_it_does_not_hold() -> None:
    cache = PrefixCache(17, BLOCK, model="m")
    assert cache.missed_evictions == 0
    assert len(cache.take_evictions(9)["hash"]) == 0
    cache.listen(3)  # Rounded up to 4.
    for first in range(0, 3000, 1000):
        serve(cache, first, 16)
    assert len(cache.take_evictions(3)["hash"]) == 3
    assert len(cache.take_evictions(100)["hash"]) == 1
    assert cache.missed_evictions == 32 - 4


def test_the_first_names_of_evictions_still_work() -> None:
    cache = PrefixCache(17, BLOCK, model="m")
    cache.listen(2)
    for first in range(0, 2000, 1000):
        serve(cache, first, 16)
    assert cache.missed_losses == cache.missed_evictions == 16 - 2
    assert len(cache.take_losses(max_losses=1)["hash"]) == 1
    assert len(cache.take_evictions(max_evictions=9)["hash"]) == 1
    with pytest.raises(ValueError, match="max_evictions"):
        cache.take_evictions(-1)


def test_bad_listeners_are_rejected_with_a_reason() -> None:
    cache = PrefixCache(17, BLOCK, model="m")
    for capacity in (0, -1, 2**40):
        with pytest.raises(ValueError, match="capacity"):
            cache.listen(capacity)
    for bounds in ([2, 1], [1, 1], [float("nan")], [-1.0]):
        with pytest.raises(ValueError, match="gap_bounds"):
            cache.listen(4, bounds)
    with pytest.raises(TypeError, match=r"gap_bounds\[0\]"):
        cache.listen(4, ["x"])  # type: ignore[list-item]
    cache.listen(4)
    with pytest.raises(RuntimeError, match="already"):
        cache.listen(4)


@pytest.mark.parametrize("policy", ["lru", "reuse-queue"])
@pytest.mark.parametrize("threads", ["single_writer", "shared"])
def test_a_cache_serves_in_any_order_of_eviction(policy: str, threads: str) -> None:
    cache = PrefixCache(17, BLOCK, eviction_policy=policy, threads=threads, model="m")  # type: ignore[arg-type]
    for first in range(0, 4000, 1000):
        assert serve(cache, first, 5) == 0
    assert serve(cache, 3000, 6) == 5 * BLOCK
    assert cache.num_free_blocks == 16
    cache.validate()


def test_dialogues_in_queues_of_their_own_survive_a_clear_and_a_resize() -> None:
    cache = PrefixCache(33, BLOCK, eviction_policy="reuse-queue", max_blocks=65, model="m")
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
