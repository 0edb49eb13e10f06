"""Where cached blocks are bounded, memory goes back too: that of blocks that hold nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from prefixcache.kv.cache_manager import CacheManager

_SLICE_SECONDS = 0.005
_FIRST_SLICE_BLOCKS = 256
_MOST_CELLS = 1 << 16
# Filling so much takes many times as long as a look at the whole pool.
WORTH_BYTES = 16 << 20


class Pages(Protocol):
    """The part of `elastic.BlockMemory` that is needed."""

    @property
    def granule_blocks(self) -> int:
        """Neighbouring blocks whose memory goes back together."""
        ...

    def give_back(self, first: int, end: int, held: Sequence[int] = ()) -> int:
        """Gives back the memory of these blocks but for those held; the bytes."""
        ...


class UnusedMemory:
    """Gives the memory of free blocks without content back, once enough blocks were released.

    The system gives pages again when such a block is written, so the cache need not know. It is
    done in slices of a few milliseconds, between steps.
    """

    def __init__(
        self,
        cache: CacheManager,
        memory: Pages,
        block_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cache = cache
        self._memory = memory
        self._worth_blocks = -(-WORTH_BYTES // block_bytes)
        self._clock = clock
        self._seen_released = 0
        self._slice_blocks = _FIRST_SLICE_BLOCKS
        self._next: int | None = None

    @property
    def has_slices(self) -> bool:
        """Whether `advance` has something to do."""
        return self._next is not None

    def note_release(self) -> None:
        """After requests may have taken blocks or released them."""
        if self._cache.num_released_blocks - self._seen_released >= self._worth_blocks:
            self._seen_released, self._next = self._cache.num_released_blocks, 1

    def stop(self) -> None:
        """The pool gets another size, or gives all memory up."""
        self._next = None

    def advance(self) -> None:
        """One slice, while no step is in flight."""
        if self._next is None:
            return
        begun, begin = self._clock(), self._next
        end = min(self._cache.size.num_blocks, begin + self._slice_blocks)
        self._memory.give_back(begin, end, self._used(begin, end + self._memory.granule_blocks))
        self._next = end if end < self._cache.size.num_blocks else None
        is_short = self._clock() - begun < _SLICE_SECONDS
        self._slice_blocks = max(1, self._slice_blocks * 2 if is_short else self._slice_blocks // 2)

    def _used(self, begin: int, end: int) -> list[int]:
        """The blocks with content or in use, and in a huge pool some next to them."""
        num_usable = self._cache.size.num_usable_blocks
        counts, _ = self._cache.core.block_map(min(num_usable, _MOST_CELLS), ())
        is_used = counts[:, 1:].sum(axis=1) > 0
        blocks = np.arange(begin, min(end, num_usable + 1))
        return blocks[is_used[(blocks - 1) * len(counts) // num_usable]].tolist()
