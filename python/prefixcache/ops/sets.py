"""Which form of the ops a model runs on: plain torch, or rows that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from prefixcache._core import Cpu
from prefixcache.config.engine_config import Activations
from prefixcache.ops import activation, norm, rope
from prefixcache.ops.embedding import Embedding, TorchEmbedding
from prefixcache.ops.linear import Linear, TorchLinear
from prefixcache.ops.stack import LayerWeights

if TYPE_CHECKING:
    from prefixcache.ops.invariant import InvariantStack


class Ops(Protocol):
    """The arithmetic of a decoder layer, on tensors of one type on one device.

    Letters of shapes: T tokens, N heads, D head size, R = D / 2, I input and O output features.
    """

    dtype: torch.dtype
    device: torch.device

    def linear(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
    ) -> Linear:
        """Makes an unfilled layer.

        `parts` are the outputs of those projections, in order, that it is fused of: each may be
        written in another format.
        """
        ...

    def embedding(self, head: Linear | None, vocab_size: int, hidden_size: int) -> Embedding:
        """Makes an unfilled table; `head` is the layer tied to it, made by `linear`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        """Scales the last dimension to x / sqrt(mean(x^2) + eps), times `weight + offset`.

        `weight` has the shape of the last dimension, or of all but the first. With an offset the
        result is rounded once, after the scaling in float32.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, with the two halves side by side in the last dimension."""
        ...

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        """gelu_tanh(gate) * up, with the halves side by side as in `silu_and_mul`."""
        ...

    def apply_rope(self, x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
        """Rotates every head; returns [T, N, D]."""
        ...

    def stack(self, layers: Sequence[LayerWeights], eps: float) -> InvariantStack | None:
        """All layers in one call to the CPU's kernels, or None where there is no such kernel."""
        ...


class TorchOps:
    """Torch's own kernels, and the fused ones where the device has them.

    With `fixed_tiles`, which needs CUDA and triton, linears are those of `ops/triton_matmul.py`.
    """

    rms_norm = staticmethod(norm.rms_norm)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_tanh_and_mul = staticmethod(activation.gelu_tanh_and_mul)
    apply_rope = staticmethod(rope.apply_rope)

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, fixed_tiles: bool = False
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._linear = TorchLinear
        if fixed_tiles:
            from prefixcache.ops.triton_matmul import FixedTileLinear

            self._linear = FixedTileLinear

    def linear(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> TorchLinear:
        """Makes an unfilled layer with an unquantized weight, in whatever format its parts come."""
        bias_O = self._empty(outputs) if bias else None
        return self._linear(self._empty(outputs, inputs), bias_O)

    def embedding(self, head: Linear | None, vocab_size: int, hidden_size: int) -> TorchEmbedding:
        """Makes an unfilled, unquantized table: the weight of the head, if there is one."""
        if isinstance(head, TorchLinear):
            return TorchEmbedding(head.weight_OI, is_tied=True)
        return TorchEmbedding(self._empty(vocab_size, hidden_size), is_tied=False)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def stack(self, layers: Sequence[LayerWeights], eps: float) -> None:  # noqa: ARG002
        """Torch computes op by op."""
        return


def torch_is_faster() -> bool:
    """Whether torch's kernels beat those of `ops/invariant.py`: on a CPU with AMX."""
    return bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def make_ops(
    dtype: torch.dtype,
    device: torch.device,
    cpu: Cpu | None = None,
    activations: Activations = "exact",
) -> Ops:
    """The ops for a device; with `cpu`, those whose rows do not depend on the batch.

    `activations` is what those multiply quantized weights with; the others dequantize.

    Raises `ConfigError` where `cpu` is given for another device or for a type without kernels.
    """
    if cpu is None:
        return TorchOps(dtype, device)
    from prefixcache.ops.invariant import InvariantOps

    return InvariantOps(cpu, dtype, device, activations)
