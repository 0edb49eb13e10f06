"""What the runner needs of a model. Letters of shapes: T tokens, R rows, E hidden, V vocabulary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from prefixcache.runner.cuda.attention.grouped import GroupedAttention


class Decoder(Protocol):
    """A model of `models/loader.py`."""

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attention: GroupedAttention, /
    ) -> Tensor:
        """Hidden states [T, E]."""
        ...

    def compute_logits(self, hidden_RE: Tensor, /) -> Tensor:
        """Logits [R, V], float32 or in the model's type."""
        ...
