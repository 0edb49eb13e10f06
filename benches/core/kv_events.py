"""What KV events cost the thread of the step loop: 2,048 new blocks, each evicting one.

    PYTHONPATH=python python benches/core/kv_events.py [--rounds 200]

Two caches take turns, one that keeps events and one that does not. Events are written by the commit
(evictions) and the marking (registrations); it prints their microseconds: the lower quartile, which
busy neighbours disturb little, and the least. What the reader's thread does is timed apart.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from prefixcache.core import PrefixCache

BLOCKS, SIZE = 2048, 16
TOKENS = BLOCKS * SIZE
PARTS = ("commit", "mark", "both", "reader")


def cache(keeps_events: bool) -> PrefixCache:
    made = PrefixCache(BLOCKS * 2 + 1, SIZE)
    if keeps_events:
        made.keep_events()
    return made


def serve(cache: PrefixCache, number: int) -> list[float]:
    """Seconds of the commit, the marking, both, and what a reader does with the events."""
    prompt = np.arange(number * TOKENS, (number + 1) * TOKENS, dtype=np.uint32)
    sequence = cache.new_sequence(prompt)
    times = [time.perf_counter()]
    cache.commit_prefix_plan(sequence, 0, TOKENS)
    times.append(time.perf_counter())
    cache.mark_blocks_filled([sequence], [TOKENS])
    times.append(time.perf_counter())
    cache.release([sequence])
    commit, mark = np.diff(times)
    return [commit, mark, commit + mark, 0.0]


def read(cache: PrefixCache) -> float:
    begun = time.perf_counter()
    while cache.take_events(512):
        pass
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    caches = {"off": cache(False), "on": cache(True)}
    rows: dict[str, list[list[float]]] = {name: [] for name in caches}
    for number in range(rounds):
        for name, one in caches.items():
            row = serve(one, number)
            if name == "on":
                row[-1] = read(one)
            rows[name].append(row)
    for name, all_rows in rows.items():
        micros = 1e6 * np.array(all_rows[3:])  # the first fill the pool
        quartile, least = np.quantile(micros, 0.25, axis=0), micros.min(axis=0)
        told = zip(PARTS, quartile, least, strict=True)
        print(name, *(f"{part} {many:.0f} ({few:.0f})" for part, many, few in told), sep="   ")


if __name__ == "__main__":
    main()
