"""The pool's size while it serves: growing at once, shrinking in slices between steps.

A shrink first moves the cached blocks that are worth keeping below the new end, then cuts the pool
off there, and then gives the memory above back. Each slice of it is short, and between two of them
the cache is whole. Blocks above the end that requests hold stay as they are; their memory goes back
when the requests end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from prefixcache.config.checked import shown
from prefixcache.exceptions import InvalidRequestError, OutOfMemoryError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_size import Blocks
from prefixcache.kv.specs import PoolSizes
from prefixcache.kv.unused_memory import Pages, UnusedMemory
from prefixcache.metrics import PoolGauges, ResizeCounts, resize_slices

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_SLICE_SECONDS = 0.015
_FIRST_SLICE_BYTES = 16 * _MIB
_LEAST_SLICE_BLOCKS = 1
# Growing costs the time of its new blocks; a step waits for no more of them.
_MOST_GROWN_BLOCKS = 1 << 17
_MOST_GROWN_BYTES = 16 << 30


class BlockMemory(Pages, Protocol):
    """The KV tensors, as far as a resize goes; see `KVTensors`."""

    num_blocks: int

    @property
    def comes_when_written(self) -> bool:
        """Whether memory that was given back is there again once a block is written."""
        ...

    @property
    def is_resizable(self) -> bool:
        """Whether blocks can be added and taken away."""
        ...

    @property
    def num_reserved_bytes(self) -> int:
        """Bytes of address space."""
        ...

    def num_mapped_bytes(self) -> int:
        """Bytes that the system has given. From any thread."""
        ...

    def grow(self, num_blocks: int) -> None:
        """Makes blocks usable up to `num_blocks` of them. Raises `OutOfMemoryError`."""
        ...

    def set_size(self, num_blocks: int) -> None:
        """That many blocks are usable; memory is neither made nor given back for it."""
        ...

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        """Copies the content of blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeStatus:
    """How far the last resize is. Sizes are in blocks, the null block included.

    It is done when the pool has its target and no request holds a block above. `blocks_lost` were
    cached and are not any more; `bytes_given_back` is what the system had given and got back;
    `seconds` is the time that steps could not run.
    """

    is_done: bool
    num_blocks: int
    target_blocks: int
    min_blocks: int
    max_blocks: int
    block_bytes: int
    blocks_moved: int
    blocks_lost: int
    blocks_held_above: int
    bytes_given_back: int
    seconds: float


class _Pace:
    """How many blocks a slice takes, so that it lasts as long as a step may wait."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = max(num_blocks, _LEAST_SLICE_BLOCKS)

    def adapt(self, seconds: float, *, is_full: bool) -> None:
        """After a slice that took so long; one that had less to do tells nothing of larger ones."""
        most = 2.0 if is_full else 1.0
        factor = min(most, max(0.25, _SLICE_SECONDS / max(seconds, 1e-6)))
        self.num_blocks = max(int(self.num_blocks * factor), _LEAST_SLICE_BLOCKS)


class _Tally:
    """What resizes did: in all, and since the last one began."""

    def __init__(self) -> None:
        self.total = self._before = ResizeCounts()

    def begin(self) -> None:
        """A resize begins."""
        self._before = self.total
        self.add(resizes=1)

    def add(self, **added: float) -> None:
        sums = {name: getattr(self.total, name) + more for name, more in added.items()}
        self.total = replace(self.total, **sums)

    def of_last(self, name: str) -> float:
        """What the last resize added to a count."""
        return getattr(self.total, name) - getattr(self._before, name)


class _MemoryAbove:
    """The memory of blocks above a pool's end, which goes back slice by slice.

    No block from `mapped_end` on has memory. Those up to `trimmed_to` have been given back, unless
    requests hold them.
    """

    def __init__(self, memory: BlockMemory, block_bytes: int, num_blocks: int) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        self.pace = _Pace(2 * _FIRST_SLICE_BYTES // block_bytes)
        self._begins_again = False
        self.mapped_end = self._trimmed_to = num_blocks

    def begin(self, size: int) -> None:
        """From the pool's end on, as requests may have ended above what was trimmed."""
        self._trimmed_to, self._begins_again = size, False
        self.mapped_end = max(self.mapped_end, size)

    def begin_again(self) -> None:
        """Requests gave back blocks above the end meanwhile."""
        self._begins_again = True

    def forget(self, size: int) -> None:
        """All memory was given up, and that of `size` blocks made again."""
        self._begins_again = False
        self.mapped_end = self._trimmed_to = size

    def trim(self, size: int, held_from: Callable[[int], Sequence[int]] | None) -> int:
        """Gives back the memory of some blocks; how many bytes the system had given."""
        if self._begins_again and self._trimmed_to >= self.mapped_end:
            self._trimmed_to, self._begins_again = size, False
        begin = self._trimmed_to
        self._trimmed_to = min(self.mapped_end, begin + self.pace.num_blocks)
        held = held_from(begin) if held_from else ()
        return self._memory.give_back(begin, self._trimmed_to, held)

    @property
    def is_done(self) -> bool:
        """Whether all was given back that may be."""
        return self._trimmed_to >= self.mapped_end and not self._begins_again

    def is_full(self, num_bytes: int) -> bool:
        """Whether these are most of the bytes that a slice takes."""
        return 2 * num_bytes >= self.pace.num_blocks * self._block_bytes


class ElasticPool:
    """Resizes one pool: its blocks in the cache and their memory, which must agree.

    `wanted` is the size that was asked for; `limit` is what `allow` permits of it. With
    `grows_by_itself` the pool returns up to there when requests come; else it keeps the size it
    has. With `bounds_memory` that of blocks that hold nothing goes back, where it can come again by
    itself. One thread makes all calls but those that only read.
    """

    def __init__(
        self,
        cache: CacheManager,
        memory: BlockMemory,
        sizes: PoolSizes,
        *,
        grows_by_itself: bool = False,
        bounds_memory: bool = False,
        after_resize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.sizes = sizes
        self.memory = memory
        self.wanted = self._size = self._target = sizes.start
        self.limit = sizes.ceiling
        self.slice_seconds = resize_slices()
        self.has_slices = False
        self._cache = cache
        self._grows_by_itself = grows_by_itself
        self._after_resize = after_resize
        self._clock = clock
        self._is_asleep = False
        self._is_moving = False  # the cache hands out no block above the target any more
        self._held_above = 0
        self._moves = _Pace(_FIRST_SLICE_BYTES // sizes.block_bytes)
        self._above = _MemoryAbove(memory, sizes.block_bytes, sizes.start)
        self._tally = _Tally()
        self._unused: UnusedMemory | None = None
        if bounds_memory and memory.comes_when_written:
            self._unused = UnusedMemory(cache, memory, sizes.block_bytes)
        cache.size.set_growth(self.make_room)

    # To be read, from any thread.

    @property
    def counts(self) -> ResizeCounts:
        """What all resizes did so far."""
        return self._tally.total

    @property
    def status(self) -> ResizeStatus:
        """How far the last resize is."""
        of_last = self._tally.of_last
        return ResizeStatus(
            is_done=not (self.has_slices or self._held_above),
            num_blocks=self._size,
            target_blocks=self._target,
            min_blocks=self.sizes.floor,
            max_blocks=self.sizes.ceiling,
            block_bytes=self.sizes.block_bytes,
            blocks_moved=int(of_last("blocks_moved")),
            blocks_lost=int(of_last("blocks_lost")),
            blocks_held_above=self._held_above,
            bytes_given_back=int(of_last("bytes_given_back")),
            seconds=round(of_last("seconds"), 6),
        )

    def gauges(self, blocks_in_use: int) -> PoolGauges:
        """The pool's memory and what resizes did so far; blocks in use may lie above its end."""
        return PoolGauges(
            num_blocks=self._size,
            reserved_bytes=self.memory.num_reserved_bytes,
            mapped_bytes=self.memory.num_mapped_bytes(),
            held_bytes=blocks_in_use * self.sizes.block_bytes,
            **asdict(self.counts),
        )

    def check(self, num_blocks: int, param: str) -> None:
        """Raises `InvalidRequestError` with the range for a size that the pool cannot have."""
        if not self.memory.is_resizable:
            raise InvalidRequestError(
                "This engine's KV cache has a fixed size: on CUDA start with --kv-cache-max-memory "
                "to make it elastic; with --kv-cache-dir choose a file system that can give parts "
                "of a file back.",
                param=param,
            )
        if not self.sizes.floor <= num_blocks <= self.sizes.ceiling:
            raise InvalidRequestError(
                f"{param} asks for {shown(num_blocks)} blocks of {self.sizes.block_bytes} bytes; "
                f"allowed are {self.sizes.describe()}: from --kv-cache-min-memory to "
                "--kv-cache-max-memory.",
                param=param,
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool now: those that it had before, until a shrink cuts them off."""
        return self._size

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do."""
        if self._is_asleep or self.has_slices:
            return self.has_slices
        return self._unused is not None and self._unused.has_slices and not self._held_above

    @property
    def is_at_floor(self) -> bool:
        """Whether the pool is, or is becoming, as small as it may be."""
        return self._target <= self.sizes.floor

    @property
    def can_grow(self) -> bool:
        """Whether the pool is smaller than it may become by itself."""
        return self._grows_by_itself and self._target < min(self.wanted, self.limit)

    # To be done between two steps.

    def resize(self, num_blocks: int) -> None:
        """Begins a resize to a size that `check` allows. Raises `OutOfMemoryError`.

        Growing is done at once. Slices of a shrink follow, by `advance`, while `has_slices`.
        """
        self._begin(num_blocks)
        self.wanted = num_blocks
        self._cache.size.set_attainable(num_blocks)

    def allow(self, num_blocks: int) -> None:
        """Bounds the size for now, whatever is wanted: down to the floor, and shrinks to there."""
        self.limit = max(num_blocks, self.sizes.floor)
        if self._target > self.limit:
            self._begin(self.limit)

    def rest(self, num_blocks: int) -> None:
        """Shrinks down to the floor at most; the next requests take it all back."""
        target = max(num_blocks, self.sizes.floor)
        if target < self._target:
            self._begin(target)

    def advance(self) -> bool:
        """Does one slice; whether another one can follow at once.

        When copying fails the shrink is given up, with nothing lost by that slice, and it raises.
        """
        if self._is_asleep:
            return False
        if not self.has_slices:
            if self._unused is not None:
                self._unused.advance()
            return False
        begun, lost_before = self._clock(), self._cache.core.stats()["lost_to_resize_blocks"]
        trims = self._size <= self._target
        try:
            is_full = self._trim() if trims else self._move()
        except Exception:
            self._give_up()
            raise
        seconds = self._clock() - begun
        lost = self._cache.core.stats()["lost_to_resize_blocks"] - lost_before
        self._tally.add(blocks_lost=lost, seconds=seconds)
        self.slice_seconds.observe(seconds)
        (self._above.pace if trims else self._moves).adapt(seconds, is_full=is_full)
        if not self.has_slices:
            self._log()
        return self.has_slices

    def note_release(self) -> None:
        """Looks at blocks above the end, and at unused ones, once requests gave blocks back."""
        if self._unused is not None:
            self._unused.note_release()
        if self._held_above:
            held, self._held_above = self._held_above, self._cache.core.stats()["held_above_blocks"]
            if self._held_above < held:
                self._above.begin_again()
                self.has_slices = True

    def grow(self) -> None:
        """Takes a part of what may be taken back by itself, or all of it where it is little."""
        most = max(1, min(_MOST_GROWN_BLOCKS, _MOST_GROWN_BYTES // self.sizes.block_bytes))
        self._try_to_grow(min(self.wanted, self.limit, self._size + most))

    def make_room(self, num_blocks: int) -> bool:
        """Grows for a request that nothing but this can let start; whether there is room then.

        It may take what `limit` keeps free for others, as long as the memory is there.
        """
        size = num_blocks + 1  # with the null block
        if not (self._grows_by_itself and self._cache.size.num_blocks < size <= self.wanted):
            return False
        self._try_to_grow(size)
        return self._cache.size.num_blocks >= size

    def fall_asleep(self) -> None:
        """The memory is given up; nothing is held or cached."""
        self._is_asleep = True
        self._held_above = 0
        self._stop_unused()

    def wake(self) -> None:
        """Before the memory is made again: what was begun takes effect."""
        if not self._is_asleep:
            return
        self._is_asleep = False
        self._cache.size.resize(self._target)
        self._size = self._target
        self.memory.set_size(self._size)
        self._above.forget(self._target)
        if self.has_slices:
            self._is_moving = self.has_slices = False
            self._log()

    def _begin(self, target: int) -> None:
        """Ends whatever is in flight, and grows or lets slices follow."""
        self._stop_unused()
        if self._is_asleep:
            self._tally.begin()
            self._target, self.has_slices = target, True
            return
        if target > self._size:
            self.memory.grow(target)  # It alone may raise.
        self._tally.begin()
        begun = self._clock()
        if self._is_moving or target > self._size:
            self._size = max(target, self._size)
            self._held_above = self._cache.size.resize(self._size)
            self._is_moving = False
        self._target = target
        self._above.begin(self._size)
        self.has_slices = target < self._size or not self._above.is_done
        self._tally.add(seconds=self._clock() - begun)
        if not self.has_slices:
            self._log()

    def _stop_unused(self) -> None:
        if self._unused is not None:
            self._unused.stop()

    def _try_to_grow(self, target: int) -> None:
        """Where memory is short the pool keeps its size."""
        try:
            self._begin(target)
        except OutOfMemoryError as error:
            logger.warning("The KV cache keeps its %d blocks: %s", self._size, error)

    def _move(self) -> bool:
        """Moves some blocks, and takes those above out of the pool when there is none to move.

        Tells whether these were as many as a slice takes.
        """
        self._is_moving = True
        moved = self._cache.size.move_cached(
            self._target, self._moves.num_blocks, self.memory.copy_blocks
        )
        self._tally.add(blocks_moved=moved)
        if moved:
            logger.debug("%d cached blocks were moved below block %d.", moved, self._target)
            return moved >= self._moves.num_blocks
        self._held_above = self._cache.size.resize(self._target)
        self._tally.add(blocks_released=self._size - self._target)
        self._size = self._target
        self.memory.set_size(self._size)
        self._above.begin(self._size)
        self._is_moving = False
        return False

    def _give_up(self) -> None:
        """Keeps the size that there is; memory above it goes back with the next resize."""
        self._held_above = self._cache.size.resize(self._size)
        self._target, self._is_moving, self.has_slices = self._size, False, False

    def _trim(self) -> bool:
        """Gives back the memory of some blocks above the end, and ends the resize with the last.

        Tells whether the system had given most of what a slice takes.
        """
        held_from = self._cache.held_blocks if self._held_above else None
        given = self._above.trim(self._size, held_from)
        self._tally.add(bytes_given_back=given)
        if self._above.is_done:
            self.has_slices = False
            if not self._held_above:
                self._above.forget(self._size)
        return self._above.is_full(given)

    def _log(self) -> None:
        done = self.status
        logger.info(
            "The KV cache has %d blocks (%.1f MiB). %d blocks were moved, %d lost; %.1f MiB went "
            "back in %.1f ms. Requests hold %d blocks above.",
            done.num_blocks,
            done.num_blocks * done.block_bytes / _MIB,
            done.blocks_moved,
            done.blocks_lost,
            done.bytes_given_back / _MIB,
            done.seconds * 1000,
            done.blocks_held_above,
        )
        self._after_resize()
