"""The largest step a runner may be given, to see what memory it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from prefixcache.exceptions import OutOfMemoryError
from prefixcache.runner.ranges import indptr_of
from prefixcache.runner.torch.attention.base import AttentionBatch
from prefixcache.runner.torch.attention.grouped import GroupedAttention
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.sampling.sampler import sample
from prefixcache.runner.torch.typed import from_numpy
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput
from prefixcache.types.token_ids import TokenBuffer, as_token_ids

_MIB = 1 << 20
# Takes the sampler through all it may allocate: scaling, nucleus, noise.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, seed=0)


@torch.inference_mode()
def run_largest_step(
    model: DecoderModel,
    attention: GroupedAttention,
    *,
    max_tokens: int,
    max_sampled: int,
    max_model_len: int,
    block_size: int,
    device: torch.device,
) -> None:
    """Computes `max_tokens` prompt tokens and samples `max_sampled`.

    All keys and values go to the null block, so that a pool of one block is enough.
    """
    lengths = _split(max_tokens, max_model_len)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    batch = null_batch(lengths, block_size, device)
    attention.plan([batch] * attention.num_groups)
    hidden_TE = model.forward(torch.zeros_like(positions), positions, attention)
    rows = min(max_sampled, len(hidden_TE))
    logits_RV = model.compute_logits(hidden_TE[:rows])
    nothing = SamplingInput(params=_PARAMS, seed=0, tokens=TokenBuffer(as_token_ids(())))
    sample(logits_RV, [nothing] * rows)


def _split(total: int, most: int) -> list[int]:
    """`total` in parts of `most`, and what is left."""
    full, rest = divmod(total, most)
    return [most] * full + ([rest] if rest else [])


def null_batch(lengths: list[int], block_size: int, device: torch.device) -> AttentionBatch:
    """Sequences of these lengths in a step, none before it, all in the null block."""
    pages = [-(-length // block_size) for length in lengths]
    last = [length - (count - 1) * block_size for length, count in zip(lengths, pages, strict=True)]
    return AttentionBatch(
        qo_indptr=from_numpy(indptr_of(lengths)),
        kv_indptr=from_numpy(indptr_of(pages)),
        kv_indices=torch.zeros(sum(pages), dtype=torch.int32),
        last_page_len=torch.tensor(last, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
    )


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
