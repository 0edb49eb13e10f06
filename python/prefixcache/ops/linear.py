"""Linear layers: y = x W^T + b, behind one protocol.

A layer owns its weight in whatever form its kernel reads fastest, so that callers never see the
weight's layout: rows are written with `copy_rows`, once at load and again whenever weights are
replaced, and the fused projections write each of their parts at its own row.

Letters of shapes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.ops.quantized import QuantizedTensor


def dtype_name(dtype: torch.dtype) -> str:
    """As users write it: bfloat16."""
    return str(dtype).removeprefix("torch.")


class Linear(Protocol):
    """One linear layer. Its weight is undefined until every row was written."""

    in_features: int
    out_features: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias as they are kept."""
        ...

    def kept_format(self, start: int) -> str:
        """How the part of the weight that begins at row `start` is kept: a type, or of blocks."""
        ...

    def copy_rows(self, start: int, weight_OI: Tensor) -> None:
        """Writes output rows `start:start + O` of the weight, converting their type."""
        ...

    def copy_blocks(self, start: int, weight_OI: QuantizedTensor) -> None:
        """Writes output rows `start:start + O` of the weight, a whole part of it, from blocks.

        The layer computes as with the numbers that they stand for, rounded once to its type. Raises
        `ValueError` where a scale is no finite number.
        """
        ...

    def copy_bias(self, start: int, bias_O: Tensor) -> None:
        """Writes elements `start:start + O` of the bias."""
        ...

    def __call__(self, x_TI: Tensor, residual_TO: Tensor | None = None) -> Tensor:
        """Returns [T, O], the residual added, in the type of `x_TI`.

        The residual, of the same type, is used up: the result may take its memory.
        """
        ...

    def wide(self, x_TI: Tensor) -> Tensor:
        """Returns [T, O] in float32, or in the type of `x_TI` if the kernel has rounded to it."""
        ...


class TorchLinear:
    """The plain form: a dense weight, `weight_OI`, and torch's own matmul."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.dtype = weight_OI.dtype
        self.weight_OI = weight_OI
        self._bias_O = bias_O

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight_OI.nbytes + (0 if self._bias_O is None else self._bias_O.nbytes)

    def kept_format(self, start: int) -> str:  # noqa: ARG002
        """The type of the weight."""
        return dtype_name(self.dtype)

    def copy_rows(self, start: int, weight_OI: Tensor) -> None:
        """Writes output rows `start:start + O` of the weight, converting their type."""
        self.weight_OI[start : start + weight_OI.shape[0]].copy_(weight_OI)

    def copy_blocks(self, start: int, weight_OI: QuantizedTensor) -> None:
        """Writes output rows `start:start + O` of the weight: the dense numbers of the blocks."""
        weight_OI.dequantize_into(self.weight_OI[start : start + weight_OI.shape[0]])

    def copy_bias(self, start: int, bias_O: Tensor) -> None:
        """Writes elements `start:start + O` of the bias."""
        if self._bias_O is None:
            raise ValueError("this linear has no bias")
        self._bias_O[start : start + bias_O.shape[0]].copy_(bias_O)

    def __call__(self, x_TI: Tensor, residual_TO: Tensor | None = None) -> Tensor:
        """Returns [T, O]; the matmul itself adds to the residual, in its place, before rounding."""
        if residual_TO is None:
            return F.linear(x_TI, self.weight_OI, self._bias_O)
        if self._bias_O is not None:
            residual_TO += self._bias_O
        return residual_TO.addmm_(x_TI, self.weight_OI.T)

    def wide(self, x_TI: Tensor) -> Tensor:
        """Returns [T, O] as torch's matmul rounds it."""
        return self(x_TI)
