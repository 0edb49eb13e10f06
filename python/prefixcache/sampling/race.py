"""Draws tokens by an exponential race: the token with the largest p / E wins it.

E are standard exponential variables; in law the same as adding Gumbel noise to the logits. Most
tokens cannot win, and a bound for sixteen of them at once shows it, so that the noise of a few is
all that is computed; who wins is the same. Letters of shapes as in `tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.sampling.noise import RowNoise
from prefixcache.sampling.tiles import Tiles, token_ids


def race(tiles: Tiles, floors_R: Tensor, noise: RowNoise) -> list[int]:
    """The winner of each row among the tokens whose logits are at least its floor.

    No logit is infinite but downwards, and each row has one that is finite and not below its floor.
    """
    best_RB, floors_R1 = tiles.best_RB, floors_R.unsqueeze(1)
    bounds_RB = best_RB.double() - noise.least_of_blocks(best_RB.shape[1]).log_()
    bounds_RB.masked_fill_(best_RB < floors_R1, -torch.inf)
    promising_R = bounds_RB.argmax(dim=-1)
    rows_R = torch.arange(len(promising_R), device=best_RB.device)
    reached_R = _scores(tiles, floors_R, noise, rows_R, promising_R).amax(dim=-1)
    may_win_RB = bounds_RB >= reached_R.unsqueeze(1)
    may_win_RB[rows_R, promising_R] = True
    rows_N, blocks_N = may_win_RB.nonzero(as_tuple=True)
    scores_NM = _scores(tiles, floors_R, noise, rows_N, blocks_N)
    return _winners(scores_NM, rows_N, token_ids(blocks_N), len(promising_R))


def _scores(
    tiles: Tiles, floors_R: Tensor, noise: RowNoise, rows_N: Tensor, blocks_N: Tensor
) -> Tensor:
    """log(p / E) up to a constant of the row, for the members of each block [N, M]."""
    logits_NM = tiles.members(rows_N, blocks_N)
    noise_NM = noise.of_tokens(rows_N.unsqueeze(1), token_ids(blocks_N))
    scores_NM = logits_NM.double() - noise_NM.log_()
    return scores_NM.masked_fill_(logits_NM < floors_R[rows_N].unsqueeze(1), -torch.inf)


def _winners(scores_NM: Tensor, rows_N: Tensor, tokens_NM: Tensor, num_rows: int) -> list[int]:
    """Each row's token with the largest score, the first of equals."""
    most_R = scores_NM.new_full((num_rows,), -torch.inf)
    most_R.scatter_reduce_(0, rows_N, scores_NM.amax(dim=1), "amax")
    is_behind_NM = scores_NM < most_R[rows_N].unsqueeze(1)
    last = torch.iinfo(torch.int64).max
    first_N = tokens_NM.masked_fill(is_behind_NM, last).amin(dim=1)
    winners_R = first_N.new_full((num_rows,), last)
    return winners_R.scatter_reduce_(0, rows_N, first_N, "amin").tolist()
