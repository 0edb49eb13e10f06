"""The largest step a runner may be given, to see what memory it takes."""

from __future__ import annotations

import torch

from prefixcache.attention.base import AttentionBatch
from prefixcache.attention.grouped import GroupedAttention
from prefixcache.runner.decoder import Decoder
from prefixcache.runner.sampling.sampler import sample
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput
from prefixcache.types.token_ids import TokenBuffer, as_token_ids

# Takes the sampler through all it may allocate: scaling, nucleus, noise.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, seed=0)


@torch.inference_mode()
def run_largest_step(
    model: Decoder,
    attention: GroupedAttention,
    *,
    max_tokens: int,
    max_seqs: int,
    max_model_len: int,
    block_size: int,
    device: torch.device,
) -> None:
    """Computes `max_tokens` prompt tokens and samples for `max_seqs` sequences.

    All keys and values go to the null block, so that a pool of one block is enough.
    """
    lengths = _split(max_tokens, max_model_len)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    batch = null_batch(lengths, block_size, device)
    attention.plan([batch] * attention.num_groups)
    hidden_TE = model.forward(torch.zeros_like(positions), positions, attention)
    rows = min(max_seqs, len(hidden_TE))
    logits_RV = model.compute_logits(hidden_TE[:rows])
    nothing = SamplingInput(params=_PARAMS, seed=0, tokens=TokenBuffer(as_token_ids(())))
    sample(logits_RV, [nothing] * rows)


def _split(total: int, most: int) -> list[int]:
    """`total` in parts of `most`, and what is left."""
    whole, rest = divmod(total, most)
    return [most] * whole + ([rest] if rest else [])


def null_batch(lengths: list[int], block_size: int, device: torch.device) -> AttentionBatch:
    """Sequences of these lengths in a step, none before it, all in the null block."""
    pages = [-(-length // block_size) for length in lengths]
    last = [length - (count - 1) * block_size for length, count in zip(lengths, pages, strict=True)]
    return AttentionBatch(
        qo_indptr=_indptr(lengths),
        kv_indptr=_indptr(pages),
        kv_indices=torch.zeros(sum(pages), dtype=torch.int32),
        last_page_len=torch.tensor(last, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
    )


def _indptr(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
