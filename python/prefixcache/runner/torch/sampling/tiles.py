"""Logits in blocks of sixteen, so that most of a vocabulary is passed over at one look a block.

A tile is 16 x 64 tokens in a row of the vocabulary; its column is a block: sixteen tokens, 64
apart, so that vector instructions take the maxima of many blocks side by side. Letters of shapes: R
rows, V vocabulary, T tiles, M members of a block, L blocks of a tile, B blocks, N anything else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

MEMBERS = 16
BLOCKS = 64
TILE = MEMBERS * BLOCKS


class Tiles:
    """A batch of logits by block. Tokens past the vocabulary's end are minus infinity."""

    def __init__(self, logits_RV: Tensor) -> None:
        rows, vocab_size = logits_RV.shape
        missing = -vocab_size % TILE
        if missing:
            logits_RV = pad(logits_RV, (0, missing), value=-torch.inf)
        self._tiles_RTML = logits_RV.view(rows, -1, MEMBERS, BLOCKS)
        self.best_RB = self._tiles_RTML.amax(dim=2).view(rows, -1)

    def members(self, rows_N: Tensor, blocks_N: Tensor) -> Tensor:
        """Logits of the tokens of each block, [N, M]."""
        return self._tiles_RTML[rows_N, blocks_N // BLOCKS, :, blocks_N % BLOCKS]

    def largest(self, rows_N: Tensor, count: int) -> Tensor:
        """The `count` largest logits of each row, [N, count] from the largest on.

        None of them lies outside of the `count` blocks with the largest maxima.
        """
        num_blocks = self.best_RB.shape[1]
        if count >= num_blocks:
            logits_NV = self._tiles_RTML[rows_N].view(len(rows_N), -1)
            return logits_NV.sort(dim=-1, descending=True).values[:, :count]
        blocks_Nc = self.best_RB[rows_N].topk(count, dim=-1, sorted=False).indices
        rows_Nc = rows_N.unsqueeze(1).expand(-1, count)
        return self.members(rows_Nc, blocks_Nc).view(len(rows_N), -1).topk(count, dim=-1).values


def token_ids(blocks_N: Tensor, members_N: Tensor) -> Tensor:
    """The token that is the given member of the given block."""
    return blocks_N // BLOCKS * TILE + members_N * BLOCKS + blocks_N % BLOCKS


def place_of(tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """The block of each token, and which of its members it is."""
    return tokens_N // TILE * BLOCKS + tokens_N % BLOCKS, tokens_N % TILE // BLOCKS
