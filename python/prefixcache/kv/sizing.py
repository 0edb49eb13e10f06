"""How much of a GPU's memory is left for the KV cache, from a trial of the largest step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from prefixcache.exceptions import OutOfMemoryError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a device around a trial step.

    `total` and `free` are the driver's numbers, over all processes. Torch's allocator holds
    `reserved` of what is not free, and needed `peak` at the worst moment of the trial.
    """

    total: int
    free: int
    reserved: int
    peak: int

    @property
    def outside(self) -> int:
        """What others hold: the driver's context, libraries, other processes."""
        return self.total - self.free - self.reserved


def measure_peak(trial: Callable[[], None], device: torch.device) -> DeviceMemory:
    """Runs the largest step and reads what it took. The device must be a CUDA device."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    trial()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
    )


def fitting_blocks(memory: DeviceMemory, utilization: float, block_bytes: int) -> int:
    """Blocks, the null block included, that fit beside everything else.

    `utilization` is the share of the whole device that this process may use, as in vLLM. CUDA
    graphs live in what it leaves. Raises `OutOfMemoryError` with the numbers when not even one
    block beside the null block fits.
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
