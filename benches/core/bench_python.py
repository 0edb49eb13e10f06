"""What the cache costs through Python: thread CPU time, medians, with the tests' plain reference.

    python benches/core/bench_python.py [--threads shared] [--repeats 25]

A pool of 131,072 blocks of 16 tokens and a prompt of 32,768 tokens (2,048 blocks), given as a numpy
array, unless a row says otherwise. The reference does each piece of work once.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache._core import PrefixCache

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from reference.cache import ReferenceCache
from reference.prefix_hashes import Root, block_hashes

BLOCK = 16
NUM_BLOCKS = 131_072
PROMPT = 32_768
HYBRID = ["full"] + [("sliding_window", 1024)] * 6  # Gemma 3's, with its window
IN_A_ROW = 8  # evictions that are timed together
MICROSECOND = 1_000  # of the nanoseconds that are measured

Work = Callable[[], Any]
Make = Callable[..., Any]  # a cache with this many blocks, and of these groups if they are given


@dataclass
class Row:
    """A piece of work: its name, the unit that its times are shown in, and how it is done.

    `setup` makes what the work needs, out of a cache; the work is measured alone. A work
    that is too short for that is `calls` calls in a row, and one of them is shown.
    """

    name: str
    setup: Callable[[Make], Iterator[Work]]
    for_reference: bool = True
    calls: int = 1


def tokens(seed: int, count: int = PROMPT) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 150_000, count, dtype=np.int32)


def cached(cache: Any, prompt: Any) -> Any:
    """A released sequence whose full blocks are cached."""
    sequence = cache.new_sequence(prompt)
    cache.commit_prefix_plan(sequence, 0, len(prompt))
    cache.mark_blocks_filled([sequence], [len(prompt)])
    cache.release([sequence])
    return sequence


def again(work: Work, undo: Work = lambda: None) -> Iterator[Work]:
    """The same work any number of times, and what makes it possible once more."""
    while True:
        yield work
        undo()


def hash_prompt(count: int) -> Callable[[Make], Iterator[Work]]:
    def setup(make: Make) -> Iterator[Work]:
        cache, prompt = make(2), tokens(0, count)
        if isinstance(cache, ReferenceCache):
            plain = prompt.tolist()
            return again(lambda: block_hashes(Root().hash(), BLOCK, plain))
        return again(lambda: cache.compute_block_hashes(prompt))

    return setup


def hash_list(make: Make) -> Iterator[Work]:
    cache, prompt = make(2), tokens(0).tolist()
    return again(lambda: cache.compute_block_hashes(prompt))


def match(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS)
    sequence = cached(cache, tokens(0))
    return again(lambda: cache.count_prefix_hits(sequence))


def first_look(make: Make) -> Iterator[Work]:
    cache, prompt = make(NUM_BLOCKS), tokens(0)
    cached(cache, prompt)
    return again(lambda: cache.count_prefix_hits(cache.new_sequence(prompt)))


def committed(cache: Any, sequence: Any, *plan: int) -> Iterator[Work]:
    """Commits the plan each time, and releases it."""
    return again(
        lambda: cache.commit_prefix_plan(sequence, *plan), lambda: cache.release([sequence])
    )


def allocate_cold(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS)
    return committed(cache, cache.new_sequence(tokens(0)), 0, PROMPT)


def fill_with(cache: Any, prompts: int, blocks: int) -> None:
    for seed in range(1, 1 + prompts):
        cached(cache, tokens(seed, blocks * BLOCK))


def allocate_evicting(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS)
    fill_with(cache, 32, NUM_BLOCKS // 32)
    for seed in range(1000, 2000):
        sequence = cache.new_sequence(tokens(seed))
        yield lambda: cache.commit_prefix_plan(sequence, 0, PROMPT)  # noqa: B023
        cache.mark_blocks_filled([sequence], [PROMPT])
        cache.release([sequence])


def allocate_warm(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS)
    return committed(cache, cached(cache, tokens(0)), PROMPT, 0)


def publish(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS)
    for seed in range(1000):
        sequence = cache.new_sequence(tokens(seed))
        cache.commit_prefix_plan(sequence, 0, PROMPT)
        yield lambda: cache.mark_blocks_filled([sequence], [PROMPT])  # noqa: B023
        cache.release([sequence])


def free(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS)
    sequence = cached(cache, tokens(0))
    while True:
        cache.commit_prefix_plan(sequence, PROMPT, 0)
        yield lambda: cache.release([sequence])


def evict_16_of(prefixes: int) -> Callable[[Make], Iterator[Work]]:
    def setup(make: Make) -> Iterator[Work]:
        cache = make(prefixes + 1)
        fill_with(cache, prefixes, 1)
        seeds = itertools.count(prefixes + 1)
        while True:
            prompts = [tokens(next(seeds), 16 * BLOCK) for _ in range(IN_A_ROW)]
            evicting = [cache.new_sequence(prompt) for prompt in prompts]
            yield lambda: commit_each(cache, evicting)  # noqa: B023
            cache.mark_blocks_filled(evicting, [16 * BLOCK] * IN_A_ROW)
            cache.release(evicting)

    return setup


def commit_each(cache: Any, sequences: list[Any]) -> None:
    for sequence in sequences:
        cache.commit_prefix_plan(sequence, 0, sequence.num_tokens)


def decoding(make: Make, *groups: Any) -> tuple[Any, list[Any]]:
    """A cache, and 256 sequences in it of about 100 tokens."""
    cache = make(NUM_BLOCKS, *groups)
    sequences = [cache.new_sequence(tokens(seed, 100 + seed % BLOCK)) for seed in range(256)]
    return cache, sequences


def decode_256(make: Make, *groups: Any) -> Iterator[Work]:
    cache, sequences = decoding(make, *groups)
    commit_each(cache, sequences)
    return again(lambda: cache.append_slots(sequences, [1] * 256))


def append_tokens_256(make: Make) -> Iterator[Work]:
    cache, sequences = decoding(make)
    sampled = tokens(0, len(sequences))
    return again(lambda: cache.append_tokens(sequences, sampled))


def match_hybrid(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS, HYBRID)
    sequence = cached(cache, tokens(0))
    return again(lambda: cache.count_prefix_hits(sequence, PROMPT - 1))


def allocate_hybrid_warm(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS, HYBRID)
    return committed(cache, cached(cache, tokens(0)), PROMPT - BLOCK, BLOCK)


def allocate_hybrid_cold(make: Make) -> Iterator[Work]:
    cache = make(NUM_BLOCKS, HYBRID)
    return committed(cache, cache.new_sequence(tokens(0)), 0, PROMPT, 2048)


def drop_of(interval: int | None) -> Callable[[Make], Iterator[Work]]:
    def setup(make: Make) -> Iterator[Work]:
        cache = make(NUM_BLOCKS, HYBRID)
        for seed in range(1000):
            sequence = cache.new_sequence(tokens(seed))
            sequence.set_retention(interval)
            cache.commit_prefix_plan(sequence, 0, PROMPT)
            cache.mark_blocks_filled([sequence], [PROMPT])
            yield lambda: cache.drop_unneeded([sequence], [PROMPT])  # noqa: B023
            cache.release([sequence])

    return setup


def drop_nothing_256(make: Make) -> Iterator[Work]:
    cache, sequences = decoding(make, HYBRID)
    commit_each(cache, sequences)
    upto = [sequence.num_tokens for sequence in sequences]
    return again(lambda: cache.drop_unneeded(sequences, upto))


ROWS = [
    Row("hash 16 tokens", hash_prompt(16)),
    Row("hash 256 tokens", hash_prompt(256)),
    Row("hash 2k tokens", hash_prompt(2_048)),
    Row("hash 32k tokens", hash_prompt(PROMPT)),
    Row("hash 32k tokens, from a list", hash_list, for_reference=False),
    Row("match, fully cached", match),
    Row("hash 32k tokens and match", first_look, for_reference=False),
    Row("allocate cold", allocate_cold),
    Row("allocate, evicting 2,048", allocate_evicting),
    Row("allocate warm (all hit)", allocate_warm),
    Row("publish 2,048 blocks", publish),
    Row("free", free),
    Row("evict 16 of 1,000 prefixes", evict_16_of(1_000), calls=IN_A_ROW),
    Row("evict 16 of 10,000 prefixes", evict_16_of(10_000), calls=IN_A_ROW),
    Row("evict 16 of 100,000 prefixes", evict_16_of(100_000), False, IN_A_ROW),
    Row("decode: slots for 256 sequences", decode_256),
    Row("decode: tokens of 256 sequences", append_tokens_256),
    Row("7 groups: match, fully cached", match_hybrid),
    Row("7 groups: allocate warm", allocate_hybrid_warm),
    Row("7 groups: allocate cold, chunked", allocate_hybrid_cold),
    Row("7 groups: slots for 256 sequences", lambda make: decode_256(make, HYBRID)),
    Row("7 groups: drop nothing, 256 seqs", drop_nothing_256),
    Row("7 groups: drop 11,904, registered", drop_of(None), for_reference=False),
    Row("7 groups: drop 11,898, forgotten", drop_of(0), for_reference=False),
]


def measure(row: Row, make: Make, repeats: int) -> float:
    """The median time of one call of the work in microseconds."""
    times = []
    for _, work in zip(range(repeats), row.setup(make), strict=False):
        start = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / row.calls / MICROSECOND


def overhead() -> float:
    """What measuring itself costs, in microseconds; it is in the number of every single call."""
    return measure(Row("nothing", lambda _: iter([lambda: None] * 101)), PrefixCache, 101)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def report_large_pool(threads: Any) -> None:
    """A pool of 1M blocks: its construction, and its memory when every block has been used."""
    count = 1_000_000
    before = resident_bytes()
    start = time.thread_time_ns()
    cache = PrefixCache(count + 1, BLOCK, threads=threads, model="m")
    built = (time.thread_time_ns() - start) / MICROSECOND / 1_000
    fresh = resident_bytes() - before
    for seed in range(count // 2_000):
        cached(cache, tokens(seed, 2_000 * BLOCK))
    used = resident_bytes() - before
    print(
        f"pool of 1M blocks: built in {built:.2f} ms; "
        f"{fresh / count:.0f} bytes a block when new, {used / count:.0f} when all are cached"
    )


def slow_cache(num_blocks: int, groups: Any = ("full",)) -> ReferenceCache:
    return ReferenceCache(num_blocks, BLOCK, groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="single_writer", choices=["single_writer", "shared"])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--no-reference", action="store_true")
    arguments = parser.parse_args()
    report_large_pool(arguments.threads)
    print(f"measuring costs {overhead():.2f} us of each call; threads={arguments.threads!r}")
    print(f"{'us':34} {'core':>9} {'reference':>11}")
    for row in ROWS:
        core = measure(
            row,
            lambda n, groups=None: PrefixCache(
                n, BLOCK, groups=groups, threads=arguments.threads, model="m"
            ),
            arguments.repeats,
        )
        slow = ""
        if row.for_reference and not arguments.no_reference:
            slow = f"{measure(row, slow_cache, 1):11,.0f}"
        print(f"{row.name:34} {core:9.1f} {slow:>11}", flush=True)


if __name__ == "__main__":
    main()
