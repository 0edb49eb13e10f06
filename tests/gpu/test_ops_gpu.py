"""The fused kernels on a device, against the plain forms of the ops."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from prefixcache.config.rope_config import RopeConfig
from prefixcache.runner.torch.ops import activation, norm, rope
from prefixcache.runner.torch.sampling.sampler import greedy_token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_ops_round_as_the_plain_ones(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(33, 12, 128, generator=generator).to(dtype)
    weight = torch.randn(12, 128, generator=generator).to(dtype)
    gate_up = torch.randn(33, 5000, generator=generator).to(dtype) * 4
    at = torch.arange(33)
    plain_rope = rope.RotaryEmbedding(RopeConfig(), 128, 64, torch.device("cpu")).at(at)
    fused_rope = rope.RotaryEmbedding(RopeConfig(), 128, 64, device).at(at.to(device))
    pairs = (
        (
            norm.rms_norm(heads.to(device), weight.to(device), 1e-6),
            norm.rms_norm(heads, weight, 1e-6),
        ),
        (
            norm.rms_norm(heads.to(device), weight.to(device), 1e-6, offset=1.0),
            norm.rms_norm(heads, weight, 1e-6, offset=1.0),
        ),
        (activation.silu_and_mul(gate_up.to(device)), activation.silu_and_mul(gate_up)),
        (activation.gelu_tanh_and_mul(gate_up.to(device)), activation.gelu_tanh_and_mul(gate_up)),
        (rope.apply_rope(heads.to(device), *fused_rope), rope.apply_rope(heads, *plain_rope)),
    )
    step = 2**-7 if dtype == torch.bfloat16 else 2e-6
    for fused, plain in pairs:
        torch.testing.assert_close(fused.cpu(), plain, atol=step, rtol=step)


def test_a_row_of_a_fused_op_does_not_depend_on_the_others(device: torch.device) -> None:
    rows = torch.randn(300, 3584, device=device).bfloat16()
    weight = torch.randn(3584, device=device).bfloat16()
    for op in (
        partial(norm.rms_norm, weight=weight, eps=1e-6),
        partial(norm.rms_norm, weight=weight, eps=1e-6, offset=1.0),
        activation.silu_and_mul,
        activation.gelu_tanh_and_mul,
    ):
        whole = op(rows)
        for count in (1, 7, 128):
            assert torch.equal(op(rows[:count]), whole[:count])


def test_keys_go_to_the_cache_as_they_are_rotated_alone(device: torch.device) -> None:
    from prefixcache.runner.torch.ops import triton_kernels

    heads = torch.randn(70, 36, 128, device=device).bfloat16()
    rotation = rope.RotaryEmbedding(RopeConfig(), 128, 99, device).at(
        torch.arange(70, device=device)
    )
    slots = torch.randperm(80, device=device)[:70].to(torch.int32)
    pool = torch.zeros(5, 2, 16, 4, 128, device=device).bfloat16()
    q = triton_kernels.rotate_and_append(heads[:, :32], heads[:, 32:], rotation, slots, pool)
    rotated = rope.apply_rope(heads[:, :32], *rotation)
    assert torch.equal(q, rotated[:, :28])
    pages, offsets = (slots // 16).long(), (slots % 16).long()
    assert torch.equal(pool[pages, 0, offsets], rotated[:, 28:])
    assert torch.equal(pool[pages, 1, offsets], heads[:, 32:])


def test_likeliest_tokens_are_the_first_of_equals(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.randint(0, 9, (64, 152064), generator=generator, device=device).bfloat16()
    first = logits.float().cpu().numpy().argmax(axis=1).tolist()
    assert greedy_token_ids(logits).tolist() == first
    assert greedy_token_ids(logits.float()).tolist() == first
