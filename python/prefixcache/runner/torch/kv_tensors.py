"""The KV tensors of torch: of CUDA, or of torch's own kernels on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from prefixcache.kv.cache_size import Blocks
from prefixcache.kv.specs import KVGroup, KVLayout
from prefixcache.runner.pool_memory import PoolMemory
from prefixcache.runner.reserved_memory import ReservedBlocks
from prefixcache.runner.torch.attention.base import AttentionGroup, AttentionSpec
from prefixcache.runner.torch.attention.grouped import GroupedAttention
from prefixcache.runner.torch.cuda_memory import CudaMemory
from prefixcache.runner.torch.typed import from_numpy

Reserve = Callable[[int], CudaMemory]


@dataclass(slots=True, kw_only=True)
class KVTensors(PoolMemory):
    """The KV tensors that all groups share, bound to the attention that reads and writes them.

    With `reserve`, which makes the address space of a tensor by its bytes, the pool can be resized.
    """

    comes_when_written = False
    attention: GroupedAttention
    dtype: torch.dtype
    device: torch.device
    reserve: Reserve | None = None
    _tensors: list[Tensor] = field(default_factory=list[Tensor], init=False)

    @property
    def num_reserved_bytes(self) -> int:
        """Bytes of address space, of which the device gives what is provided."""
        most = self.num_blocks if self.reserve is None else max(self.max_blocks, self.num_blocks)
        return most * self.bytes_per_block

    @property
    def is_resizable(self) -> bool:
        """Whether blocks can be added and taken away."""
        return self.reserve is not None

    def num_mapped_bytes(self) -> int:
        """Bytes that the device has given. From any thread."""
        if self.reserved is None:
            return sum(tensor.nbytes for tensor in self._tensors)
        return self.reserved.num_mapped_bytes()

    def allocate(self) -> None:
        """Makes all blocks usable and binds their zeroed tensors. Raises `OutOfMemoryError`."""
        self._check_free(self.num_blocks, self.num_blocks)
        if self.reserved is None:
            self._bind(self._make(self.num_blocks))
            return
        self.reserved.provide(self.num_blocks)
        for tensor in self._tensors:
            tensor[: min(self.granule_blocks, self.num_blocks)].zero_()

    def give_up(self) -> None:
        """Gives the memory back to the system but for the null block's; its content is lost."""
        if self.reserved is not None:
            self.give_back(1, max(self.max_blocks, self.num_blocks))
        else:
            self._bind(self._make(1))
            give_back(self.device)

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        """Copies the content of blocks; no target is a source. From one thread, between steps."""
        there, here = (
            from_numpy(ids.astype(np.int64)).to(self.device) for ids in (targets, sources)
        )
        for tensor in self._tensors:
            tensor.index_copy_(0, there, tensor.index_select(0, here))

    def _make(self, num_blocks: int) -> list[Tensor]:
        """The zeroed tensors of the layout, of the attention's shape.

        Where memory is reserved they have room for `max_blocks`, and the first `num_blocks` are
        usable. Raises `OutOfMemoryError`.
        """
        try:
            return self._reserved(num_blocks) if self.reserve else self._allocated(num_blocks)
        except (OSError, RuntimeError, MemoryError) as error:
            raise self._cannot_allocate(num_blocks, error) from error

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
        memories = [self.reserve(size) for _ in range(self.layout.num_tensors)]
        self.reserved = ReservedBlocks(memories, self.bytes_per_tensor_block)
        self.reserved.provide(num_blocks)
        return [memory.tensor(shape, self.dtype) for memory in memories]

    def _bind(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self.attention.bind(tensors)


def attention_groups(layout: KVLayout, spec: AttentionSpec) -> tuple[AttentionGroup, ...]:
    """What attention is made with: a group for each of the layout, the rest as in `spec`."""
    return tuple(
        AttentionGroup(
            _spec_of(group, spec),
            group,
            tuple(part for part in layout.states if part.group == number),
        )
        for number, group in enumerate(layout.groups)
    )


def _spec_of(group: KVGroup, spec: AttentionSpec) -> AttentionSpec:
    kv_heads, head_dim = group.heads or (spec.num_kv_heads, spec.head_dim)
    window = group.sliding_window
    return replace(spec, sliding_window=window, num_kv_heads=kv_heads, head_dim=head_dim)


def give_back(device: torch.device) -> None:
    """Hands memory that torch holds unused on a GPU to the driver; a CPU's went at once."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
