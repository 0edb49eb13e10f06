"""The KV tensors: how many blocks fit, and their memory.

A KV tensor's memory is reserved, not touched: the system gives pages out as blocks are first
written, so a large pool costs nothing until it is used.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from prefixcache.attention.base import AttentionBackend
from prefixcache.config import CacheConfig
from prefixcache.exceptions import OutOfMemoryError
from prefixcache.kv.specs import KVGroup

_MIB = 1 << 20
_DEFAULT_SHARE = 0.5
_DEFAULT_CPU_BYTES = 4 << 30
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def choose_num_blocks(
    cache: CacheConfig, groups: Sequence[KVGroup], dtype: torch.dtype, device: torch.device
) -> int:
    """Blocks of the pool, the null block included.

    `num_blocks` and `kv_cache_memory` are taken at their word; a share is one of the memory that is
    free now. With neither, half of that is used, on a CPU at most 4 GiB. Raises `OutOfMemoryError`
    when not even one block beside the null block fits.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = _bytes_per_block(groups, cache.block_size, dtype)
    budget = _budget(cache.kv_cache_memory, device)
    if budget < 2 * block_bytes:
        raise OutOfMemoryError(
            f"The KV cache needs at least 2 blocks of {block_bytes} bytes, "
            f"but only {budget} bytes are allowed (kv_cache_memory)."
        )
    return budget // block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTensors:
    """The KV tensors of one group, bound to the backend that reads and writes them.

    `num_blocks` counts the null block, which alone is kept while the memory is given up.
    """

    group: KVGroup
    backend: AttentionBackend
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * _bytes_per_block([self.group], self.block_size, self.dtype)

    def allocate(self) -> None:
        """Binds zeroed tensors of all blocks. Raises `OutOfMemoryError`."""
        self._bind(self.num_blocks)

    def give_up(self) -> None:
        """Gives the memory back to the system; its content is lost."""
        self._bind(1)
        give_back(self.device)

    def _bind(self, num_blocks: int) -> None:
        kv_layers = allocate_kv(
            self.group,
            self.backend,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self.backend.bind(kv_layers)


def give_back(device: torch.device) -> None:
    """Hands memory that torch holds unused on a GPU to the driver; a CPU's went at once."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocate_kv(
    group: KVGroup,
    backend: AttentionBackend,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """One zeroed tensor a layer of the group, of the backend's shape.

    Raises `OutOfMemoryError` with the numbers when they exceed the free memory.
    """
    needed = num_blocks * group.bytes_per_block(block_size, dtype.itemsize)
    free = available_memory(device)
    if needed > free:
        raise OutOfMemoryError(
            f"The KV cache of {num_blocks} blocks of {block_size} tokens needs "
            f"{needed / _MIB:,.0f} MiB, but only {free / _MIB:,.0f} MiB are free. "
            "Lower num_blocks or kv_cache_memory."
        )
    shape = backend.kv_shape(num_blocks, block_size, group.num_kv_heads, group.head_dim)
    try:
        return [_zeros(shape, dtype, device) for _ in group.layers]
    except (OSError, RuntimeError, MemoryError) as error:
        raise OutOfMemoryError(
            f"Cannot allocate {needed / _MIB:,.0f} MiB of KV: {error}"
        ) from error


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    # torch.zeros would write every page; a fresh anonymous mapping reads as zeros without.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, container limits included."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, *_cgroup_available())


def _bytes_per_block(groups: Sequence[KVGroup], block_size: int, dtype: torch.dtype) -> int:
    return sum(group.bytes_per_block(block_size, dtype.itemsize) for group in groups)


def _budget(asked: int | float | None, device: torch.device) -> int:
    """Bytes for the pool."""
    if isinstance(asked, int):
        return asked
    share = int(available_memory(device) * (asked or _DEFAULT_SHARE))
    return share if asked or device.type == "cuda" else min(share, _DEFAULT_CPU_BYTES)


def _cgroup_available() -> list[int]:
    bounds = [_limit_minus_usage(Path(limit), Path(usage)) for limit, usage in _CGROUP_FILES]
    return [bound for bound in bounds if bound is not None] or [1 << 62]


def _limit_minus_usage(limit: Path, usage: Path) -> int | None:
    try:
        return max(int(limit.read_text()) - int(usage.read_text()), 0)
    except (OSError, ValueError):
        return None  # No such controller, or "max": no limit.
