"""Gated activations of the MLP.

They are written out with exp: torch's own kernels compute the elements of a vector and those left
over at the end of a row by different code, so their last bits depend on the number of rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prefixcache.runner.torch.ops.cuda import fused_kernels

# (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)) with 2u = GELU_SLOPE * (x + GELU_CUBE * x^3).
GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715


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


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU (Hendrycks and Gimpel, 2016) with tanh for erf, in float32, in the type of `x`.

    Since (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), it is a SiLU with another argument of exp.
    """
    wide = x.float()
    inner = GELU_SLOPE * (wide + GELU_CUBE * (wide * wide * wide))
    return (wide / (1.0 + torch.exp(-inner))).to(x.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up, with the two halves side by side in the last dimension."""
    if (fused := fused_kernels(gate_up)) is not None:
        return fused.gelu_tanh_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


_SWIGLU_SLOPE, _SWIGLU_LIMIT = 1.702, 7.0


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Computes gate / (1 + exp(-1.702 gate)) * (up + 1), gate up to 7 and up within -7 and 7.

    In float32, rounded to the type of `gate_up`. The two halves are side by side.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=_SWIGLU_LIMIT), up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    return (gate / (1.0 + torch.exp(-_SWIGLU_SLOPE * gate)) * (up + 1.0)).to(gate_up.dtype)
