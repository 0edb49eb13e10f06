"""Draws tokens by an exponential race: the token with the largest p / E wins it.

E are standard exponential variables; in law the same as adding Gumbel noise to the logits. Most
tokens cannot win, and a bound for sixteen of them at once shows it, so that a CPU computes the
noise of a few. How many they are decides the shapes of tensors, for which a GPU's work would have
to be waited for: there the noise of all is computed, in one kernel where triton is installed. Who
wins is the same. Letters of shapes as in `tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.runner.cuda.ops.cuda import fused_kernels
from prefixcache.runner.cuda.sampling.noise import RowNoise
from prefixcache.runner.cuda.sampling.tiles import MEMBERS, Tiles, place_of, token_ids

# A bound may be rounded below the score that it bounds.
_ROUNDING = 1e-9
_NO_TOKEN = torch.iinfo(torch.int64).max


def race(tiles: Tiles, floors_R: Tensor, noise: RowNoise) -> Tensor:
    """The winner of each row among the tokens whose logits are at least its floor, int64 [R].

    No logit is infinite but downwards, and each row has one that is finite and not below its floor.
    """
    best_RB, floors_R1 = tiles.best_RB, floors_R.unsqueeze(1)
    log_least_RB = noise.least_of_blocks(best_RB.shape[1]).log_()
    bounds_RB = (best_RB - log_least_RB).masked_fill_(best_RB < floors_R1, -torch.inf)
    reached_R = _best_of_blocks(tiles, floors_R, noise, bounds_RB.argmax(dim=-1))
    reached_R1 = (reached_R - _ROUNDING).unsqueeze(1)
    rows_N, blocks_N = (bounds_RB >= reached_R1).nonzero(as_tuple=True)
    logits_NM = tiles.members(rows_N, blocks_N)
    bounds_NM = logits_NM - log_least_RB[rows_N, blocks_N].unsqueeze(1)
    bounds_NM.masked_fill_(logits_NM < floors_R1[rows_N], -torch.inf)
    which_N, members_N = (bounds_NM >= reached_R1[rows_N]).nonzero(as_tuple=True)
    rows_N, blocks_N = rows_N[which_N], blocks_N[which_N]
    scores_N = logits_NM[which_N, members_N] - noise.of_members(rows_N, blocks_N, members_N).log_()
    return _winners(scores_N, rows_N, token_ids(blocks_N, members_N), len(best_RB))


def race_of_all(logits_RV: Tensor, floors_R: Tensor, noise: RowNoise) -> Tensor:
    """`race` in shapes that are known before: nothing waits for the device.

    Rows that break its conditions get any token, 0 or larger.
    """
    if (fused := fused_kernels(logits_RV)) is not None:
        scores_RT, tokens_RT = fused.race(
            logits_RV, floors_R, noise.block_keys_R, noise.token_keys_R
        )
    else:
        scores_RT, tokens_RT = _all_scores(logits_RV, floors_R, noise)
    most_R1 = scores_RT.amax(dim=-1, keepdim=True)
    return tokens_RT.masked_fill(scores_RT < most_R1, _NO_TOKEN).amin(dim=-1)


def _all_scores(logits_RV: Tensor, floors_R: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
    """The scores log(p / E) of all tokens, up to a constant of the row, and the tokens: [R, V]."""
    tokens_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    rows_R1 = torch.arange(len(logits_RV), device=logits_RV.device).unsqueeze(1)
    scores_RV = logits_RV - noise.of_members(rows_R1, *place_of(tokens_V)).log_()
    scores_RV.masked_fill_(logits_RV < floors_R.unsqueeze(1), -torch.inf)
    return scores_RV, tokens_V.expand_as(scores_RV)


def _best_of_blocks(tiles: Tiles, floors_R: Tensor, noise: RowNoise, blocks_R: Tensor) -> Tensor:
    """In one block of each row, the largest log(p / E) up to a constant of the row; float64 [R]."""
    rows_R = torch.arange(len(blocks_R), device=blocks_R.device)
    logits_RM = tiles.members(rows_R, blocks_R)
    members_M = torch.arange(MEMBERS, device=blocks_R.device)
    noise_RM = noise.of_members(rows_R.unsqueeze(1), blocks_R.unsqueeze(1), members_M)
    scores_RM = logits_RM - noise_RM.log_()
    return scores_RM.masked_fill_(logits_RM < floors_R.unsqueeze(1), -torch.inf).amax(dim=-1)


def _winners(scores_N: Tensor, rows_N: Tensor, tokens_N: Tensor, num_rows: int) -> Tensor:
    """Each row's token with the largest score, the first of equals."""
    most_R = scores_N.new_full((num_rows,), -torch.inf)
    most_R.scatter_reduce_(0, rows_N, scores_N, "amax")
    leading_N = tokens_N.masked_fill(scores_N < most_R[rows_N], _NO_TOKEN)
    winners_R = tokens_N.new_full((num_rows,), _NO_TOKEN)
    return winners_R.scatter_reduce_(0, rows_N, leading_N, "amin")
