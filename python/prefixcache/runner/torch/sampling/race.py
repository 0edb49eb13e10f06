"""Draws tokens by an exponential race: the token with the largest p / E wins it.

E are standard exponential variables; in law the same as adding Gumbel noise to the logits. The
noise of all tokens is computed, in one kernel where triton is installed: most cannot win, as the
CPU's sampler uses, but how many can decides shapes, for which a GPU's work would have to be waited
for. Letters of shapes as in `tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.runner.torch.ops.cuda import fused_kernels
from prefixcache.runner.torch.sampling.noise import RowNoise
from prefixcache.runner.torch.sampling.tiles import place_of

_NO_TOKEN = torch.iinfo(torch.int64).max


def race(logits_RV: Tensor, floors_R: Tensor, noise: RowNoise) -> Tensor:
    """The winner of each row among the tokens whose logits are at least its floor, int64 [R].

    The first of equals. Rows with a logit of plus infinity, or with no finite one that is not below
    the floor, get any token, 0 or larger.
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
