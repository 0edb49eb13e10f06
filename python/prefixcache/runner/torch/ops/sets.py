"""The ops that a model runs on: torch's own, and the fused ones where the device has them."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.models.decoder.shapes import LinearShape
from prefixcache.runner.torch.ops import activation, norm, rope
from prefixcache.runner.torch.ops.linear import TorchLinear


class Ops:
    """The arithmetic of a decoder layer, on tensors of one type on one device."""

    rms_norm = staticmethod(norm.rms_norm)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_tanh_and_mul = staticmethod(activation.gelu_tanh_and_mul)
    clamped_swiglu = staticmethod(activation.clamped_swiglu)
    apply_rope = staticmethod(rope.apply_rope)

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def linear(self, shape: LinearShape) -> TorchLinear:
        """Makes an unfilled layer with an unquantized weight, in whatever format its parts come."""
        bias_O = self.empty(shape.outputs) if shape.bias else None
        return TorchLinear(self.empty(shape.outputs, shape.inputs), bias_O)

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
