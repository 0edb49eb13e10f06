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
from prefixcache.sampling.noise import RowNoise
from prefixcache.sampling.penalties import adjust_logits, has_adjustments
from prefixcache.sampling.race import race
from prefixcache.sampling.tiles import Tiles
from prefixcache.sampling_params import SamplingParams
from prefixcache.step_plan import SamplingInput, SequenceOutput

_UNUSABLE = "The model's logits are not finite numbers."
_NUCLEUS_CANDIDATES = (64, 512)


def sample(logits_RV: Tensor, rows: Sequence[SamplingInput]) -> list[SequenceOutput]:
    """The next token of each row, and its log probabilities where they are asked for.

    `logits_RV` is float32. A row without a finite maximum gets an error in place of a token.
    """
    if all_plain_greedy(rows):
        return greedy_outputs(greedy_token_ids(logits_RV).tolist())
    adjusted_RV = adjust_logits(logits_RV, rows)
    usable = _has_maximum(logits_RV) & _has_maximum(adjusted_RV)
    greedy = [r for r, ok in enumerate(usable.tolist()) if ok and rows[r].params.greedy]
    drawn = [r for r, ok in enumerate(usable.tolist()) if ok and not rows[r].params.greedy]
    tokens = [-1] * len(rows)
    if greedy:
        _put(tokens, greedy, greedy_token_ids(_picked(adjusted_RV, greedy)).tolist())
    if drawn:
        _put(tokens, drawn, _draw(_picked(adjusted_RV, drawn), [rows[r] for r in drawn]))
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


def _has_maximum(logits_RV: Tensor) -> Tensor:
    """Whether each row's largest value is a finite number."""
    return logits_RV.amax(dim=-1).isfinite()


def _put(tokens: list[int], rows: Sequence[int], chosen: Sequence[int]) -> None:
    for r, token in zip(rows, chosen, strict=True):
        tokens[r] = token


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
    params = [row.params for row in rows]
    scaled_RV = logits_RV / _column([p.temperature for p in params], logits_RV)
    tiles = Tiles(scaled_RV)
    noise = RowNoise(
        [row.seed for row in rows],
        [len(row.prompt_token_ids) + len(row.output_token_ids) for row in rows],
        logits_RV.device,
    )
    return race(tiles, _floors(scaled_RV, tiles, params), noise)


def _floors(logits_RV: Tensor, tiles: Tiles, params: Sequence[SamplingParams]) -> Tensor:
    """[R]: the least logits that min_p, then top_k, then top_p (of the remaining mass) leave."""
    least = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    floors_R = tiles.best_RB.amax(dim=-1) + logits_RV.new_tensor(least)
    if cut := [r for r, p in enumerate(params) if 0 < p.top_k < logits_RV.shape[1]]:
        kept_R = _top_k_floors(tiles, cut, [params[r].top_k for r in cut])
        floors_R[cut] = torch.maximum(floors_R[cut], kept_R)
    if cut := [r for r, p in enumerate(params) if p.top_p < 1]:
        masses = [params[r].top_p for r in cut]
        floors_R[cut] = _top_p_floors(logits_RV, tiles, floors_R, cut, masses)
    return floors_R


def _top_k_floors(tiles: Tiles, rows: Sequence[int], ranks: Sequence[int]) -> Tensor:
    sorted_RN = tiles.largest(rows, max(ranks))
    return sorted_RN.gather(1, _ids_column(ranks, sorted_RN) - 1).squeeze(1)


def _top_p_floors(
    logits_RV: Tensor,
    tiles: Tiles,
    floors_R: Tensor,
    rows: Sequence[int],
    masses: Sequence[float],
) -> Tensor:
    """The least logits of the likeliest tokens whose mass reaches each row's share (nuclei).

    A nucleus is looked for among ever more of the likeliest tokens, at last among all. How far a
    row goes depends on that row alone.
    """
    allowed_R = floors_R[rows]
    shares_R = torch.tensor(masses, dtype=torch.float64, device=floors_R.device)
    wanted_R = shares_R * _masses(_picked(logits_RV, rows), allowed_R)
    found_R = torch.empty_like(allowed_R)
    left = list(range(len(rows)))
    for count in (*_NUCLEUS_CANDIDATES, logits_RV.shape[1]):
        sorted_RN = tiles.largest([rows[r] for r in left], count)
        found_R[left], reached = _least_of_nuclei(sorted_RN, wanted_R[left])
        left = [r for r, done in zip(left, reached, strict=True) if not done]
        if not left:
            break
    return torch.maximum(found_R, allowed_R)


def _masses(logits_RV: Tensor, floors_R: Tensor) -> Tensor:
    """Sums over the tokens not below the floor of exp(logit - the row's largest), float64 [R]."""
    if (floors_R > -torch.inf).any():
        logits_RV = logits_RV.masked_fill(logits_RV < floors_R.unsqueeze(1), -torch.inf)
    return 1 / torch.softmax(logits_RV, dim=-1).amax(dim=-1).double()


def _least_of_nuclei(sorted_RN: Tensor, wanted_R: Tensor) -> tuple[Tensor, list[bool]]:
    """The smallest logit inside each nucleus [R], and whether these candidates hold it.

    The sums run in float64 from the largest down, one after another.
    """
    weights_RN = (sorted_RN - sorted_RN[:, :1]).double().exp_()
    short_RN = weights_RN.cumsum(dim=-1) < wanted_R.unsqueeze(1)
    last_R1 = short_RN.sum(dim=-1, keepdim=True).clamp_max_(sorted_RN.shape[1] - 1)
    return sorted_RN.gather(1, last_R1).squeeze(1), (~short_RN[:, -1]).tolist()


def _picked(values_RV: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows, without a copy where they are all."""
    return values_RV if len(rows) == len(values_RV) else values_RV[list(rows)]


def _ids_column(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device).unsqueeze(1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
