"""Hit rates of eviction policies and of the optimum on public traces, and what requests compute.

    python benches/core/policies.py [taubench ...] [--record FILE]

Blocks of prompts alone, request by request. Sizes of the pool are in percent of the blocks that a
trace's prompts have, rounded down. The results depend on nothing but code and trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefixcache._core import TraceReplay
from prefixcache.tools.bench.machine import usable_cores, write_record

FOLDER = Path(__file__).parents[1] / "traces"
TRACES = ("mooncake_conv", "taubench", "weka64_A")
PERCENTS = (1, 2, 5, 10, 20, 50)
POLICIES = ("lru", "reuse-queue")
PERCENTILES = (50, 90, 99)


def opened(name: str, *, with_history: bool) -> TraceReplay:
    path = FOLDER / f"{name}.ptt.gz"
    return TraceReplay(path, threads=usable_cores(), with_history=with_history)


def run(replay: TraceReplay) -> TraceReplay:
    while replay.advance():
        pass
    return replay


def rows(name: str) -> Iterator[dict[str, Any]]:
    noted = run(opened(name, with_history=True))
    history = noted.history()
    blocks = [history["unique_blocks"] * percent // 100 for percent in PERCENTS]
    row = {"trace": noted.name, "blocks": blocks}
    for policy in POLICIES:
        replay = opened(name, with_history=False)
        numbers = [replay.add(size, eviction_policy=policy) for size in blocks]
        found = [run(replay).outcome(number) for number in numbers]
        rates = [100 * (one["hit_tokens"] / one["input_tokens"]) for one in found]
        computed = [[one[f"computed_p{percentile}"] for one in found] for percentile in PERCENTILES]
        yield row | {"order": policy, "hit_percent": rates, "computed": computed}
    tokens = [one["hit_tokens"] for one in noted.optimum(blocks)]
    yield row | {
        "order": "optimum",
        "hit_percent": [100 * hit / history["input_tokens"] for hit in tokens],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    print("token hit rate in percent | tokens computed at p50 | p90 | p99, by size of the pool")
    print(" " * 27 + "".join(f"{percent:6}%" for percent in PERCENTS))
    recorded = []
    for name in asked.traces:
        for row in rows(name):
            recorded.append(row)
            rates = "".join(f"{rate:7.2f}" for rate in row["hit_percent"])
            computed = ["".join(f"{n:8}" for n in of) for of in row.get("computed", ())]
            print(" | ".join([f"{row['trace']:14} {row['order']:12}{rates}", *computed]))
    write_record(asked.record, rows=recorded)


if __name__ == "__main__":
    main()
