"""The KV memory of a `FakeRunner` that can be resized; what was given back is lost at once."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fakes.fake_runner import FakeRunner
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.elastic import ElasticPool
from prefixcache.kv.kv_folder import FileLayout, open_kept_file
from prefixcache.kv.specs import KVGroup, KVLayout, PoolSizes
from prefixcache.runner.cpu.kv_memory import KVMemory

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

    def set_size(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

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


class KeptBlocks(FakeBlocks):
    """Blocks in a file; each fills a page, so that as many parts can be made as a test wants."""

    comes_when_written = False

    def __init__(self, runner: FakeRunner, num_blocks: int, folder: Path) -> None:
        super().__init__(runner, num_blocks)
        max_blocks, block_size = runner.arrays[0].shape
        in_file = FileLayout(
            facts={}, num_tensors=1, block_bytes=mmap.PAGESIZE, max_blocks=max_blocks
        )
        file = open_kept_file(folder, in_file, num_blocks, None)
        assert file is not None
        head_dim = mmap.PAGESIZE // (2 * block_size)
        self.file = file
        self.memory = KVMemory(
            layout=KVLayout((KVGroup((0,)),), num_kv_heads=1, head_dim=head_dim),
            num_blocks=num_blocks,
            block_size=block_size,
            itemsize=1,
            free_memory=lambda: 1 << 40,
            max_blocks=max_blocks,
            file=file,
        )
        self.memory.allocate()
        runner.use(self.memory.rows()[0].view(np.int64)[:, :block_size])
        runner.before_writes = self.before_writes

    def before_writes(self, blocks: npt.NDArray[np.int64]) -> None:
        self.memory.num_blocks = self.num_blocks
        self.memory.before_writes(blocks)

    def grow(self, num_blocks: int) -> None:
        self.memory.grow(num_blocks)
        super().grow(num_blocks)

    def give_back(self, first: int, end: int, held: Sequence[int] = ()) -> int:
        given = super().give_back(first, end, held)
        self.memory.give_back(first, end, held)
        return given


def make_pool(
    cache: CacheManager,
    runner: FakeRunner,
    *,
    floor: int = 2,
    clock: Callable[[], float] | None = None,
    make_blocks: Callable[[FakeRunner, int], FakeBlocks] = FakeBlocks,
    **options: bool,
) -> ElasticPool:
    """A pool around the runner's memory, of which `cache` may use all up to its `max_blocks`."""
    sizes = PoolSizes(
        start=cache.size.num_blocks,
        ceiling=cache.size.max_blocks,
        floor=floor,
        block_bytes=BLOCK_BYTES,
        free_bytes=cache.size.max_blocks * BLOCK_BYTES,
    )
    blocks = make_blocks(runner, cache.size.num_blocks)
    return ElasticPool(cache, blocks, sizes, clock=clock or (lambda: 0.0), **options)


def slow_clock() -> Callable[[], float]:
    """A clock by which everything takes so long that slices are a block long."""
    ticks: Iterator[int] = iter(range(1 << 30))
    return lambda: float(next(ticks))
