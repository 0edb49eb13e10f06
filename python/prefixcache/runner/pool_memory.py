"""What the memory of a pool's blocks has in common on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixcache.exceptions import OutOfMemoryError
from prefixcache.kv.specs import KVLayout
from prefixcache.runner.reserved_memory import ReservedBlocks
from prefixcache.runner.sizing import check_free

_MIB = 1 << 20


@dataclass(slots=True, kw_only=True)
class PoolMemory:
    """Blocks of `block_size` tokens, each with a part of every tensor of the layout.

    `num_blocks` counts the null block; `free_memory` tells the bytes that the device can still
    give. Where address space is reserved (`reserved`), blocks can be added up to `max_blocks` and
    taken away, and the tensors keep their addresses; otherwise `max_blocks` is not looked at.
    """

    layout: KVLayout
    num_blocks: int
    block_size: int
    itemsize: int
    free_memory: Callable[[], int]
    max_blocks: int = 0
    reserved: ReservedBlocks | None = field(default=None, init=False)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block over all tensors."""
        return self.layout.bytes_per_block(self.block_size, self.itemsize)

    @property
    def bytes_per_tensor_block(self) -> int:
        """Bytes that a block takes of each tensor."""
        return self.bytes_per_block // self.layout.num_tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.bytes_per_block

    @property
    def granule_blocks(self) -> int:
        """Neighbouring blocks whose memory goes back together."""
        return self._in_granules().granule_blocks

    def allocate(self) -> None:
        """Makes all blocks usable, the null block zeroed. Raises `OutOfMemoryError`."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Gives the memory back to the system but for the null block's; its content is lost."""
        raise NotImplementedError

    def grow(self, num_blocks: int) -> None:
        """Makes blocks usable up to `num_blocks` of them. Raises `OutOfMemoryError`."""
        self._check_free(num_blocks, num_blocks - self.num_blocks)
        self._in_granules().provide(num_blocks)
        self.num_blocks = num_blocks

    def set_size(self, num_blocks: int) -> None:
        """That many blocks are usable; memory is neither made nor given back for it."""
        self.num_blocks = num_blocks

    def give_back(self, first: int, end: int, held: Sequence[int] = ()) -> int:
        """See `ReservedBlocks`."""
        return self._in_granules().give_back(first, end, held)

    def _in_granules(self) -> ReservedBlocks:
        assert self.reserved is not None, "this memory is allocated as a whole"
        return self.reserved

    def _check_free(self, num_blocks: int, num_new: int) -> None:
        num_bytes = num_new * self.bytes_per_block
        check_free(num_blocks, self.block_size, num_bytes, self.free_memory())

    def _cannot_allocate(self, num_blocks: int, error: Exception) -> OutOfMemoryError:
        needed = num_blocks * self.bytes_per_block
        return OutOfMemoryError(f"Cannot allocate {needed / _MIB:,.0f} MiB of KV: {error}")
