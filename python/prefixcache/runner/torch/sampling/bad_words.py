"""Bad words: sequences of tokens that an answer may not hold.

The last token of a word is banned where the answer ends in the tokens before it. The host may not
know the last token yet: then the device compares it. Letters of shapes: N single logits, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixcache.runner.sampled_rows import ANY, last_tokens
from prefixcache.runner.torch.sampling.row_options import Later, SampledRow
from prefixcache.runner.torch.sampling.upload import Upload

_BANNED = -1e25
"""Less than any logit, and finite times the largest penalty over the smallest temperature.

So a banned token is chosen where nothing else may be, rather than none at all.
"""


@dataclass(frozen=True, slots=True)
class Bans:
    """Logits of tokens that would end a word.

    A ban holds where `previous_N` is the token that its row sampled last, or any.
    """

    rows_N: Tensor
    tokens_N: Tensor
    sampled_rows_N: Tensor  # of the step before
    previous_N: Tensor


class BadWords:
    """Remembers what the step before sampled, on the device, while rows have bad words."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._sampled_R: Tensor | None = None

    def add(self, upload: Upload, rows: Sequence[SampledRow]) -> Later[Bans | None]:
        """None when no row has a word that the next token may end."""
        matches = [
            (r, token, self._rows.get(row.request_id, 0), previous)
            for r, row in enumerate(rows)
            if row.params.bad_words_token_ids
            for token, previous in last_tokens(row.sampling, row.unread)
        ]
        if not matches:
            return lambda _sent: None
        fields = [upload.integers(column) for column in zip(*matches, strict=True)]
        return lambda sent: Bans(*(field(sent) for field in fields))

    def ban(self, logits_RV: Tensor, bans: Bans | None) -> Tensor:
        """The logits, changed in a copy of them."""
        if bans is None:
            return logits_RV
        holds_N = bans.previous_N == ANY
        if self._sampled_R is not None:
            holds_N |= self._sampled_R[bans.sampled_rows_N] == bans.previous_N
        values_N = torch.where(holds_N, _BANNED, 0.0)
        return logits_RV.index_put((bans.rows_N, bans.tokens_N), values_N, accumulate=True)

    def remember(self, rows: Sequence[SampledRow], tokens_R: Tensor) -> None:
        """Keeps the tokens that the rows sampled, if any of them has bad words."""
        self._rows = {
            row.request_id: r for r, row in enumerate(rows) if row.params.bad_words_token_ids
        }
        self._sampled_R = tokens_R if self._rows else None
