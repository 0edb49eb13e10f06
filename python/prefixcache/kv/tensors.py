"""The KV tensors.

Their memory is reserved, not touched: the system gives pages out as blocks are first written, so a
large pool costs nothing until it is used.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prefixcache.attention.base import AttentionGroup, AttentionSpec
from prefixcache.attention.grouped import GroupedAttention
from prefixcache.exceptions import OutOfMemoryError
from prefixcache.kv.sizing import available_memory
from prefixcache.kv.specs import KVLayout

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTensors:
    """The KV tensors that all groups share, bound to the attention that reads and writes them.

    `num_blocks` counts the null block, which alone is kept while the memory is given up.
    """

    layout: KVLayout
    attention: GroupedAttention
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.layout.bytes_per_block(self.block_size, self.dtype.itemsize)

    def allocate(self) -> None:
        """Binds zeroed tensors of all blocks. Raises `OutOfMemoryError`."""
        self.attention.bind(self.make(self.num_blocks))

    def give_up(self) -> None:
        """Gives the memory back to the system; its content is lost."""
        self.attention.bind(self.make(1))
        give_back(self.device)

    def make(self, num_blocks: int) -> list[Tensor]:
        """One zeroed tensor a layer of the largest group, of the attention's shape.

        Raises `OutOfMemoryError` with the numbers when they exceed the free memory.
        """
        layout = self.layout
        needed = num_blocks * layout.bytes_per_block(self.block_size, self.dtype.itemsize)
        free = available_memory(self.device)
        if needed > free:
            raise OutOfMemoryError(
                f"The KV cache of {num_blocks} blocks of {self.block_size} tokens needs "
                f"{needed / _MIB:,.0f} MiB, but only {free / _MIB:,.0f} MiB are free. "
                "Lower num_blocks or kv_cache_memory."
            )
        shape = self.attention.kv_shape(
            num_blocks, self.block_size, layout.num_kv_heads, layout.head_dim
        )
        try:
            return [_zeros(shape, self.dtype, self.device) for _ in range(layout.num_tensors)]
        except (OSError, RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"Cannot allocate {needed / _MIB:,.0f} MiB of KV: {error}"
            ) from error


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


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    # torch.zeros would write every page; a fresh anonymous mapping reads as zeros without.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
