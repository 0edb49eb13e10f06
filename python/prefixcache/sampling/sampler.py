"""Chooses each sequence's next token.

A row's token depends on its logits, its options, its seed and its position, and never on the other
rows: every operation here works on rows one by one, or is elementwise. Ties are kept on both sides
of a cut (top_k, top_p, min_p), so that the order of equal logits plays no part. Letters of shapes:
R rows, V vocabulary, N candidates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from prefixcache.request import TokenLogprobs
from prefixcache.sampling.logprobs import token_logprobs
from prefixcache.sampling.noise import exponential_noise
from prefixcache.sampling.penalties import adjust_logits, has_adjustments
from prefixcache.sampling_params import SamplingParams
from prefixcache.step_plan import SamplingInput, SequenceOutput

_UNUSABLE = "The model's logits are not finite numbers."
_NUCLEUS_CANDIDATES = 1024


def sample(logits_RV: Tensor, rows: Sequence[SamplingInput]) -> list[SequenceOutput]:
    """The next token of each row, and its log probabilities where they are asked for.

    `logits_RV` is float32. A row without a finite maximum gets an error in place of a token.
    """
    if all_plain_greedy(rows):
        return greedy_outputs(greedy_token_ids(logits_RV).tolist())
    tokens: list[int] = greedy_token_ids(logits_RV).tolist()
    adjusted_RV = adjust_logits(logits_RV, rows)
    if adjusted_RV is not logits_RV:
        best = greedy_token_ids(adjusted_RV).tolist()
        tokens = [-1 if raw < 0 else token for raw, token in zip(tokens, best, strict=True)]
    drawn = [r for r, row in enumerate(rows) if tokens[r] >= 0 and not row.params.greedy]
    if drawn:
        chosen = _draw(adjusted_RV[drawn], [rows[r] for r in drawn])
        for r, token in zip(drawn, chosen, strict=True):
            tokens[r] = token
    return _outputs(tokens, _logprobs(logits_RV, rows, tokens))


def all_plain_greedy(rows: Sequence[SamplingInput]) -> bool:
    """Whether the rows ask for nothing but their likeliest tokens: `greedy_token_ids` will do."""
    return all(
        row.params.greedy and row.params.logprobs is None and not has_adjustments(row)
        for row in rows
    )


def greedy_token_ids(logits_RV: Tensor) -> Tensor:
    """[R] on the logits' device: each row's likeliest token, -1 without a finite maximum."""
    best_R = logits_RV.max(dim=-1)
    return torch.where(best_R.values.isfinite(), best_R.indices, -1)


def greedy_outputs(token_ids: Sequence[int]) -> list[SequenceOutput]:
    """What `sample` returns for rows whose `greedy_token_ids` these are."""
    return _outputs(token_ids, {})


def _outputs(tokens: Sequence[int], logprobs: Mapping[int, TokenLogprobs]) -> list[SequenceOutput]:
    return [
        SequenceOutput(error=_UNUSABLE)
        if token < 0
        else SequenceOutput(token_id=token, logprobs=logprobs.get(r))
        for r, token in enumerate(tokens)
    ]


def _logprobs(
    logits_RV: Tensor, rows: Sequence[SamplingInput], tokens: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """Rows that ask for the same number go together: how ties fall may depend on the number."""
    by_count: defaultdict[int, list[int]] = defaultdict(list)
    for r, row in enumerate(rows):
        if row.params.logprobs is not None and tokens[r] >= 0:
            by_count[row.params.logprobs].append(r)
    found: dict[int, TokenLogprobs] = {}
    for count, group in by_count.items():
        values = token_logprobs(logits_RV[group], [tokens[r] for r in group], count)
        found.update(zip(group, values, strict=True))
    return found


def _draw(logits_RV: Tensor, rows: Sequence[SamplingInput]) -> list[int]:
    """Samples by an exponential race: argmax of p / E with E standard exponential variables.

    The same in law as adding Gumbel noise to the logits, one logarithm cheaper.
    """
    params = [row.params for row in rows]
    scaled_RV = logits_RV / _column([p.temperature for p in params], logits_RV)
    probs_RV = torch.softmax(_truncate(scaled_RV, params), dim=-1)
    noise_RV = exponential_noise(
        [row.seed for row in rows],
        [len(row.prompt_token_ids) + len(row.output_token_ids) for row in rows],
        logits_RV.shape[1],
        logits_RV.device,
    )
    return (probs_RV.double() / noise_RV).argmax(dim=-1).tolist()


def _truncate(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Minus infinity for what min_p, then top_k, then top_p (of the remaining mass) cut off.

    Works in place.
    """
    floors = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    if max(floors) > -math.inf:
        floor_R1 = logits_RV.amax(dim=-1, keepdim=True) + _column(floors, logits_RV)
        logits_RV.masked_fill_(logits_RV < floor_R1, -math.inf)
    if cut := [r for r, p in enumerate(params) if 0 < p.top_k < logits_RV.shape[1]]:
        logits_RV[cut] = _keep_top_k(logits_RV[cut], [params[r].top_k for r in cut])
    if cut := [r for r, p in enumerate(params) if p.top_p < 1]:
        logits_RV[cut] = _keep_top_p(logits_RV[cut], [params[r].top_p for r in cut])
    return logits_RV


def _keep_top_k(logits_RV: Tensor, ranks: Sequence[int]) -> Tensor:
    sorted_RN = logits_RV.topk(max(ranks), dim=-1).values
    last_R1 = sorted_RN.gather(1, torch.tensor(ranks, device=logits_RV.device).unsqueeze(1) - 1)
    return logits_RV.masked_fill(logits_RV < last_R1, -math.inf)


def _keep_top_p(logits_RV: Tensor, masses: Sequence[float]) -> Tensor:
    """Keeps the likeliest tokens whose mass reaches each row's share (nucleus sampling).

    The nucleus is looked for among the likeliest candidates first; rows where it is larger are
    sorted whole. Which way a row goes depends on that row alone.
    """
    probs_RV = torch.softmax(logits_RV, dim=-1)
    mass_R1 = torch.tensor(masses, dtype=torch.float64, device=logits_RV.device).unsqueeze(1)
    least_R1, reached_R = _least_of_nucleus(probs_RV, mass_R1, _NUCLEUS_CANDIDATES)
    if not reached_R.all():
        wide = ~reached_R
        whole, _ = _least_of_nucleus(probs_RV[wide], mass_R1[wide], probs_RV.shape[1])
        least_R1[wide] = whole
    return logits_RV.masked_fill(probs_RV < least_R1, -math.inf)


def _least_of_nucleus(probs_RV: Tensor, mass_R1: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The smallest probability inside each nucleus [R, 1], and whether `count` candidates held it.

    The sums run in float64 from the largest probability down, one after another.
    """
    sorted_RN = probs_RV.topk(min(count, probs_RV.shape[1]), dim=-1).values
    short_RN = sorted_RN.double().cumsum(dim=-1) < mass_R1
    last_R1 = short_RN.sum(dim=-1, keepdim=True).clamp_max_(sorted_RN.shape[1] - 1)
    return sorted_RN.gather(1, last_R1), ~short_RN[:, -1]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
