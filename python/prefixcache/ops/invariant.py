"""Ops on the CPU whose rows do not depend on the batch.

The promise: a request's tokens and their log probabilities are the same bits whether its prompt was
found in the cache or computed, in one step or in chunks, alone or among others, before or after a
preemption. It holds if every op obeys this rule:

    A row of the result is a function of that row of the input alone, bit for bit: not of the number
    of rows, of the row's place among them, of what stands in the others, or of how the work is
    split over threads. What attention reads of other rows, it reads from the KV cache, by position.

A sum of floating-point numbers depends on its order, so the rule is about the order of additions:

- A linear adds each output along the input features, one after the other, however many rows are
  computed with it. torch's own (`F.linear`, packed or not) changes its blocking with that number.
- A linear that quantizes its activations (`--cpu-activations int8`) does so block by block of a
  row, and adds the blocks' integer sums, which are exact, in their order.
- A norm adds the squares of a row in an order that depends on the row's width alone.
- Attention meets keys in tiles aligned to the sequence's first token (`attention/cpu.py`).
- Element by element there is nothing to add, but a function must be the same for the elements of
  a vector and those left over at a row's end. torch's `silu`, `sigmoid` and `gelu` are not; our own
  kernels compute leftovers with the vector's instructions. Copies, lookups, +, * and / are safe.

The kernels are in Rust (`rust/prefixcache-ops`, `rust/prefixcache-attention`), checked there
against float64 and against themselves, one row alone against many. On whole models,
`tests/property/test_invariance.py` checks the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache._core import Cpu, DecoderLayer, DecoderStack, PackedLinear, PagedAttention, RowOps
from prefixcache.config.engine_config import Activations
from prefixcache.exceptions import ConfigError
from prefixcache.ops.linear import Linear, dtype_name
from prefixcache.ops.quantized import QuantFormat, QuantizedTensor
from prefixcache.ops.stack import LayerWeights

_DTYPES: dict[torch.dtype, Literal["bfloat16", "float32"]] = {
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


def kernel_dtype(dtype: torch.dtype) -> Literal["bfloat16", "float32"]:
    """The kernels' name of a type. Raises `ConfigError` for a type that they do not compute."""
    name = _DTYPES.get(dtype)
    if name is None:
        raise ConfigError(f"The CPU's kernels compute bfloat16 and float32, not {dtype}.")
    return name


class InvariantLinear:
    """A linear layer over a packed weight; each output is one chain of additions.

    With activations "int8", weights in blocks are multiplied with rows quantized to eight bits.

    `packed` is the kernel's own object.
    """

    def __init__(
        self,
        cpu: Cpu,
        dtype: torch.dtype,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
        activations: Activations = "exact",
    ) -> None:
        self.in_features = inputs
        self.out_features = outputs
        self.dtype = dtype
        self._starts = list(accumulate(parts or [], initial=0))
        self.packed = PackedLinear(
            cpu,
            inputs,
            outputs,
            kernel_dtype(dtype),
            bias=bias,
            parts=parts,
            activations=activations,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias as they are kept."""
        return self.packed.num_bytes

    def kept_format(self, start: int) -> str:
        """How the part of the weight that begins at row `start` is kept."""
        return self.packed.formats[self._starts.index(start)]

    def copy_rows(self, start: int, weight_OI: Tensor) -> None:
        """Writes output rows `start:start + O` of the weight, converting their type."""
        if weight_OI.shape[1] != self.in_features:
            raise ValueError(f"weight_OI must have {self.in_features} columns")
        dense = weight_OI.to("cpu", self.dtype).contiguous()
        self.packed.copy_rows(start, dense.data_ptr(), len(dense))

    def copy_blocks(self, start: int, weight_OI: QuantizedTensor) -> None:
        """Writes output rows `start:start + O` of the weight, a whole part, which stays in blocks.

        Raises `ValueError` where the rows are no part, or a scale is no finite number.
        """
        if weight_OI.shape[1] != self.in_features:
            raise ValueError(f"weight_OI must have {self.in_features} columns")
        blocks = weight_OI.blocks.contiguous()
        quant_format = cast("QuantFormat", weight_OI.format)
        self.packed.copy_blocks(start, blocks.data_ptr(), len(blocks), quant_format)

    def read_rows(self, ids_T: Tensor) -> Tensor:
        """Returns the rows [T, I] of the weight that these numbers of outputs name."""
        ids_T = ids_T.to(torch.int64).contiguous()
        out_TI = torch.empty(len(ids_T), self.in_features, dtype=self.dtype)
        self.packed.read_rows(ids_T.data_ptr(), len(ids_T), out_TI.data_ptr())
        return out_TI

    def copy_bias(self, start: int, bias_O: Tensor) -> None:
        """Writes elements `start:start + O` of the bias."""
        dense = bias_O.to("cpu", self.dtype).contiguous()
        self.packed.copy_bias(start, dense.data_ptr(), len(dense))

    def __call__(self, x_TI: Tensor, residual_TO: Tensor | None = None) -> Tensor:
        """Returns [T, O] in the type of `x_TI`; the residual is added before rounding."""
        out_TO = x_TI.new_empty(x_TI.shape[0], self.out_features)
        self._forward(x_TI, residual_TO, out_TO, wide_out=False)
        return out_TO

    def wide(self, x_TI: Tensor) -> Tensor:
        """Returns [T, O] in float32, not rounded to the type of `x_TI`."""
        out_TO = x_TI.new_empty(x_TI.shape[0], self.out_features, dtype=torch.float32)
        self._forward(x_TI, None, out_TO, wide_out=True)
        return out_TO

    def _forward(
        self, x_TI: Tensor, residual_TO: Tensor | None, out_TO: Tensor, *, wide_out: bool
    ) -> None:
        if x_TI.dtype is not self.dtype or x_TI.shape[1] != self.in_features:
            raise ValueError(f"x_TI must be {self.dtype} [T, {self.in_features}]")
        x_TI = _dense_rows(x_TI)
        residual = 0
        if residual_TO is not None:
            if residual_TO.dtype is not out_TO.dtype or residual_TO.shape != out_TO.shape:
                raise ValueError("residual_TO must have the shape and type of the result")
            residual_TO = residual_TO.contiguous()
            residual = residual_TO.data_ptr()
        self.packed.forward(
            x_TI.data_ptr(),
            x_TI.shape[0],
            x_TI.stride(0),
            out_TO.data_ptr(),
            residual,
            wide_out=wide_out,
        )


class InvariantEmbedding:
    """A table of embeddings, dense or in blocks, whichever it was written as last.

    A tied head has the only copy, packed for its kernel, out of which rows are read. Without one,
    quantized weights are kept as a linear keeps them, and dense ones as rows.
    """

    def __init__(
        self, head: InvariantLinear | None, make_table: Callable[[], InvariantLinear]
    ) -> None:
        self._head = head
        self._make_table = make_table
        self._table = head or make_table()
        self._dense_VE: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the table as it is kept, without that of a head."""
        dense = 0 if self._dense_VE is None else self._dense_VE.nbytes
        return dense + (self._table.num_bytes if self._head is None else 0)

    def kept_format(self) -> str:
        """How the table is kept."""
        is_dense = self._dense_VE is not None
        return dtype_name(self._table.dtype) if is_dense else self._table.kept_format(0)

    def write(self, weight_VE: Tensor | QuantizedTensor) -> None:
        """Writes all of the table, and of the head tied to it."""
        if isinstance(weight_VE, QuantizedTensor):
            self._table.copy_blocks(0, weight_VE)
            self._dense_VE = None
            return
        if self._head is not None:
            self._head.copy_rows(0, weight_VE)
            return
        self._table = self._make_table()
        if self._dense_VE is None:
            self._dense_VE = torch.empty(weight_VE.shape, dtype=self._table.dtype)
        self._dense_VE.copy_(weight_VE)

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Returns the rows [T, E] of these tokens."""
        if self._dense_VE is not None:
            return F.embedding(ids_T, self._dense_VE)
        return self._table.read_rows(ids_T)


class InvariantStack:
    """The layers of a decoder in one call: the same kernels in the same order, the same bits.

    Between two kernels there is no Python, which at a few rows takes as long as a small kernel.
    """

    def __init__(
        self, cpu: Cpu, dtype: torch.dtype, layers: Sequence[LayerWeights], eps: float
    ) -> None:
        self.dtype = dtype
        self.hidden_size = layers[0].qkv.in_features
        # The kernel has only the addresses of norms; this keeps them.
        self._layers = tuple(layers)
        self._kernel = DecoderStack(
            cpu, kernel_dtype(dtype), self.hidden_size, eps, [_kernel_layer(w) for w in layers]
        )

    def __call__(
        self,
        x_TE: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        kernels: Sequence[PagedAttention],
        layer_groups: Sequence[int],
        kv_layers: Sequence[Tensor],
    ) -> None:
        """Takes `x_TE`, dense, through all layers in place.

        Layer i attends with `kernels[layer_groups[i]]` over `kv_layers[i]`; the kernels, one a
        group, are planned for the rows of `x_TE`. A rotation holds cosines and sines of the rows'
        positions, [T, 1, D / 2].
        """
        wanted = (x_TE.shape[0], 1, kv_layers[0].shape[-1] // 2)
        for cos_T1R, sin_T1R in rotations:
            _check_angles(cos_T1R, wanted)
            _check_angles(sin_T1R, wanted)
        dense = x_TE.is_contiguous() and x_TE.is_cpu and x_TE.dtype is self.dtype
        if not dense or x_TE.shape[1] != self.hidden_size:
            raise ValueError(f"x_TE must be dense {self.dtype} [T, {self.hidden_size}]")
        self._kernel.forward(
            list(kernels),
            list(layer_groups),
            [kv.data_ptr() for kv in kv_layers],
            [(cos_T1R.data_ptr(), sin_T1R.data_ptr()) for cos_T1R, sin_T1R in rotations],
            x_TE.data_ptr(),
        )


def _kernel_layer(weights: LayerWeights) -> DecoderLayer:
    return DecoderLayer(
        input_norm=weights.input_norm_E.data_ptr(),
        qkv=_packed(weights.qkv),
        qk_norm=_address(weights.qk_norm_HKD),
        out=_packed(weights.out),
        attention_out_norm=_address(weights.attention_out_norm_E),
        mlp_norm=weights.mlp_norm_E.data_ptr(),
        gate_up=_packed(weights.gate_up),
        gate=weights.activation,
        down=_packed(weights.down),
        mlp_out_norm=_address(weights.mlp_out_norm_E),
        norm_offset=weights.norm_offset,
        rope=weights.rope,
    )


def _address(norm: Tensor | None) -> int | None:
    return None if norm is None else norm.data_ptr()


def _packed(linear: Linear) -> PackedLinear:
    if not isinstance(linear, InvariantLinear):
        raise TypeError(f"a stack is made of packed linears, not of {type(linear).__name__}")
    return linear.packed


class InvariantOps:
    """The ops of a decoder layer that obey the rule above; see `ops/sets.py` for what they do."""

    def __init__(
        self,
        cpu: Cpu,
        dtype: torch.dtype,
        device: torch.device,
        activations: Activations = "exact",
    ) -> None:
        if device.type != "cpu":
            raise ConfigError(f"The CPU's kernels cannot compute on {device}.")
        self.dtype = dtype
        self.device = device
        self._cpu = cpu
        self._activations: Activations = activations
        self._rows = RowOps(cpu, kernel_dtype(dtype))

    def linear(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
    ) -> InvariantLinear:
        """Makes an unfilled layer."""
        return InvariantLinear(
            self._cpu,
            self.dtype,
            inputs,
            outputs,
            bias=bias,
            parts=parts,
            activations=self._activations,
        )

    def embedding(
        self, head: Linear | None, vocab_size: int, hidden_size: int
    ) -> InvariantEmbedding:
        """Makes an unfilled table, which takes no memory until it is written."""
        tied = head if isinstance(head, InvariantLinear) else None
        return InvariantEmbedding(tied, lambda: self.linear(hidden_size, vocab_size))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        """Normalises the last dimension, rounding once, after the scaling."""
        self._check(x, weight)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = _dense_rows(x)
        self._rows.rms_norm(
            rows.data_ptr(),
            rows.shape[0],
            rows.shape[1],
            rows.stride(0),
            weight.contiguous().data_ptr(),
            weight.numel(),
            x.shape[-1],
            eps,
            out.data_ptr(),
            offset=offset,
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for rows of gate and up, rounded once."""
        return self._gated("silu", gate_up)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        """gelu_tanh(gate) * up for rows of gate and up, rounded once."""
        return self._gated("gelu_tanh", gate_up)

    def _gated(self, gate: Literal["silu", "gelu_tanh"], gate_up: Tensor) -> Tensor:
        self._check(gate_up)
        rows = _dense_rows(gate_up)
        width = rows.shape[1] // 2
        out = rows.new_empty(rows.shape[0], width)
        self._rows.gated(
            gate, rows.data_ptr(), rows.shape[0], width, rows.stride(0), out.data_ptr()
        )
        return out

    def apply_rope(self, x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
        """Rotates every head, in float32; returns [T, N, D]."""
        self._check(x_TND)
        wanted = (x_TND.shape[0], 1, x_TND.shape[2] // 2)
        _check_angles(cos_T1R, wanted)
        _check_angles(sin_T1R, wanted)
        out_TND = torch.empty_like(x_TND, memory_format=torch.contiguous_format)
        rows = _dense_rows(x_TND)
        self._rows.rotate(
            cos_T1R.data_ptr(),
            sin_T1R.data_ptr(),
            cos_T1R.shape[-1],
            rows.data_ptr(),
            rows.shape[0],
            rows.shape[1],
            rows.stride(0),
            out_TND.data_ptr(),
        )
        return out_TND

    def stack(self, layers: Sequence[LayerWeights], eps: float) -> InvariantStack:
        """All layers in one call."""
        return InvariantStack(self._cpu, self.dtype, layers, eps)

    def _check(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.dtype is not self.dtype or not tensor.is_cpu:
                raise ValueError(f"a tensor must be {self.dtype} on the CPU, not {tensor.dtype}")


def _dense_rows(x: Tensor) -> Tensor:
    """A view [rows, numbers of a row] whose rows are dense; a copy where there is none."""
    rows = x if x.dim() == 2 else x.flatten(1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _check_angles(angles_T1R: Tensor, wanted: tuple[int, int, int]) -> None:
    if angles_T1R.shape != wanted or angles_T1R.dtype is not torch.float32:
        raise ValueError(f"angles must be float32 {list(wanted)}")
    if not angles_T1R.is_contiguous():
        raise ValueError("angles must be contiguous")
