"""Linear layers by one Triton kernel whose tiles do not depend on the number of rows.

cuBLAS chooses its algorithm by that number, and so a row's last bits; kept from splitting sums it
leaves most of a card idle where a layer has few outputs. Here a tile's shape depends on the number
of outputs alone, and each sum goes along the input features in one order: a row's bits are its own.
Letters of shapes as in `linear`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from prefixcache.runner.cuda.ops.linear import TorchLinear

_ROWS = 64
_INPUTS = 64
# With fewer outputs than this, tiles of 128 are fewer than the multiprocessors of a card.
_MANY_OUTPUTS = 128 * 132
# Outputs of a tile, and steps along the inputs that are loaded ahead: as much fits next to a tile.
_WIDE = (128, 5)
_NARROW = (32, 8)
# Tiles of rows that one tile of the weight serves before the next one is read.
_GROUP = 8


class FixedTileLinear(TorchLinear):
    """A weight [O, I] of bfloat16, as torch keeps it; sums are float32, rounded once."""

    def __call__(self, x_TI: Tensor, residual_TO: Tensor | None = None) -> Tensor:
        """Returns [T, O]; the result takes the residual's memory."""
        num_rows = len(x_TI)
        out_TO = x_TI.new_empty(num_rows, self.out_features) if residual_TO is None else residual_TO
        outputs, stages = _WIDE if self.out_features >= _MANY_OUTPUTS else _NARROW
        tiles = triton.cdiv(num_rows, _ROWS) * triton.cdiv(self.out_features, outputs)
        if num_rows:
            kernel: Any = _linear
            kernel[(tiles,)](
                x_TI,
                self.weight_OI,
                # Pointers that are not read where there is no such tensor.
                out_TO if self._bias_O is None else self._bias_O,
                out_TO,
                num_rows,
                self.out_features,
                x_TI.stride(0),
                WIDTH=self.in_features,
                HAS_BIAS=self._bias_O is not None,
                HAS_RESIDUAL=residual_TO is not None,
                ROWS=_ROWS,
                OUTPUTS=outputs,
                INPUTS=_INPUTS,
                GROUP=_GROUP,
                num_warps=4,
                num_stages=stages,
                enable_fp_fusion=False,
            )
        return out_TO


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    row_stride: tl.tensor,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One tile [ROWS, OUTPUTS]; neighbours in the launch share tiles of the weight."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    in_group = GROUP * tl.cdiv(num_outputs, OUTPUTS)
    group = tl.program_id(0) // in_group
    group_rows = min(row_tiles - group * GROUP, GROUP)
    place = tl.program_id(0) % in_group
    rows = (group * GROUP + place % group_rows) * ROWS + tl.arange(0, ROWS)
    outputs = place // group_rows * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, INPUTS)
    row_inside, output_inside = (rows < num_rows)[:, None], (outputs < num_outputs)[:, None]
    x_at = x_ptr + rows.to(tl.int64)[:, None] * row_stride + inputs[None, :]
    weight_at = weight_ptr + outputs.to(tl.int64)[:, None] * WIDTH + inputs[None, :]
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, WIDTH, INPUTS):
        input_inside = inputs[None, :] < WIDTH - start
        x = tl.load(x_at + start, mask=row_inside & input_inside, other=0.0)
        weight = tl.load(weight_at + start, mask=output_inside & input_inside, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    inside = row_inside & (outputs < num_outputs)[None, :]
    out_at = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        sums += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, sums, mask=inside)
