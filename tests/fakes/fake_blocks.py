"""The KV memory of a `FakeRunner` that can be resized; what was given back is lost at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fakes.fake_runner import FakeRunner
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.elastic import ElasticPool
from prefixcache.kv.specs import PoolSizes

BLOCK_BYTES = 1 << 20


class FakeBlocks:
    is_resizable = comes_when_written = True
    granule_blocks = 1

    def __init__(self, runner: FakeRunner, num_blocks: int) -> None:
        self._runner = runner
        self.num_blocks = num_blocks
        self.usable = set(range(num_blocks))

    @property
    def num_reserved_bytes(self) -> int:
        return len(self._runner.arrays[0]) * BLOCK_BYTES

    def num_mapped_bytes(self) -> int:
        return len(self.usable) * BLOCK_BYTES

    def grow(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.usable |= set(range(num_blocks))

    def give_back(self, first: int, end: int, held: Sequence[int] = ()) -> int:
        gone = (set(range(first, end)) - set(held)) & self.usable
        self.usable -= gone
        for array in self._runner.arrays:
            array[sorted(gone)] = -1
        return len(gone) * BLOCK_BYTES

    def copy_blocks(self, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        assert {*sources.tolist(), *targets.tolist()} <= self.usable
        assert not {*sources.tolist()} & {*targets.tolist()}
        for array in self._runner.arrays:
            array[targets] = array[sources]


def make_pool(
    cache: CacheManager,
    runner: FakeRunner,
    *,
    floor: int = 2,
    clock: Callable[[], float] | None = None,
    **options: bool,
) -> ElasticPool:
    """A pool around the runner's memory, of which `cache` may use all up to its `max_blocks`."""
    sizes = PoolSizes(
        start=cache.num_blocks,
        ceiling=cache.max_blocks,
        floor=floor,
        block_bytes=BLOCK_BYTES,
        free_bytes=cache.max_blocks * BLOCK_BYTES,
    )
    blocks = FakeBlocks(runner, cache.num_blocks)
    return ElasticPool(cache, blocks, sizes, clock=clock or (lambda: 0.0), **options)


def slow_clock() -> Callable[[], float]:
    """A clock by which everything takes so long that slices are a block long."""
    ticks: Iterator[int] = iter(range(1 << 30))
    return lambda: float(next(ticks))
