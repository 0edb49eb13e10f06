"""Fused forms of the ops for CUDA: one launch in place of four to twelve.

Each program computes whole rows (norm, rotation) or elements (gate), always with the same block
size and the same order of additions for a width, and nothing is tuned at run time: a row's bits
depend on that row alone. Results round where the plain forms of `norm`, `activation` and `rope` do,
which is why multiplications and additions are not fused. Triton's compiler evaluates annotations in
a kernel, where it knows no names but those of `triton.language`.
Letters of shapes: T tokens, N heads, D head size or row width, F intermediate size, R = D / 2.
"""

# Triton reads these functions: no Python runs them.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from prefixcache.runner.torch.ops.activation import GELU_CUBE, GELU_SLOPE

_HOPPER = 9
_GATE_BLOCK = 1024
_ROTATED_ROWS = 16
_GELU_SLOPE = tl.constexpr(GELU_SLOPE)
_GELU_CUBE = tl.constexpr(GELU_CUBE)
# Of `sampling.tiles`: members of a block, blocks of a tile, tokens of a tile.
_MEMBERS = tl.constexpr(16)
_BLOCKS = tl.constexpr(64)
_TILE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
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
            OFFSET=offset,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
        )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`activation.silu_and_mul` of [T, 2F]."""
    return _gated(gate_up, gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """`activation.gelu_tanh_and_mul` of [T, 2F]."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _launch(
            _gate,
            (num_tokens, triton.cdiv(width // 2, _GATE_BLOCK)),
            gate_up,
            out,
            gate_up.stride(0),
            GELU=gelu,
            WIDTH=width // 2,
            BLOCK=_GATE_BLOCK,
        )
    return out


def apply_rope(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """`rope.apply_rope`: rotates every head by its token's angles."""
    return _rotated(x_TND, (cos_T1R, sin_T1R), 0, (x_TND, x_TND, cos_T1R))


def rotate_and_append(
    qk_TND: Tensor,
    v_TKD: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots_T: Tensor,
    kv_P2BKD: Tensor,
) -> Tensor:
    """Rotates queries and keys; keys and values go to their slots of the KV cache.

    Returns the queries [T, N - K, D]. A slot is page * B + offset.
    """
    return _rotated(qk_TND, rotation, v_TKD.shape[1], (v_TKD, kv_P2BKD, slots_T))


def _rotated(
    x_TND: Tensor,
    rotation: tuple[Tensor, Tensor],
    num_keys: int,
    places: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Heads before the last `num_keys`; those go to `places`: values, KV cache and slots."""
    num_tokens, num_heads, width = x_TND.shape
    v_TKD, kv, slots_T = places
    num_queries = num_heads - num_keys
    out = torch.empty(num_tokens, num_queries, width, dtype=x_TND.dtype, device=x_TND.device)
    if num_tokens:
        _launch(
            _rotate,
            (triton.cdiv(num_tokens * num_heads, _ROTATED_ROWS),),
            x_TND,
            v_TKD,
            *rotation,
            slots_T,
            out,
            kv,
            num_tokens * num_heads,
            x_TND.stride(0),
            x_TND.stride(1),
            v_TKD.stride(0),
            v_TKD.stride(1),
            *(kv.stride() if num_keys else (0, 0, 0, 0, 0))[:4],
            QUERIES=num_queries,
            KEYS=num_keys,
            PAGE=kv.shape[2] if num_keys else 1,
            HALF=width // 2,
            ROWS=_ROTATED_ROWS,
            BLOCK=triton.next_power_of_2(width // 2),
        )
    return out


def race(
    logits_RV: Tensor, floors_R: Tensor, block_keys_R: Tensor, token_keys_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The scores of `sampling.race` a tile of 1,024 tokens: the largest, and its first token.

    `logits_RV` float32, `floors_R` float32, keys int64; float64 and int64 [R, tiles].
    """
    num_rows, vocab_size = logits_RV.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    device = logits_RV.device
    scores_RT = torch.empty(num_rows, num_tiles, dtype=torch.float64, device=device)
    tokens_RT = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=device)
    if num_rows:
        _launch(
            _race,
            (num_rows, num_tiles),
            logits_RV,
            floors_R,
            block_keys_R,
            token_keys_R,
            scores_RT,
            tokens_RT,
            logits_RV.stride(0),
            vocab_size,
        )
    return scores_RT, tokens_RT


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: float) -> None:
    """One program for each point of the grid."""
    pdl = _has_pdl(args[0].device)
    programmatic = {"launch_pdl": True} if pdl else {}
    kernel[grid](*args, **constants, PDL=pdl, enable_fp_fusion=False, **programmatic)


@cache
def _has_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER


@triton.jit
def _wait_for_inputs(PDL: tl.constexpr) -> None:
    """The kernel before this one may still run; the one after it may be launched from now on."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _rms_norm(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    weight_stride: tl.tensor,
    eps: tl.tensor,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    _wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(x_ptr + token * token_stride + head * head_stride + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, axis=0)
    normed = wide / tl.sqrt(squares / WIDTH + eps)
    weight = tl.load(weight_ptr + head * weight_stride + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSET == 0.0:
        normed = normed.to(x.dtype).to(tl.float32)
    else:
        weight += OFFSET
    row = token * tl.num_programs(1) + head
    tl.store(out_ptr + row * WIDTH + at, (normed * weight).to(x.dtype), mask=inside)


@triton.jit
def _gate(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token_stride: tl.tensor,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    _wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    row = gate_up_ptr + token * token_stride
    gate = tl.load(row + at, mask=inside, other=0.0)
    up = tl.load(row + WIDTH + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    inner = wide
    if GELU:
        inner = _GELU_SLOPE * (wide + _GELU_CUBE * (wide * wide * wide))
    activated = (wide / (1.0 + tl.exp(-inner))).to(gate.dtype).to(tl.float32)
    out = (activated * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + token * WIDTH + at, out, mask=inside)


@triton.jit
def _rotate(
    x_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    num_rows: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    page_stride: tl.tensor,
    value_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some rows: heads of tokens, one token after the other."""
    _wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // (QUERIES + KEYS)).to(tl.int64)
    head = row % (QUERIES + KEYS)
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (at < HALF)
    x_at = x_ptr + (token * token_stride + head * head_stride)[:, None] + at
    first = tl.load(x_at, mask=inside, other=0.0)
    second = tl.load(x_at + HALF, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + (token * HALF)[:, None] + at, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + (token * HALF)[:, None] + at, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    rotated_first = (a * cos - b * sin).to(first.dtype)
    rotated_second = (b * cos + a * sin).to(first.dtype)
    is_query = inside & (head < QUERIES)[:, None]
    out_at = out_ptr + ((token * QUERIES + head) * (2 * HALF))[:, None] + at
    tl.store(out_at, rotated_first, mask=is_query)
    tl.store(out_at + HALF, rotated_second, mask=is_query)
    if KEYS > 0:
        is_key = inside & (head >= QUERIES)[:, None]
        key_head = head - QUERIES
        slot = tl.load(slots_ptr + token, mask=row < num_rows, other=0).to(tl.int64)
        place = slot // PAGE * page_stride + slot % PAGE * slot_stride + key_head * kv_head_stride
        kv_at = kv_ptr + place[:, None] + at
        tl.store(kv_at, rotated_first, mask=is_key)
        tl.store(kv_at + HALF, rotated_second, mask=is_key)
        v_at = v_ptr + (token * v_token_stride + key_head * v_head_stride)[:, None] + at
        value_at = kv_at + value_stride
        tl.store(value_at, tl.load(v_at, mask=is_key, other=0.0), mask=is_key)
        tl.store(value_at + HALF, tl.load(v_at + HALF, mask=is_key, other=0.0), mask=is_key)


@triton.jit
def _race(
    logits_ptr: tl.tensor,
    floors_ptr: tl.tensor,
    block_keys_ptr: tl.tensor,
    token_keys_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    PDL: tl.constexpr,
) -> None:
    """One tile of a row: see `sampling.noise` for the noise, `sampling.race` for the scores."""
    _wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, _MEMBERS * _BLOCKS)
    tokens = tile * (_MEMBERS * _BLOCKS) + at
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask=inside, other=float("-inf"))
    block_bits = _noise_bits(tl.load(block_keys_ptr + row), tile * _BLOCKS + at % _BLOCKS)
    token_bits = _noise_bits(tl.load(token_keys_ptr + row), tokens)
    is_least = (block_bits % _MEMBERS).to(tl.int32) == at // _BLOCKS
    excess = tl.where(is_least, 0.0, _exponential(token_bits))
    noise = _exponential(block_bits) * (1.0 / _MEMBERS) + excess
    kept = inside & (logits >= tl.load(floors_ptr + row))
    scores = tl.where(kept, logits.to(tl.float64) - tl.log(noise), float("-inf"))
    most = tl.max(scores, axis=0)
    first = tl.min(tl.where(scores == most, tokens, 0x7FFFFFFFFFFFFFFF), axis=0)
    place = row * tl.num_programs(1) + tile
    tl.store(scores_ptr + place, most)
    tl.store(tokens_ptr + place, first)


@triton.jit
def _noise_bits(key: tl.tensor, counters: tl.tensor) -> tl.tensor:
    """SplitMix64."""
    x = key.to(tl.uint64, bitcast=True) + (counters + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _exponential(bits: tl.tensor) -> tl.tensor:
    """A standard exponential variable from the upper 53 bits, float64."""
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return tl.maximum(-tl.log(uniform), 5.551115123125783e-17)
