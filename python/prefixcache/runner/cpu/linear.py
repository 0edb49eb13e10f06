"""Linear layers and tables of embeddings over packed weights.

Each output of a linear is one chain of additions along the input features, however many rows are
computed with it. Letters of shapes: T tokens, I input features, O output features, E hidden size, V
vocabulary.
"""

from __future__ import annotations

from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from prefixcache._core import Cpu, PackedLinear
from prefixcache.config.engine_config import Activations
from prefixcache.models.arrays import DTYPES, Array, dense, new_array
from prefixcache.models.decoder.shapes import LinearShape
from prefixcache.models.quantized import QuantFormat, QuantizedTensor

KernelDType = Literal["bfloat16", "float32"]


def address(array: Array) -> int:
    """Where the array's memory begins."""
    return array.__array_interface__["data"][0]


class CpuLinear:
    """One linear layer, whose weight is packed for the kernels; parts of it may be quant blocks.

    With activations "int8", those are multiplied with rows quantized to eight bits. `packed` is the
    kernel's own object.
    """

    def __init__(
        self,
        cpu: Cpu,
        dtype: KernelDType,
        shape: LinearShape,
        activations: Activations = "exact",
    ) -> None:
        self.in_features = shape.inputs
        self.out_features = shape.outputs
        self.dtype_name = dtype
        self._dtype = DTYPES[dtype]
        self.packed = PackedLinear(
            cpu,
            shape.inputs,
            shape.outputs,
            dtype,
            bias=shape.bias,
            parts=list(shape.parts.values()),
            activations=activations,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias as they are kept."""
        return self.packed.num_bytes

    def kept_format(self, start: int) -> str:
        """See `WritableLinear`."""
        return self.packed.format_at(start)

    def copy_rows(self, start: int, weight_OI: Array) -> None:
        """See `WritableLinear`."""
        self._check_columns(weight_OI.shape)
        rows = dense(weight_OI, self._dtype)
        self.packed.copy_rows(start, address(rows), len(rows))

    def copy_blocks(self, start: int, weight_OI: QuantizedTensor) -> None:
        """See `WritableLinear`."""
        self._check_columns(weight_OI.shape)
        blocks = np.ascontiguousarray(weight_OI.blocks)
        quant_format = cast("QuantFormat", weight_OI.format)
        self.packed.copy_blocks(start, address(blocks), len(blocks), quant_format)

    def copy_bias(self, start: int, bias_O: Array) -> None:
        """See `WritableLinear`."""
        numbers = dense(bias_O, self._dtype)
        self.packed.copy_bias(start, address(numbers), len(numbers))

    def read_rows(self, ids_T: npt.NDArray[np.int64]) -> Array:
        """Returns the rows [T, I] of the weight that these numbers of outputs name."""
        ids_T = np.ascontiguousarray(ids_T, np.int64)
        out_TI = np.empty((len(ids_T), self.in_features), self._dtype)
        self.packed.read_rows(address(ids_T), len(ids_T), address(out_TI))
        return out_TI

    def __call__(self, x_TI: Array, residual_TO: Array | None = None) -> Array:
        """Returns [T, O] in the type of `x_TI`; the residual is added before rounding."""
        out_TO = np.empty((len(x_TI), self.out_features), self._dtype)
        if residual_TO is not None and not _is_dense(residual_TO, self._dtype, out_TO.shape):
            raise ValueError(f"residual_TO must be dense {self._dtype} {list(out_TO.shape)}")
        residual = 0 if residual_TO is None else address(residual_TO)
        self._forward(x_TI, address(out_TO), residual, wide_out=False)
        return out_TO

    def wide(self, x_TI: Array, out_TO: npt.NDArray[np.float32]) -> None:
        """Writes [T, O] in float32, not rounded to the type of `x_TI`."""
        if not _is_dense(out_TO, np.dtype(np.float32), (len(x_TI), self.out_features)):
            raise ValueError(f"out_TO must be dense float32 [{len(x_TI)}, {self.out_features}]")
        self._forward(x_TI, address(out_TO), 0, wide_out=True)

    def _forward(self, x_TI: Array, out: int, residual: int, *, wide_out: bool) -> None:
        if not _is_dense(x_TI, self._dtype, (len(x_TI), self.in_features)):
            raise ValueError(f"x_TI must be dense {self._dtype} [T, {self.in_features}]")
        rows = len(x_TI)
        self.packed.forward(address(x_TI), rows, self.in_features, out, residual, wide_out=wide_out)

    def _check_columns(self, shape: tuple[int, ...]) -> None:
        if shape[1] != self.in_features:
            raise ValueError(f"weight_OI must have {self.in_features} columns")


class CpuEmbedding:
    """A table of embeddings, dense or in quant blocks, whichever it was written as last.

    A tied head has the only copy, packed for its kernel, out of which rows are read. Without one,
    quantized weights are kept as a linear keeps them, and dense ones as rows.
    """

    def __init__(
        self,
        cpu: Cpu,
        dtype: KernelDType,
        shape: LinearShape,
        head: CpuLinear | None,
    ) -> None:
        self._dtype = DTYPES[dtype]
        self._make_table = lambda: CpuLinear(cpu, dtype, shape)
        self._head = head
        self._table = head or self._make_table()
        self._dense_VE: Array | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the table as it is kept, without that of a head."""
        kept = 0 if self._dense_VE is None else self._dense_VE.nbytes
        return kept + (self._table.num_bytes if self._head is None else 0)

    def kept_format(self) -> str:
        """How the table is kept: a type, or a quantized format."""
        return self._table.kept_format(0) if self._dense_VE is None else self._dtype.name

    def packed(self) -> tuple[PackedLinear, int] | None:
        """The table in a layer of the kernels, and its first output; None where it is rows."""
        return (self._table.packed, 0) if self._dense_VE is None else None

    def write(self, weight_VE: Array | QuantizedTensor) -> None:
        """Writes all of the table, and of the head tied to it.

        Raises `ValueError` where a scale is not a finite number.
        """
        if isinstance(weight_VE, QuantizedTensor):
            self._table.copy_blocks(0, weight_VE)
            self._dense_VE = None
        elif self._head is not None:
            self._head.copy_rows(0, weight_VE)
        else:
            self._table = self._make_table()
            if self._dense_VE is None:
                self._dense_VE = new_array(weight_VE.shape, self._dtype)
            self._dense_VE[...] = weight_VE

    def __call__(self, ids_T: npt.NDArray[np.int64]) -> Array:
        """Returns the rows [T, E] of these tokens, in memory of their own."""
        return self._table.read_rows(ids_T) if self._dense_VE is None else self._dense_VE[ids_T]


def _is_dense(array: Array, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bool:
    return array.dtype == dtype and array.shape == shape and array.flags.c_contiguous
