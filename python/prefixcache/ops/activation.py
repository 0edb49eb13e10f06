"""Gated activation of the MLP.

SiLU is written out with exp: torch's own kernels for it compute the elements of a vector and those
left over at the end of a row by different code, so their last bits depend on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.ops.cuda import fused_kernels


def silu(x: Tensor) -> Tensor:
    """X / (1 + exp(-x)), in float32, rounded to the type of `x`."""
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with the two halves side by side in the last dimension."""
    if (fused := fused_kernels(gate_up)) is not None:
        return fused.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
