"""The KV tensors.

Their memory is reserved, not touched: the system gives pages out as blocks are first written, so a
large pool costs nothing until it is used. What blocks above the pool's end had is given back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.attention.base import AttentionGroup, AttentionSpec
from prefixcache.attention.grouped import GroupedAttention
from prefixcache.exceptions import OutOfMemoryError
from prefixcache.kv.cache_manager import Blocks
from prefixcache.kv.specs import KVLayout
from prefixcache.runner.reserved_memory import ReservedMemory
from prefixcache.runner.sizing import available_memory

_MIB = 1 << 20
# Copied through a buffer of this size, blocks stay in the processor's cache.
_COPY_BYTES = _MIB // 2
# Runs of neighbours from this length on are faster copied run by run.
_LEAST_RUN = 4

Reserve = Callable[[int], ReservedMemory]


@dataclass(slots=True, kw_only=True)
class KVTensors:
    """The KV tensors that all groups share, bound to the attention that reads and writes them.

    `num_blocks` counts the null block, whose memory alone is kept while the rest is given up. With
    `reserve`, which makes the address space of a tensor by its bytes, blocks can be added up to
    `max_blocks` and taken away, and the tensors keep their addresses; otherwise `max_blocks` is not
    looked at.

    A granule is the smallest run of blocks that fills whole pages in every tensor: memory goes back
    in granules, and the first one, with the null block, never does.
    """

    layout: KVLayout
    attention: GroupedAttention
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    max_blocks: int = 0
    reserve: Reserve | None = None
    _memories: list[ReservedMemory] = field(default_factory=list[ReservedMemory], init=False)
    _tensors: list[Tensor] = field(default_factory=list[Tensor], init=False)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block over all tensors."""
        return self.layout.bytes_per_block(self.block_size, self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.bytes_per_block

    @property
    def num_reserved_bytes(self) -> int:
        """Bytes of address space, of which the system gives what is used."""
        most = self.num_blocks if self.reserve is None else max(self.max_blocks, self.num_blocks)
        return most * self.bytes_per_block

    @property
    def comes_when_written(self) -> bool:
        """Whether memory that was given back is there again once a block is written."""
        return self.reserve is not None and self.device.type == "cpu"

    @property
    def is_resizable(self) -> bool:
        """Whether blocks can be added and taken away."""
        return self.reserve is not None

    def num_mapped_bytes(self) -> int:
        """Bytes that the system has given. From any thread; asks the system on a CPU."""
        if self.reserve is None:
            return sum(tensor.nbytes for tensor in self._tensors)
        return sum(memory.num_mapped_bytes() for memory in self._memories)

    def allocate(self) -> None:
        """Makes all blocks usable and binds their zeroed tensors. Raises `OutOfMemoryError`."""
        if not self._memories:
            self._bind(self.make(self.num_blocks))
            return
        self._check_free(self.num_blocks, self.num_blocks)
        self._provide(self.num_blocks)
        self._zero_first_granule()

    def give_up(self) -> None:
        """Gives the memory back to the system; its content is lost."""
        if self._memories:
            self.give_back(1, self.num_blocks)
        else:
            self._bind(self.make(1))
            give_back(self.device)

    def make(self, num_blocks: int) -> list[Tensor]:
        """One zeroed tensor a layer of the largest group, of the attention's shape.

        Where memory is reserved they have room for `max_blocks`, and the first `num_blocks` are
        usable. Raises `OutOfMemoryError` with the numbers when those exceed the free memory.
        """
        self._check_free(num_blocks, num_blocks)
        try:
            return self._reserved(num_blocks) if self.reserve else self._allocated(num_blocks)
        except (OSError, RuntimeError, MemoryError) as error:
            needed = num_blocks * self.bytes_per_block
            raise OutOfMemoryError(
                f"Cannot allocate {needed / _MIB:,.0f} MiB of KV: {error}"
            ) from error

    def grow(self, num_blocks: int) -> None:
        """Makes blocks usable up to `num_blocks` of them. Raises `OutOfMemoryError`."""
        self._check_free(num_blocks, num_blocks - self.num_blocks)
        self._provide(num_blocks)
        self.num_blocks = num_blocks

    def give_back(self, first: int, end: int, held: Sequence[int] = ()) -> int:
        """Gives back the memory of blocks from `first` to before `end`, in whole granules.

        Nobody uses blocks from `end` on, nor any of the others but those that are `held`: their
        granules stay. Returns the bytes that the system had given for them.
        """
        granule = self.granule_blocks
        free = range(-(-first // granule), -(-end // granule))
        kept = sorted({block // granule for block in held} & set(free))
        return sum(
            memory.give_back(begin * granule * size, end * granule * size)
            for begin, end in _between(free, kept)
            for memory, size in self._sizes()
        )

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        """Copies the content of blocks; no target is a source. From one thread, between steps."""
        _, size = next(self._sizes())
        for tensor in self._tensors:
            rows = tensor.view(len(tensor), -1).view(_widest(size))
            if self.device.type == "cpu":
                _copy_rows(rows.numpy(), sources, targets)
            else:
                there, here = (
                    torch.from_numpy(ids.astype(np.int64)).to(self.device)
                    for ids in (targets, sources)
                )
                rows.index_copy_(0, there, rows.index_select(0, here))

    @property
    def granule_blocks(self) -> int:
        """Blocks of a granule."""
        return math.lcm(
            *(m.page_bytes // math.gcd(m.page_bytes, size) for m, size in self._sizes())
        )

    def _sizes(self) -> Iterator[tuple[ReservedMemory, int]]:
        """Each tensor's memory, and the bytes that a block takes of it."""
        size = self.bytes_per_block // self.layout.num_tensors
        return ((memory, size) for memory in self._memories)

    def _shape(self, num_blocks: int) -> Sequence[int]:
        layout = self.layout
        return self.attention.kv_shape(
            num_blocks, self.block_size, layout.num_kv_heads, layout.head_dim
        )

    def _allocated(self, num_blocks: int) -> list[Tensor]:
        shape = self._shape(num_blocks)
        return [
            torch.zeros(*shape, dtype=self.dtype, device=self.device)
            for _ in range(self.layout.num_tensors)
        ]

    def _reserved(self, num_blocks: int) -> list[Tensor]:
        assert self.reserve is not None
        shape = self._shape(max(self.max_blocks, num_blocks))
        size = math.prod(shape) * self.dtype.itemsize
        self._memories = [self.reserve(size) for _ in range(self.layout.num_tensors)]
        self._provide(num_blocks)
        return [memory.tensor(shape, self.dtype) for memory in self._memories]

    def _bind(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self.attention.bind(tensors)

    def _provide(self, num_blocks: int) -> None:
        for memory, size in self._sizes():
            memory.provide(num_blocks * size)

    def _zero_first_granule(self) -> None:
        for tensor in self._tensors:
            tensor[: min(self.granule_blocks, self.num_blocks)].zero_()

    def _check_free(self, num_blocks: int, num_new: int) -> None:
        """Raises `OutOfMemoryError` with the numbers when new blocks exceed the free memory."""
        needed, free = num_new * self.bytes_per_block, available_memory(self.device)
        if needed > free:
            raise OutOfMemoryError(
                f"The KV cache of {num_blocks} blocks of {self.block_size} tokens needs "
                f"{needed / _MIB:,.0f} MiB, but only {free / _MIB:,.0f} MiB are free. "
                "Lower num_blocks or kv_cache_memory."
            )


def attention_groups(layout: KVLayout, spec: AttentionSpec) -> tuple[AttentionGroup, ...]:
    """What attention is made with: a group for each of the layout, the rest as in `spec`."""
    return tuple(
        AttentionGroup(replace(spec, sliding_window=group.sliding_window), group.layers)
        for group in layout.groups
    )


def give_back(device: torch.device) -> None:
    """Hands memory that torch holds unused on a GPU to the driver; a CPU's went at once."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _between(whole: range, kept: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The parts of `whole` before, between and after those of it that are kept, ascending."""
    begin = whole.start
    for one in (*kept, whole.stop):
        if begin < one:
            yield begin, one
        begin = one + 1


def _copy_rows(rows: npt.NDArray[Any], sources: Blocks, targets: Blocks) -> None:
    """Copies rows to rows: neighbours in one go where there are many, the others through a buffer.

    That is in a half to two thirds of the time that torch takes, which gathers and then scatters.
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


def _widest(num_bytes: int) -> torch.dtype:
    """The type of the largest numbers that `num_bytes` are made of."""
    return torch.int64 if num_bytes % 8 == 0 else torch.int16 if num_bytes % 2 == 0 else torch.uint8
