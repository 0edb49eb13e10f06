"""Fused forms of the ops for CUDA: one launch in place of four to eight.

Each program computes whole rows (norm, rotation) or elements (gate), always with the same block
size and the same order of additions for a width, and nothing is tuned at run time: a row's bits
depend on that row alone. Results round where the plain forms of `norm`, `activation` and `rope` do,
which is why multiplications and additions are not fused. Triton's compiler evaluates annotations in
a kernel, where it knows no names but those of `triton.language`.
Letters of shapes: T tokens, N heads, D head size or row width, F intermediate size, R = D / 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATE_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm.rms_norm` of [T, D] with weight [D], or of [T, N, D] with weight [N, D] or [D]."""
    rows = x.unsqueeze(1) if x.ndim == 2 else x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, num_heads, width = rows.shape
    if num_tokens:
        _launch(
            _rms_norm,
            (num_tokens, num_heads),
            rows,
            weight,
            out,
            rows.stride(0),
            rows.stride(1),
            weight.stride(0) if weight.ndim == 2 else 0,
            eps,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
        )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`activation.silu_and_mul` of [T, 2F]."""
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _launch(
            _silu_and_mul,
            (num_tokens, triton.cdiv(width // 2, _GATE_BLOCK)),
            gate_up,
            out,
            gate_up.stride(0),
            WIDTH=width // 2,
            BLOCK=_GATE_BLOCK,
        )
    return out


def apply_rope(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """`rope.apply_rope`: rotates every head by its token's angles."""
    out = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    num_tokens, num_heads, width = x_TND.shape
    if num_tokens:
        _launch(
            _apply_rope,
            (num_tokens, num_heads),
            x_TND,
            cos_T1R,
            sin_T1R,
            out,
            x_TND.stride(0),
            x_TND.stride(1),
            HALF=width // 2,
            BLOCK=triton.next_power_of_2(width // 2),
        )
    return out


def _launch(kernel: Any, grid: tuple[int, int], *args: Any, **constants: int) -> None:
    """One program for each point of the grid."""
    kernel[grid](*args, **constants, enable_fp_fusion=False)


@triton.jit
def _rms_norm(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    weight_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(x_ptr + token * token_stride + head * head_stride + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, axis=0)
    normed = (wide / tl.sqrt(squares / WIDTH + eps)).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + head * weight_stride + at, mask=inside, other=0.0).to(tl.float32)
    row = token * tl.num_programs(1) + head
    tl.store(out_ptr + row * WIDTH + at, (normed * weight).to(x.dtype), mask=inside)


@triton.jit
def _silu_and_mul(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    row = gate_up_ptr + token * token_stride
    gate = tl.load(row + at, mask=inside, other=0.0)
    up = tl.load(row + WIDTH + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    out = (activated * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + token * WIDTH + at, out, mask=inside)


@triton.jit
def _apply_rope(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    row = x_ptr + token * token_stride + head * head_stride
    first = tl.load(row + at, mask=inside, other=0.0)
    second = tl.load(row + HALF + at, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + token * HALF + at, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + at, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    out = out_ptr + (token * tl.num_programs(1) + head) * (2 * HALF)
    tl.store(out + at, (a * cos - b * sin).to(first.dtype), mask=inside)
    tl.store(out + HALF + at, (b * cos + a * sin).to(first.dtype), mask=inside)
