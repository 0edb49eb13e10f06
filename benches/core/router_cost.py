"""What a routing decision takes with full caches: microseconds, and bytes of the router.

    python benches/core/router_cost.py [--replicas 64,256,1024] [--blocks 16384]

Each replica has the same 32 blocks first, of a system prompt, then sessions of 512 blocks that
nobody else has, and every eighth session once more at another replica. A prompt is a session of
some replica and 16 blocks that none has, whole or its first 112 blocks. Timed are
choosing, noting the choice, and settling it, in time of the thread's processor, so that other
processes count less.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from prefixcache.routing import PrefixRouting, RoutingWeights

BLOCK = 16
SYSTEM = np.arange(1, 33, dtype=np.uint64)
SESSION = 512


def session(number: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Hashes of a session's blocks behind the system prompt."""
    return np.random.default_rng(number).integers(1 << 63, size=SESSION, dtype=np.uint64)


def fill(routing: PrefixRouting, names: list[str], sessions: int) -> float:
    """Tells the router of all caches; returns microseconds a block."""
    told, seconds = 0, 0.0
    for at, name in enumerate(names):
        routing.add(name)
        blocks = [SYSTEM, *(session(at * sessions + i) for i in range(sessions))]
        other = ((at + 1) % len(names)) * sessions
        blocks += [session(other + i) for i in range(0, sessions, 8)]
        begin = time.thread_time()
        for part in blocks:
            routing.stored(name, part)
        seconds += time.thread_time() - begin
        told += sum(map(len, blocks))
    return 1e6 * seconds / told


def times(routing: PrefixRouting, sessions: int, blocks: int, rounds: int) -> list[float]:
    """Microseconds of each decision, sorted."""
    rng = np.random.default_rng(0)
    loads = dict.fromkeys(routing.replicas, 0.0)
    found = list[float]()
    for _ in range(rounds):
        known = session(int(rng.integers(sessions * len(loads))))
        new = rng.integers(1 << 63, size=16, dtype=np.uint64)
        hashes = np.concatenate([SYSTEM, known[: blocks - 48], new])
        begin = time.thread_time()
        best = routing.choose(hashes, len(hashes) * BLOCK, loads, most=4)[0]
        routing.settle(routing.route(best, hashes, len(hashes) * BLOCK))
        found.append(1e6 * (time.thread_time() - begin))
        assert best.hit_tokens >= (len(hashes) - 16) * BLOCK - 1, best
    return sorted(found)


def row(replicas: int, blocks: int) -> dict[str, Any]:
    sessions = blocks // SESSION
    # Without balance every prompt goes to its longest prefix, which is checked below.
    weights = RoutingWeights(balance=0)
    routing = PrefixRouting(block_size=BLOCK, max_blocks=2 * blocks, weights=weights)
    told = fill(routing, [f"replica-{i}" for i in range(replicas)], sessions)
    made: dict[str, Any] = {"replicas": replicas, "us_a_stored_block": round(told, 3)}
    for length in (128, 32 + SESSION + 16):
        found = times(routing, sessions, length, 2000)
        made[f"{length}_blocks_us"] = [round(found[len(found) * p // 100], 1) for p in (50, 99)]
    made["blocks"] = routing.num_blocks
    made["megabytes"] = round(routing.memory_bytes / 1e6, 1)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", default="64,256,1024")
    parser.add_argument("--blocks", type=int, default=16_384)
    given = parser.parse_args()
    for replicas in map(int, given.replicas.split(",")):
        print(json.dumps(row(replicas, given.blocks)), flush=True)


if __name__ == "__main__":
    main()
