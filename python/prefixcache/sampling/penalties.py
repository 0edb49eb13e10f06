"""What a request changes in its logits before a token is chosen.

In vLLM's order: bias, banned tokens, then the penalties. Each row is worked on alone. Letters of
shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache.sampling_params import SamplingParams
from prefixcache.step_plan import SamplingInput


def has_adjustments(row: SamplingInput) -> bool:
    """Whether `adjust_logits` would change this row."""
    return bool(row.params.logit_bias or row.banned_token_ids or has_penalties(row.params))


def has_penalties(params: SamplingParams) -> bool:
    """Whether a presence, frequency or repetition penalty is set."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def adjust_logits(logits_RV: Tensor, rows: Sequence[SamplingInput]) -> Tensor:
    """Logits with each row's bias, bans and penalties; the argument itself is left alone."""
    if not any(has_adjustments(row) for row in rows):
        return logits_RV
    adjusted_RV = logits_RV.clone()
    for logits_V, row in zip(adjusted_RV, rows, strict=True):
        _add_bias(logits_V, row)
        _penalize_repetition(logits_V, row)
        _penalize_counts(logits_V, row)
    return adjusted_RV


def _add_bias(logits_V: Tensor, row: SamplingInput) -> None:
    if row.params.logit_bias:
        ids = _ids(list(row.params.logit_bias), logits_V)
        logits_V[ids] += logits_V.new_tensor(list(row.params.logit_bias.values()))
    if row.banned_token_ids:
        logits_V[_ids(row.banned_token_ids, logits_V)] = -torch.inf


def _penalize_repetition(logits_V: Tensor, row: SamplingInput) -> None:
    """Keskar et al., "CTRL" (2019), section 4.1, over prompt and answer, both signs mended."""
    penalty = row.params.repetition_penalty
    if penalty != 1.0:
        ids = _ids([*row.prompt_token_ids, *row.output_token_ids], logits_V).unique()
        seen = logits_V[ids]
        logits_V[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalize_counts(logits_V: Tensor, row: SamplingInput) -> None:
    """OpenAI's two penalties: on each token of the answer, once, and once for each occurrence."""
    params = row.params
    if (params.frequency_penalty or params.presence_penalty) and row.output_token_ids:
        ids, counts = _ids(row.output_token_ids, logits_V).unique(return_counts=True)
        logits_V[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)
