"""The KV tensors of a CPU.

Their memory is reserved, not touched: the system gives pages out as blocks are first written, so a
large pool costs nothing until it is used. What blocks above the pool's end had is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.kv.cache_size import Blocks
from prefixcache.kv.kv_folder import KeptFile
from prefixcache.runner.cpu.file_memory import FileMemory
from prefixcache.runner.cpu.host_memory import HostMemory, host_page_bytes
from prefixcache.runner.pool_memory import PoolMemory
from prefixcache.runner.reserved_memory import ReservedBlocks

# Copied through a buffer of this size, blocks stay in the processor's cache.
_COPY_BYTES = 1 << 19
# Holes of a file are filled in parts of this size.
_FILL_BYTES = 1 << 20
# Runs of neighbours from this length on are faster copied run by run.
_LEAST_RUN = 4


@dataclass(slots=True, kw_only=True)
class KVMemory(PoolMemory):
    """The tensors [P, 2, K, B, D] of the layout, reserved for `max_blocks`.

    With a `file` they lie there, and begin with what another process left.
    """

    file: KeptFile | None = None
    _memories: list[HostMemory] | list[FileMemory] = field(
        default_factory=list[HostMemory], init=False
    )
    # Of each part of a file's blocks, whether it may have a hole.
    _may_have_hole: npt.NDArray[np.bool_] = field(
        default_factory=lambda: np.zeros(0, np.bool_), init=False
    )

    @property
    def comes_when_written(self) -> bool:
        """Whether memory that was given back is there again once a block is written."""
        return self.file is None

    @property
    def is_resizable(self) -> bool:
        """Whether blocks can be added and taken away."""
        return self.file is None or self.file.can_give_back

    @property
    def may_have_holes(self) -> bool:
        """Whether some of the blocks may lie in a hole of a file."""
        return self.file is not None and bool(self._may_have_hole.any())

    @property
    def addresses(self) -> list[int]:
        """Where each tensor begins; they stay the same."""
        return [memory.address for memory in self._memories]

    @property
    def num_reserved_bytes(self) -> int:
        """Bytes of address space, of which the system gives what is used."""
        return self.most_blocks * self.bytes_per_block

    @property
    def most_blocks(self) -> int:
        """Blocks that there may ever be, the null block included."""
        return max(self.max_blocks, self.num_blocks)

    def num_mapped_bytes(self) -> int:
        """Bytes that the system has given. From any thread; asks the system."""
        return 0 if self.reserved is None else self.reserved.num_mapped_bytes()

    def allocate(self) -> None:
        """Makes all blocks usable, the null block zeroed. Raises `OutOfMemoryError`."""
        self._check_free(self.num_blocks, self.num_blocks)
        is_new = self.reserved is None
        if is_new:
            self._reserve()
        if self.file is None or not is_new:  # A new file was given its space when it was opened.
            self._in_granules().provide(self.num_blocks)
        self.before_writes(np.zeros(1, np.int64))
        num_zeroed = 1 if self.file is not None else min(self.granule_blocks, self.num_blocks)
        for rows in self.rows():
            rows[:num_zeroed] = 0

    def before_writes(self, blocks: npt.NDArray[np.int64]) -> None:
        """To be called before a step writes to these blocks: holes of a file are filled.

        Of blocks above the pool's end, which requests may hold after a shrink, only the pages that
        are written come back.
        """
        if not self.may_have_holes:
            return
        parts = np.unique(blocks[blocks < self.num_blocks] // self._part_blocks)
        for part in parts[self._may_have_hole[parts]].tolist():
            self._may_have_hole[part] = False
            first = part * self._part_blocks
            end = min(first + self._part_blocks, self.num_blocks)
            for memory in self._memories:
                assert isinstance(memory, FileMemory)
                memory.fill_hole(
                    first * self.bytes_per_tensor_block, end * self.bytes_per_tensor_block
                )

    def before_load(self, blocks: Sequence[int]) -> None:
        """To be called before another thread writes to these blocks, which stay in use meanwhile.

        Holes next to them are not filled from now on: the zeros could fall on what it has written.
        """
        if self.may_have_holes:
            self._may_have_hole[np.array(blocks, np.int64) // self._part_blocks] = False

    def give_back(self, first: int, end: int, held: Sequence[int] = ()) -> int:
        """See `ReservedBlocks`."""
        if self.file is not None:
            part = self._part_blocks
            self._may_have_hole[-(-first // part) : -(-end // part)] = True
            self.before_load(held)
        return PoolMemory.give_back(self, first, end, held)

    @property
    def _part_blocks(self) -> int:
        """Blocks of a part: whole pages of about `_FILL_BYTES` in each tensor."""
        granule = self.granule_blocks
        return granule * max(1, _FILL_BYTES // (granule * self.bytes_per_tensor_block))

    def give_up(self) -> None:
        """Gives the memory back to the system but for the null block's; its content is lost."""
        self.give_back(1, self.most_blocks)

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        """Copies the content of blocks; no target is a source. From one thread, between steps."""
        widest = _widest(self.bytes_per_tensor_block)
        for rows in self.rows():
            _copy_rows(rows.view(widest), sources, targets)

    def _reserve(self) -> None:
        size, count = self.bytes_per_tensor_block, self.layout.num_tensors
        num_bytes = self.most_blocks * size
        page_bytes = host_page_bytes(size, count, self.most_blocks)
        try:
            if self.file is None:
                memories = [HostMemory(num_bytes, page_bytes) for _ in range(count)]
            else:
                memories = [FileMemory(self.file, tensor, num_bytes) for tensor in range(count)]
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            raise self._cannot_allocate(self.most_blocks, error) from error
        self._memories = memories
        self.reserved = ReservedBlocks(memories, size)
        if self.file is not None:
            self._may_have_hole = np.ones(-(-self.most_blocks // self._part_blocks), np.bool_)

    def rows(self) -> list[npt.NDArray[np.uint8]]:
        """Of each tensor, a row of bytes for each block."""
        return [memory.rows(self.most_blocks) for memory in self._memories]


def _copy_rows(rows: npt.NDArray[Any], sources: Blocks, targets: Blocks) -> None:
    """Copies rows to rows: neighbours in one go where there are many, the others through a buffer.

    That is in a half to two thirds of the time of a gather and a scatter.
    """
    runs = _runs(sources, targets)
    if len(sources) >= _LEAST_RUN * len(runs):
        for here, there in runs:
            rows[there] = rows[here]
        return
    count = max(1, _COPY_BYTES // rows[0].nbytes)
    for begin in range(0, len(sources), count):
        part = slice(begin, begin + count)
        rows[targets[part]] = rows[sources[part]]


def _runs(sources: Blocks, targets: Blocks) -> list[tuple[slice, slice]]:
    """Neighbours that are copied to neighbours, each up or down, as slices."""
    pairs = np.stack([sources, targets]).astype(np.int64)
    steps = np.diff(pairs)
    adjacent = (np.abs(steps) == 1).all(axis=0)
    turns = (np.diff(steps) != 0).any(axis=0) & adjacent[:-1]
    ends = ~adjacent
    ends[1:] |= turns
    begins = np.concatenate([[0], np.flatnonzero(ends) + 1])
    lasts = np.concatenate([begins[1:], [len(sources)]]) - 1
    return [
        (_between_ids(*pairs[0, [a, b]].tolist()), _between_ids(*pairs[1, [a, b]].tolist()))
        for a, b in zip(begins.tolist(), lasts.tolist(), strict=True)
    ]


def _between_ids(first: int, last: int) -> slice:
    """From one block to another, both included, in either direction; none of them is block 0."""
    return slice(first, last + 1) if last >= first else slice(first, last - 1, -1)


def _widest(num_bytes: int) -> npt.DTypeLike:
    """The type of the largest numbers that `num_bytes` are made of."""
    if num_bytes % 8 == 0:
        return np.int64
    return np.int16 if num_bytes % 2 == 0 else np.uint8
