"""Rotary position embedding (Su et al., 2021), from the float32 tables of `models/rope.py`.

Letters of shapes: T tokens, N heads, D head size, R rotated pairs, D / 2 or fewer. A pair is made
of elements r and r + R of a head, as Hugging Face checkpoints have it; others are not rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.config.rope_config import RopeConfig
from prefixcache.models.rope import Rotation
from prefixcache.runner.torch.ops.cuda import fused_kernels
from prefixcache.runner.torch.typed import from_numpy


class RotaryEmbedding:
    """Cosines and sines of every position, computed once: a position always gets the same bits."""

    def __init__(
        self,
        rotation: Rotation | RopeConfig,
        rotary_dim: int,
        max_positions: int,
        device: torch.device,
    ) -> None:
        if isinstance(rotation, RopeConfig):
            rotation = Rotation(rotation)
        tables = rotation.tables(rotary_dim, max_positions)
        self._cos_PR, self._sin_PR = (from_numpy(table).to(device) for table in tables)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the given positions: two float32 tensors [T, 1, R]."""
        return self._cos_PR[positions_T].unsqueeze(1), self._sin_PR[positions_T].unsqueeze(1)


def apply_rope(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotates every head, in float32; returns [T, N, D] in the type of `x_TND`."""
    turned = 2 * cos_T1R.shape[-1]
    if turned == x_TND.shape[-1] and (fused := fused_kernels(x_TND)) is not None:
        return fused.apply_rope(x_TND, cos_T1R, sin_T1R)
    first, second = x_TND[..., :turned].float().chunk(2, dim=-1)
    rotated = (first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R)
    both = torch.cat(rotated, dim=-1).to(x_TND.dtype)
    return torch.cat((both, x_TND[..., turned:]), dim=-1)
