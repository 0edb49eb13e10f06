"""A sequence that nobody released gives its blocks back when it is collected."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixcache._core import PrefixCache, Sequence

BLOCK = 4
THREADS = ["single_writer", "shared"]


@pytest.fixture(params=THREADS)
def cache(request: pytest.FixtureRequest) -> Iterator[PrefixCache]:
    cache = PrefixCache(33, BLOCK, threads=request.param)
    yield cache
    assert cache.num_free_blocks == cache.num_blocks - 1
    cache.validate()


def committed(cache: PrefixCache, num_tokens: int = 4 * BLOCK) -> Sequence:
    sequence = cache.new_sequence(range(num_tokens))
    assert cache.commit_prefix_plan(sequence, 0, num_tokens) == 0
    cache.mark_blocks_filled([sequence], [num_tokens])
    return sequence


def test_as_a_release_does(cache: PrefixCache) -> None:
    released = PrefixCache(33, BLOCK)
    sequence = committed(released)
    released.release([sequence])
    committed(cache)
    assert cache.free_order() == released.free_order()
    assert cache.cached_blocks() == released.cached_blocks()
    assert cache.count_prefix_hits(cache.new_sequence(range(17))) == 16


def test_one_that_was_released_gives_nothing_back_twice(cache: PrefixCache) -> None:
    sequence = committed(cache)
    cache.release([sequence])
    kept = committed(cache)
    del sequence
    assert cache.num_free_blocks == cache.num_blocks - 5
    cache.release([kept])


def test_in_a_cycle(cache: PrefixCache) -> None:
    cycle: list[object] = [committed(cache)]
    cycle.append(cycle)
    del cycle
    gc.collect()


def test_in_another_thread(cache: PrefixCache) -> None:
    """Where that thread may not write, the writer's next call gives the blocks back."""
    sequences = [committed(cache)]
    with ThreadPoolExecutor(1) as executor:
        executor.submit(sequences.clear).result()
    cache.demote(1)


@pytest.mark.parametrize("close", [False, True])
def test_after_its_cache(close: bool) -> None:
    cache = PrefixCache(33, BLOCK)
    sequence = committed(cache)
    if close:
        cache.close()
    del cache
    assert sequence.is_committed
    del sequence


@pytest.mark.parametrize("threads", THREADS)
def test_while_the_writer_is_inside(threads: str) -> None:
    """One thread writes, in calls that let the other run, which drops what it is handed."""
    long = 4_096
    cache = PrefixCache(4 * long + 1, BLOCK, threads=threads)  # type: ignore[arg-type]
    handed: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()

    def drop_all() -> None:
        while handed.get() is not None:
            pass

    dropper = threading.Thread(target=drop_all)
    dropper.start()
    for turn in range(60):
        sequence = cache.new_sequence([turn] * long)
        if cache.commit_prefix_plan(sequence, 0, long) is not None:
            cache.mark_blocks_filled([sequence], [long])
        handed.put(sequence)
        del sequence
    handed.put(None)
    dropper.join()
    cache.demote(1)
    assert cache.num_free_blocks == cache.num_blocks - 1
    assert cache.stats()["allocations"] > 4 * long // BLOCK
    cache.validate()
