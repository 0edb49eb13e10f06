"""How many blocks of KV fit: into free memory, or what a profile run leaves of a GPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from prefixcache.config.engine_config import CacheConfig
from prefixcache.exceptions import FieldError, OutOfMemoryError
from prefixcache.kv.specs import KVLayout, PoolSizes

_MIB = 1 << 20
_DEFAULT_SHARE = 0.5
_LEAST_BLOCKS = 2
_DEFAULT_CPU_BYTES = 4 << 30
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def choose_num_blocks(
    cache: CacheConfig, layout: KVLayout, dtype: torch.dtype, device: torch.device
) -> int:
    """Blocks of the pool at the start, the null block included.

    `num_blocks` and `kv_cache_memory` are taken at their word; a share is one of the memory that is
    free now. With neither, half of that is used, on a CPU at most 4 GiB. Where not even one block
    next to the null block fits it raises `FieldError` if bytes were asked for, else
    `OutOfMemoryError`.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = layout.bytes_per_block(cache.block_size, dtype.itemsize)
    budget = _budget(cache.kv_cache_memory, device)
    if budget < _LEAST_BLOCKS * block_bytes:
        if isinstance(cache.kv_cache_memory, int):
            raise FieldError(
                "kv_cache_memory",
                f"must be at least {_LEAST_BLOCKS} blocks of {block_bytes} bytes, got {budget}.",
            )
        raise OutOfMemoryError(
            f"The KV cache needs at least {_LEAST_BLOCKS} blocks of {block_bytes} bytes, "
            f"but only {budget} bytes are allowed (kv_cache_memory)."
        )
    return budget // block_bytes


def _budget(asked: int | float | None, device: torch.device) -> int:
    """Bytes for the pool."""
    if isinstance(asked, int):
        return asked
    share = int(available_memory(device) * (asked or _DEFAULT_SHARE))
    return share if asked or device.type == "cuda" else min(share, _DEFAULT_CPU_BYTES)


def pool_sizes(cache: CacheConfig, start: int, block_bytes: int, device: torch.device) -> PoolSizes:
    """The range of a pool that starts with `start` blocks.

    Raises `FieldError` for a ceiling beyond the machine, and for sizes that are out of order.
    """
    free = available_memory(device)
    unbounded = PoolSizes(
        start=start, ceiling=start, floor=_LEAST_BLOCKS, block_bytes=block_bytes, free_bytes=free
    )
    most, least = cache.kv_cache_max_memory, cache.kv_cache_min_memory
    ceiling = start if most is None else unbounded.blocks_of(most)
    floor = _LEAST_BLOCKS if least is None else max(unbounded.blocks_of(least), _LEAST_BLOCKS)
    _check_ceiling(start, ceiling, block_bytes, device)
    if floor > start:
        raise FieldError(
            "kv_cache_min_memory",
            f"must be at most the size at the start, {start} blocks of {block_bytes} bytes; it "
            f"asks for {floor}.",
        )
    return replace(unbounded, ceiling=ceiling, floor=floor)


def _check_ceiling(start: int, ceiling: int, block_bytes: int, device: torch.device) -> None:
    if ceiling < start:
        raise FieldError(
            "kv_cache_max_memory",
            f"must be at least the size at the start, {start} blocks of {block_bytes} bytes; it "
            f"allows {ceiling}.",
        )
    machine = total_memory(device)
    if ceiling > start and ceiling * block_bytes > machine:
        raise FieldError(
            "kv_cache_max_memory",
            f"must be at most the {machine / _MIB:,.0f} MiB of memory that there are, got "
            f"{ceiling * block_bytes / _MIB:,.0f} MiB.",
        )


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, container limits included."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, *_cgroup_available())


def total_memory(device: torch.device) -> int:
    """Bytes that the device has, container limits included."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [_read_number(Path(limit)) for limit, _ in _CGROUP_FILES]
    return min(psutil.virtual_memory().total, *(one for one in limits if one), 1 << 62)


def _cgroup_available() -> list[int]:
    bounds = [_limit_minus_usage(Path(limit), Path(usage)) for limit, usage in _CGROUP_FILES]
    return [bound for bound in bounds if bound is not None] or [1 << 62]


def _limit_minus_usage(limit: Path, usage: Path) -> int | None:
    most, used = _read_number(limit), _read_number(usage)
    return None if most is None or used is None else max(most - used, 0)


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None  # No such controller, or "max": no limit.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a device around a profile run.

    `total` and `free` are the driver's numbers, over all processes. Torch's allocator holds
    `reserved` of what is not free, and needed `peak` at the worst moment of the run.
    """

    total: int
    free: int
    reserved: int
    peak: int

    @property
    def outside(self) -> int:
        """What others hold: the driver's context, libraries, other processes."""
        return self.total - self.free - self.reserved


def measure_peak(profile_run: Callable[[], None], device: torch.device) -> DeviceMemory:
    """Runs the largest step and reads what it took. The device must be a CUDA device."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile_run()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
    )


def fitting_blocks(memory: DeviceMemory, utilization: float, block_bytes: int) -> int:
    """Blocks, the null block included, that fit next to everything else.

    `utilization` is the share of the whole device that this process may use, as in vLLM. CUDA
    graphs live in what it leaves. Raises `OutOfMemoryError` with the numbers when not even one
    block next to the null block fits.
    """
    allowed = int(memory.total * utilization)
    budget = allowed - memory.outside - memory.peak
    if budget < 2 * block_bytes:
        raise OutOfMemoryError(
            f"gpu_memory_utilization {utilization} allows {allowed / _MIB:,.0f} MiB of "
            f"{memory.total / _MIB:,.0f}; the weights and the largest step need "
            f"{memory.peak / _MIB:,.0f} MiB and {memory.outside / _MIB:,.0f} MiB are in other use, "
            "so no KV cache fits. Raise it, or lower max_num_batched_tokens or max_num_seqs."
        )
    return budget // block_bytes
