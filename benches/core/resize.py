"""What a resize of the KV cache costs: copying, giving back, the longest wait of a step, growing.

    python benches/core/resize.py [--blocks 100000] [--pages small]

The cache and the KV tensors are the engine's, of a model of 8 KiB a block; no model computes. All
blocks are cached; half of them go. With `--order recent` those above the new end are the ones used
last, so all that survives moves; with `random` every second one does, between blocks that do not.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_settings import CacheSettings
from prefixcache.kv.elastic import ElasticPool
from prefixcache.kv.specs import KVGroup, KVLayout, PoolSizes
from prefixcache.runner.cpu import kv_memory
from prefixcache.runner.cpu.host_memory import host_page_bytes
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.runner.sizing import available_memory
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams

BLOCK = 16
LAYOUT = KVLayout((KVGroup((0, 1)),), num_kv_heads=2, head_dim=16)
BLOCK_BYTES = LAYOUT.bytes_per_block(BLOCK, 4)
PROMPT_BLOCKS = 50


class Timed:
    """KV tensors that note how long they copy."""

    def __init__(self, kv: KVMemory, clock: Callable[[], float]) -> None:
        self._kv, self._clock = kv, clock
        self.copying = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        begun = self._clock()
        self._kv.copy_blocks(sources, targets)
        self.copying += self._clock() - begun


def cached_pool(num_blocks: int, page_bytes: int) -> tuple[CacheManager, KVMemory]:
    cache = CacheManager(CacheSettings(num_blocks=num_blocks, block_size=BLOCK, model="m"))
    kv = KVMemory(
        layout=LAYOUT,
        num_blocks=num_blocks,
        block_size=BLOCK,
        itemsize=4,
        free_memory=available_memory,
    )
    with mock.patch.object(kv_memory, "host_page_bytes", return_value=page_bytes):
        kv.allocate()
    for rows in kv.rows():
        rows[:] = 1
    return cache, kv


def fill(cache: CacheManager, order: str) -> None:
    """Caches prompts until every block has content, then uses them again in the order wanted."""
    count = cache.size.num_usable_blocks // PROMPT_BLOCKS
    tokens = PROMPT_BLOCKS * BLOCK
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=np.arange(number * 7, number * 7 + tokens, dtype=np.int32),
            params=SamplingParams(max_tokens=1),
        )
        for number in range(count)
    ]
    for request in requests:
        cache.start(request)
        assert cache.commit(request.request_id, 0, tokens, tokens) is not None
        cache.mark_filled([request.request_id], [tokens])
        cache.free([request.request_id])
    if order == "random":
        random.Random(0).shuffle(requests)
        for request in requests:
            cache.start(request)
            cache.commit(request.request_id, tokens, 0, tokens)
            cache.free([request.request_id])


def copy_seconds(kv: KVMemory, num_blocks: int, clock: Callable[[], float]) -> float:
    """A plain copy of as many bytes from the upper half to the lower one: the best of three."""
    tensors, times = kv.rows(), list[float]()
    for _ in range(3):
        begun = clock()
        for tensor in tensors:
            tensor[1 : num_blocks + 1] = tensor[-num_blocks:]
        times.append(clock() - begun)
    return min(times)


def measure(
    num_blocks: int, page_bytes: int, order: str, clock: Callable[[], float]
) -> dict[str, float]:
    cache, kv = cached_pool(num_blocks, page_bytes)
    fill(cache, order)
    sizes = PoolSizes(
        start=num_blocks, ceiling=num_blocks, floor=2, block_bytes=BLOCK_BYTES, free_bytes=0
    )
    timed, slices = Timed(kv, clock), list[float]()
    pool = ElasticPool(cache, timed, sizes, clock=clock)
    pool.observe = slices.append
    begun = clock()
    pool.resize(num_blocks // 2)
    while pool.advance():
        pass
    total, status = clock() - begun, pool.status
    assert status.is_done
    cache.core.validate()
    begun = clock()
    pool.resize(num_blocks)
    growing = clock() - begun
    plain = copy_seconds(kv, max(status.blocks_moved, 1), clock)
    return {
        "moved_blocks": status.blocks_moved,
        "resize_ms": total * 1e3,
        "copying_ms": timed.copying * 1e3,
        "plain_copy_ms": plain * 1e3,
        "allowed_ms": 1.2 * timed.copying * 1e3 + 20,
        "slices": len(slices),
        "longest_slice_ms": max(slices) * 1e3,
        "growing_ms": growing * 1e3,
        "given_back_mib": status.bytes_given_back / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--pages", choices=["small", "huge"], default="huge")
    parser.add_argument("--order", choices=["recent", "random"], default="recent")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, on a busy machine")
    asked = parser.parse_args()
    clock = time.perf_counter
    if asked.cpu_time:
        clock = time.thread_time
    page_bytes = mmap.PAGESIZE
    if asked.pages == "huge":
        page_bytes = host_page_bytes(BLOCK_BYTES // 2, 2, asked.blocks)
    rows = [measure(asked.blocks, page_bytes, asked.order, clock) for _ in range(asked.repeats)]
    print(json.dumps({k: round(statistics.median(r[k] for r in rows), 2) for k in rows[0]}))


if __name__ == "__main__":
    main()
