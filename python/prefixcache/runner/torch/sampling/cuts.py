"""How low a token's logit may be to be drawn: min_p, then top_k, then top_p of the remaining mass.

Ties are kept on both sides of a cut, so that the order of equal logits plays no part. A nucleus is
found in a fixed number of looks at all tokens, since a GPU's work would have to be waited for to
look at fewer. Letters of shapes: R rows, N of them that are cut, V vocabulary, K candidates or
buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.runner.torch.sampling.row_options import Cut, Draws
from prefixcache.runner.torch.sampling.tiles import Tiles

# A token's mass, 1 for the likeliest, in whole units: their sums are the same in any order, and
# those of 2**18 tokens fit into int64.
_UNITS = 2.0**44
# A float32's place below its row's largest has 32 bits; each look tells some of them.
_LOOKS = ((21, 11), (10, 11), (0, 10))


def floors(logits_RV: Tensor, tiles: Tiles, draws: Draws) -> Tensor:
    """[R]: the least logits that the cuts leave."""
    floors_R = tiles.best_RB.amax(dim=-1) + draws.least_N
    if draws.top_k is not None:
        _raise_to(floors_R, draws.top_k, _top_k_floors(tiles, draws.top_k))
    if draws.top_p is not None:
        _raise_to(floors_R, draws.top_p, _nuclei(logits_RV, tiles, floors_R, draws.top_p))
    return floors_R


def _raise_to(floors_R: Tensor, cut: Cut, floors_N: Tensor) -> None:
    floors_R[cut.rows_N] = torch.maximum(floors_R[cut.rows_N], floors_N)


def _top_k_floors(tiles: Tiles, cut: Cut) -> Tensor:
    sorted_NK = tiles.largest(cut.rows_N, int(cut.most))
    return sorted_NK.gather(1, cut.limits_N.unsqueeze(1) - 1).squeeze(1)


def _picked(logits_RV: Tensor, rows_N: Tensor) -> Tensor:
    """Those rows, without a copy where they are all."""
    return logits_RV if len(rows_N) == len(logits_RV) else logits_RV[rows_N]


def _nuclei(logits_RV: Tensor, tiles: Tiles, floors_R: Tensor, cut: Cut) -> Tensor:
    """[N]: the least logits of the likeliest tokens whose mass reaches each row's share (nuclei).

    The logit at which the mass from the largest down reaches the share is found bit by bit: tokens
    fall into buckets by the upper bits of their place, and then those of one bucket by the next.
    """
    logits_NV = _picked(logits_RV, cut.rows_N)
    most_N1 = tiles.best_RB[cut.rows_N].amax(dim=-1, keepdim=True)
    masses_NV = (logits_NV - most_N1).double().exp_().mul_(_UNITS).long()
    masses_NV.masked_fill_(logits_NV < floors_R[cut.rows_N].unsqueeze(1), 0)
    top_N1 = _ordered(most_N1)
    places_NV = (top_N1 - _ordered(logits_NV)).clamp_(0, 2**32 - 1)
    wanted_N1 = cut.limits_N.unsqueeze(1) * masses_NV.sum(dim=-1, keepdim=True)
    found_N1 = torch.zeros_like(top_N1)
    passed_N1 = torch.zeros_like(top_N1)
    for shift, bits in _LOOKS:
        inside_NV = (places_NV >> (shift + bits)) == (found_N1 >> (shift + bits))
        buckets_NV = (places_NV >> shift) & (2**bits - 1)
        sums_NK = masses_NV.new_zeros(len(masses_NV), 2**bits)
        sums_NK.scatter_add_(1, buckets_NV, masses_NV.masked_fill(~inside_NV, 0))
        reached_NK = sums_NK.cumsum(dim=-1) + passed_N1
        short_NK = reached_NK < wanted_N1
        bucket_N1 = short_NK.sum(dim=-1, keepdim=True).clamp_(max=2**bits - 1)
        found_N1 = found_N1 + (bucket_N1 << shift)
        passed_N1 = passed_N1 + (sums_NK * short_NK).sum(dim=-1, keepdim=True)
    return _float_at(top_N1 - found_N1).squeeze(1)


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of these float32, int64."""
    bits = values.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _float_at(ordered: Tensor) -> Tensor:
    """The float32 that `_ordered` makes this integer of."""
    bits = ordered.clamp(-(2**31), 2**31 - 1).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
