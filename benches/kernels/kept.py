"""Attention over keys and values kept as numbers and in eight bits, in turns.

`python benches/kernels/kept.py [--instructions avx2] [--output FILE]`, with the default model's
heads. A step writes its tokens, then reads: pages stand in no order, and layers are enough that
they do not stay in the cache. One thread computes and its own time counts, so that others on the
machine change less; the best of several is shown.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from prefixcache._core import Cpu, PagedAttention
from prefixcache.runner.cpu.linear import KernelDType
from prefixcache.tools.bench.machine import write_record

BLOCK, HEADS, KV_HEADS, DIMS = 16, 9, 3, 64
TURNS = 7


@dataclass(frozen=True)
class Case:
    """Sequences of `context` tokens, of which a step computes the last `new`."""

    sequences: int
    context: int
    new: int
    layers: int


CASES = (
    Case(1, 1024, 1, 30),
    Case(1, 4096, 1, 15),
    Case(8, 1024, 1, 15),
    Case(8, 4096, 1, 5),
    Case(1, 4096, 512, 1),
)


class Layers:
    """Layers that keep their keys and values in one way."""

    def __init__(self, cpu: Cpu, dtype: KernelDType, case: Case, *, has_codes: bool) -> None:
        self._attention = PagedAttention(
            cpu, dtype, HEADS, KV_HEADS, DIMS, DIMS**-0.5, keeps_codes=has_codes
        )
        pages = -(-case.context // BLOCK)
        count = case.sequences * pages
        order = np.random.default_rng(0).permutation(count).astype(np.int32) + 1
        sequences = np.arange(case.sequences + 1, dtype=np.int32)
        last = np.full(case.sequences, (case.context - 1) % BLOCK + 1, np.int32)
        positions = np.arange(case.context - case.new, case.context)
        tables = order.reshape(case.sequences, pages)
        slots = tables[:, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        self._attention.plan(
            count + 1, BLOCK, sequences * case.new, sequences * pages, order, last, slots.ravel()
        )
        itemsize = 4 if dtype == "float32" else 2
        row_bytes = DIMS + 4 if has_codes else DIMS * itemsize
        page_bytes = 2 * BLOCK * KV_HEADS * row_bytes
        # Zeros, whether numbers or codes: values do not change how long it takes.
        self._caches = np.full((case.layers, (count + 1) * page_bytes), 0, np.uint8)
        rows = case.sequences * case.new
        self._out = np.zeros((rows, HEADS * DIMS), f"V{itemsize}")
        self._queries = np.zeros((rows, HEADS * DIMS), f"V{itemsize}")
        self._keys = np.zeros((rows, KV_HEADS * DIMS), f"V{itemsize}")

    def step(self) -> float:
        """Milliseconds of the thread."""
        begun = time.thread_time()
        for cache in self._caches:
            self._attention.run(
                cache.ctypes.data,
                self._queries.ctypes.data,
                HEADS * DIMS,
                self._keys.ctypes.data,
                KV_HEADS * DIMS,
                self._keys.ctypes.data,
                KV_HEADS * DIMS,
                self._out.ctypes.data,
            )
        return (time.thread_time() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instructions", nargs="*", default=Cpu.available_instructions()[1:])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    ways: dict[str, tuple[KernelDType, bool]] = {
        "float32": ("float32", False),
        "bfloat16": ("bfloat16", False),
        "int8, computed in float32": ("float32", True),
        "int8, computed in bfloat16": ("bfloat16", True),
    }
    found: list[dict[str, object]] = []
    for case in CASES:
        for name in arguments.instructions:
            cpu = Cpu(1, name)
            layers = {
                way: Layers(cpu, dtype, case, has_codes=has_codes)
                for way, (dtype, has_codes) in ways.items()
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(TURNS):
                for way, each in layers.items():
                    times[way].append(each.step())
            best = {way: round(min(each), 3) for way, each in times.items()}
            found.append({**asdict(case), "instructions": name, "ms": best})
            print(case, name, best, flush=True)
    write_record(arguments.output, steps=found)


if __name__ == "__main__":
    main()
