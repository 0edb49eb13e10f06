"""Linear layers: y = x W^T + b.

A layer owns its weight in whatever form its kernel reads fastest, so that callers never see the
weight's layout: rows are written with `copy_rows`, once at load and again whenever weights are
replaced, and the fused projections write each of their parts at its own row.

Letters of shapes: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.models.arrays import Array
from prefixcache.models.quantized import QuantizedTensor
from prefixcache.runner.torch.ops.arrays import dtype_name, tensor_of


class TorchLinear:
    """A dense weight, `weight_OI`, and torch's own matmul. It is undefined until it was written."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.dtype_name = dtype_name(weight_OI.dtype)
        self.weight_OI = weight_OI
        self._bias_O = bias_O

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight_OI.nbytes + (0 if self._bias_O is None else self._bias_O.nbytes)

    def kept_format(self, start: int) -> str:  # noqa: ARG002
        """The type of the weight."""
        return self.dtype_name

    @torch.inference_mode()
    def copy_rows(self, start: int, weight_OI: Array | Tensor) -> None:
        """Writes output rows `start:start + O` of the weight, converting their type."""
        self.weight_OI[start : start + weight_OI.shape[0]].copy_(tensor_of(weight_OI))

    def copy_blocks(self, start: int, weight_OI: QuantizedTensor) -> None:
        """Writes output rows `start:start + O` of the weight: the dense numbers of the blocks."""
        for first, rows in weight_OI.float32_rows():
            self.copy_rows(start + first, rows)

    @torch.inference_mode()
    def copy_bias(self, start: int, bias_O: Array | Tensor) -> None:
        """Writes elements `start:start + O` of the bias."""
        if self._bias_O is None:
            raise ValueError("this linear has no bias")
        self._bias_O[start : start + bias_O.shape[0]].copy_(tensor_of(bias_O))

    def __call__(self, x_TI: Tensor, residual_TO: Tensor | None = None) -> Tensor:
        """Returns [T, O]. The residual is used up.

        The matmul itself adds to it, in its place, before rounding.
        """
        if residual_TO is None:
            return F.linear(x_TI, self.weight_OI, self._bias_O)
        if self._bias_O is not None:
            residual_TO += self._bias_O
        return residual_TO.addmm_(x_TI, self.weight_OI.T)

    def read_rows(self, ids_T: Tensor) -> Tensor:
        """Returns the rows [T, I] of the weight that these numbers of outputs name, a copy."""
        return F.embedding(ids_T, self.weight_OI)

    def wide(self, x_TI: Tensor) -> Tensor:
        """Returns [T, O] as torch's matmul rounds it."""
        return self(x_TI)

    def block(self, number: int, count: int, x_TI: Tensor) -> Tensor:
        """Returns [T, O / count]: the outputs of block `number` of `count`."""
        bias_O = None if self._bias_O is None else self._bias_O.chunk(count)[number]
        return F.linear(x_TI, self.weight_OI.chunk(count)[number], bias_O)
