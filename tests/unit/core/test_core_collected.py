"""A sequence that nobody released gives its blocks back when it is collected."""

from __future__ import annotations

import gc
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixcache._core import PrefixCache, Sequence

BLOCK = 4
THREADS = ["single_writer", "shared"]


@pytest.fixture(params=THREADS)
def cache(request: pytest.FixtureRequest) -> Iterator[PrefixCache]:
    cache = PrefixCache(33, BLOCK, threads=request.param, model="m")
    yield cache
    assert cache.num_free_blocks == cache.num_blocks - 1
    cache.validate()


def committed(cache: PrefixCache, num_tokens: int = 4 * BLOCK) -> Sequence:
    sequence = cache.new_sequence(range(num_tokens))
    assert cache.commit_prefix_plan(sequence, 0, num_tokens) == 0
    cache.mark_blocks_filled([sequence], [num_tokens])
    return sequence


def test_as_a_release_does(cache: PrefixCache) -> None:
    released = PrefixCache(33, BLOCK, model="m")
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


COUNTS_OF_FREE_BLOCKS: dict[str, Callable[[PrefixCache], int]] = {
    "num_free_blocks": lambda cache: cache.num_free_blocks,
    "stats": lambda cache: cache.stats()["free_blocks"],
    "free_order": lambda cache: len(cache.free_order()),
    "block_map": lambda cache: int(cache.block_map(1)[0][0, :2].sum()),
    "validate": lambda cache: (cache.validate([]), cache.num_free_blocks)[1],
    "demote": lambda cache: (cache.demote(1), cache.num_free_blocks)[1],
}


@pytest.mark.parametrize("name", COUNTS_OF_FREE_BLOCKS)
def test_in_another_thread(cache: PrefixCache, name: str) -> None:
    """Where that thread may not write, blocks count as free as soon as the writer counts them."""
    sequences = [committed(cache)]
    with ThreadPoolExecutor(1) as executor:
        executor.submit(sequences.clear).result()
    assert COUNTS_OF_FREE_BLOCKS[name](cache) == cache.num_blocks - 1


def test_what_was_counted_is_taken_though_others_are_collected(seed: int) -> None:
    """A bound on what is cached is kept once the hits of the commit are taken."""
    pick = random.Random(seed)
    cache = PrefixCache(33, BLOCK, max_cached_blocks=4, model="m")
    live: list[list[Sequence]] = []
    with ThreadPoolExecutor(1) as executor:
        for _ in range(400):
            sequence = cache.new_sequence(range(first := pick.randrange(3), first + 33))
            count = cache.count_prefix_hits(sequence)
            if live and pick.random() < 0.5:
                executor.submit(live.pop(pick.randrange(len(live))).clear).result()
            if pick.random() < 0.5:
                assert cache.num_free_blocks >= 32 - 9 * len(live)
            taken = cache.commit_prefix_plan(sequence, count, 33 - count)
            assert taken in (None, count)
            if taken is not None:
                cache.mark_blocks_filled([sequence], [33])
                live.append([sequence])
            del sequence
            while len(live) > 2:
                cache.release(live.pop(0))
    for left in live:
        cache.release(left)
    assert cache.stats()["cached_blocks"] <= 4


@pytest.mark.parametrize("close", [False, True])
def test_after_its_cache(close: bool) -> None:
    cache = PrefixCache(33, BLOCK, model="m")
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
    cache = PrefixCache(4 * long + 1, BLOCK, threads=threads, model="m")  # type: ignore[arg-type]
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
