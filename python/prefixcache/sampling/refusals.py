"""Likeliest tokens that a grammar refuses, chosen once more among the tokens that it allows.

The likeliest of all tokens is the likeliest of those that a grammar allows whenever it is one of
them. To ask about one token takes a small part of the time in which all that may follow are found,
which is needed only where the choice is refused, once in four or five tokens. Of tokens that are
drawn every other one is refused: their masks are worked out beside the model and applied before.
Letters of shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.sampling.masks import Masks
from prefixcache.sampling.row_options import SampledRow
from prefixcache.step_plan import SequenceOutput


def rows_by_when_asked(rows: Sequence[SampledRow], *, waits: bool) -> tuple[list[int], list[int]]:
    """Rows whose masks are applied before they choose, and those whose masks are asked after.

    Without `waits` no choice can be looked at.
    """
    masked = [r for r, row in enumerate(rows) if row.sampling.mask is not None]
    after = [r for r in masked if waits and rows[r].params.greedy]
    return [r for r in masked if r not in after], after


def replace_refused(
    tokens_R: Tensor, logits_RV: Tensor, rows: Sequence[SampledRow], asked: Sequence[int]
) -> tuple[Tensor, Mapping[int, SequenceOutput]]:
    """The tokens, others in place of those that masks of rows `asked` refuse.

    `logits_RV`, on the host, are what the rows chose by. A row that cannot choose gets -1. Where a
    mask is not known the row's output comes beside the tokens.
    """
    chosen = tokens_R.tolist() if asked else []
    refused = [r for r in asked if chosen[r] >= 0 and not _allows(rows[r], chosen[r])]
    if not refused:
        return tokens_R, {}
    masks = Masks.of(rows, refused)
    for r, words in zip(masks.rows_N, masks.words, strict=True):
        chosen[r] = _likeliest(words, logits_RV[r].float().numpy())
    return torch.tensor(chosen), masks.unsampled


def _allows(row: SampledRow, token_id: int) -> bool:
    return row.sampling.mask is not None and row.sampling.mask.allows(token_id)


def _likeliest(words: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> int:
    """The first of equals among the tokens of a mask; -1 without a finite maximum."""
    token_ids = _token_ids(words)
    token_ids = token_ids[token_ids < len(logits)]
    if not len(token_ids):
        return -1
    best = int(token_ids[logits[token_ids].argmax()])
    return best if np.isfinite(logits[best]) else -1


def _token_ids(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The tokens of a mask, most often few, ascending."""
    used = np.flatnonzero(words)
    bits = np.flatnonzero(np.unpackbits(words[used].view(np.uint8), bitorder="little"))
    return used[bits // 32] * 32 + bits % 32
