"""What a map of a million blocks takes, and what it costs the thread that changes the cache.

`python benches/core/block_map.py`; about a minute.
"""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np

from prefixcache.core import PrefixCache

BLOCKS, BLOCK, PROMPT = 1_000_001, 16, 2_000
CELLS, AGES = 1024, (1, 10, 60, 600, 3600)


def serve(cache: PrefixCache, number: int) -> int:
    """A request's life, with content of its own; thread CPU nanoseconds."""
    tokens = np.arange(PROMPT * BLOCK, dtype=np.int32) + number
    sequence = cache.new_sequence(tokens)
    begun = time.thread_time_ns()
    hits = cache.count_prefix_hits(sequence, len(tokens) - 1)
    cache.commit_prefix_plan(sequence, hits, len(tokens) - hits)
    cache.mark_blocks_filled([sequence], [len(tokens)])
    cache.release([sequence])
    return time.thread_time_ns() - begun


def milliseconds(cache: PrefixCache) -> str:
    taken = []
    for _ in range(9):
        begun = time.thread_time_ns()
        cache.block_map(CELLS, AGES)
        taken.append((time.thread_time_ns() - begun) / 1e6)
    return f"{min(taken):.1f} ms, median {statistics.median(taken):.1f}"


class Reader:
    """Draws a map a second while it is on."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.on, self.ended = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.ended.wait(1.0):
            if self.on.is_set():
                self._cache.block_map(CELLS, AGES)


def main() -> None:
    cache = PrefixCache(BLOCKS, BLOCK)
    print(f"empty: {milliseconds(cache)}")
    number = 0
    for number in range(0, BLOCKS // PROMPT * 7, 7):
        serve(cache, number)
    print(f"full: {milliseconds(cache)}")
    cache.listen(1024)
    print(f"full, with ages: {milliseconds(cache)}")
    reader = Reader(cache)
    reader.thread.start()
    times: dict[bool, list[int]] = {False: [], True: []}
    for turn in range(16):
        is_on = turn % 2 == 1
        (reader.on.set if is_on else reader.on.clear)()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            number += 7
            times[is_on].append(serve(cache, number))
    reader.ended.set()
    reader.thread.join()
    means = {is_on: statistics.mean(found) / PROMPT for is_on, found in times.items()}
    print(
        f"the writer, ns of thread CPU a block: {means[False]:.1f} alone, {means[True]:.1f} beside "
        f"a map a second ({means[True] / means[False] - 1:+.2%})"
    )


if __name__ == "__main__":
    main()
