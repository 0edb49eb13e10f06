"""Address space that is reserved once for blocks, whose pages come and go.

A tensor keeps its address whatever becomes of its pages, so nothing has to be bound again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol


class ReservedMemory(Protocol):
    """Address space of one tensor. Offsets and sizes are bytes; pages are `page_bytes` long.

    Pages that were provided read as zeros until they are written. Those given back must neither be
    read nor written until they are provided again.
    """

    page_bytes: int

    def provide(self, end: int) -> None:
        """Makes all bytes before `end` usable. Raises `OutOfMemoryError`."""
        ...

    def give_back(self, begin: int, end: int) -> int:
        """Hands whole pages back to the system, content and all; the bytes that it had given."""
        ...

    def num_mapped_bytes(self) -> int:
        """Bytes that the system has given pages for."""
        ...


class ReservedBlocks:
    """Blocks that have `block_bytes` of each tensor, every tensor in a memory of its own.

    A granule is the smallest run of blocks that fills whole pages in every tensor: memory goes back
    in granules, and the first one, with the null block, never does.
    """

    def __init__(self, memories: Sequence[ReservedMemory], block_bytes: int) -> None:
        self._memories = memories
        self._block_bytes = block_bytes
        self.granule_blocks = math.lcm(
            *(m.page_bytes // math.gcd(m.page_bytes, block_bytes) for m in memories)
        )

    def provide(self, num_blocks: int) -> None:
        """Makes blocks up to `num_blocks` of them usable. Raises `OutOfMemoryError`."""
        for memory in self._memories:
            memory.provide(num_blocks * self._block_bytes)

    def give_back(self, first: int, end: int, held: Sequence[int] = ()) -> int:
        """Gives back the memory of blocks from `first` to before `end`, in whole granules.

        Nobody uses blocks from `end` on, nor any of the others but those that are `held`: their
        granules stay. Returns the bytes that the system had given for them.
        """
        granule, size = self.granule_blocks, self._block_bytes
        free = range(-(-first // granule), -(-end // granule))
        kept = sorted({block // granule for block in held} & set(free))
        return sum(
            memory.give_back(begin * granule * size, stop * granule * size)
            for begin, stop in _between(free, kept)
            for memory in self._memories
        )

    def num_mapped_bytes(self) -> int:
        """Bytes that the system has given."""
        return sum(memory.num_mapped_bytes() for memory in self._memories)


def _between(span: range, kept: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The parts of `span` before, between and after those of it that are kept, ascending."""
    begin = span.start
    for start in (*kept, span.stop):
        if begin < start:
            yield begin, start
        begin = start + 1


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple
