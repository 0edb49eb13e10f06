"""The fused kernels in triton's interpreter, against the plain forms of the ops.

The interpreter is chosen when triton is imported, hence a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

_BACKEND = """
import torch
from prefixcache.runner.torch.attention import flashinfer
from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.config.rope_config import RopeConfig
from prefixcache.runner.torch.ops import rope, triton_kernels
from reference import flashinfer_reference
from reference.paged_attention import SlowSequence, batch_of

torch.manual_seed(0)
decodes = [SlowSequence(n, 1, (5 * i + 1, 5 * i + 2), True) for i, n in enumerate((0, 7, 5))]
mixed = [*decodes, SlowSequence(0, 6, (16, 17))]
rotary = rope.RotaryEmbedding(RopeConfig(), 32, 50, torch.device("cpu"))
start = torch.randn(20, 2, 4, 2, 32)
for sequences, size in ((mixed, None), (decodes, 4)):
    rows = size or 9
    qk, v = torch.randn(rows, 9, 32).split([7, 2], dim=1)
    qk = qk[:, 1:]
    rotation = rotary.at(torch.arange(rows))
    results = []
    for fused in (triton_kernels, None):
        flashinfer.fused_kernels = lambda x: fused
        attention = flashinfer.FlashInferAttention(
            AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2),
            dtype=torch.float32,
            device=torch.device("cpu"),
            kernels=flashinfer_reference,
            workspace_bytes=16,
        )
        pool = start.clone()
        attention.bind([pool])
        batch = batch_of(sequences, page_size=4)
        if size:
            attention.reserve_graphs([size], 20)
            attention.plan_graph(batch, size)
        else:
            attention.plan(batch)
        results.append((attention.rotate_and_run(0, qk, v, rotation), pool))
    (ours, our_pool), (plain, plain_pool) = results
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(our_pool, plain_pool)
    assert not torch.equal(our_pool, start)
print("checked")
"""

_CHECK = """
import torch
from prefixcache.config.rope_config import RopeConfig
from prefixcache.runner.torch.ops import activation, norm, rope, triton_kernels as fused
from reference.flashinfer_reference import append_paged_kv_cache

def table(values):
    return torch.tensor(list(values), dtype=torch.int32)

torch.manual_seed(0)
# The interpreter truncates to bfloat16 where a device rounds, twice in each kernel.
tolerances = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
for dtype, tolerance in tolerances.items():
    def same(ours, plain):
        assert ours.dtype == plain.dtype == dtype and ours.is_contiguous()
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)

    for width in (64, 100):
        x = torch.randn(5, width, dtype=dtype) * 3
        weight = torch.randn(width, dtype=dtype)
        for offset in (0.0, 1.0):
            ours = fused.rms_norm(x, weight, 1e-5, offset=offset)
            same(ours, norm.rms_norm(x, weight, 1e-5, offset=offset))
    heads = torch.randn(5, 9, 32, dtype=dtype)[:, 2:6]
    for shape in ((32,), (4, 32)):
        weight = torch.randn(shape, dtype=dtype)
        for offset in (0.0, 1.0):
            ours = fused.rms_norm(heads, weight, 1e-6, offset=offset)
            same(ours, norm.rms_norm(heads, weight, 1e-6, offset=offset))
    for width in (6, 2500):
        x = torch.randn(3, width, dtype=dtype) * 4
        same(fused.silu_and_mul(x), activation.silu_and_mul(x))
        same(fused.gelu_tanh_and_mul(x), activation.gelu_tanh_and_mul(x))
    far = torch.tensor([[-3e4, 3e4, 1.0, 1.0]], dtype=dtype)
    same(fused.gelu_tanh_and_mul(far), activation.gelu_tanh_and_mul(far))
    rotary = rope.RotaryEmbedding(RopeConfig(), 32, 50, torch.device("cpu"))
    rotation = rotary.at(torch.tensor([0, 3, 49, 7, 7]))
    same(fused.apply_rope(heads, *rotation), rope.apply_rope(heads, *rotation))
    wide = torch.randn(5, 9, 32, dtype=dtype)
    qk, v = wide[:, :7], wide[:, 7:]
    rotated = fused.apply_rope(qk, *rotation)
    slots = torch.tensor([9, 4, 11, 0, 3], dtype=torch.int32)
    ours, plain = torch.randn(2, 4, 2, 3, 2, 32).to(dtype).unbind()
    plain.copy_(ours)
    queries = fused.rotate_and_append(qk, v, rotation, slots, ours)
    assert torch.equal(queries, rotated[:, :5]) and queries.is_contiguous()
    tables = table(range(4)), table([0, 4]), table([3])
    append_paged_kv_cache(rotated[:, 5:], v, torch.zeros_like(slots), slots, plain, *tables)
    assert torch.equal(ours, plain)
    for call in (
        lambda rows: fused.rms_norm(rows, torch.ones(32, dtype=dtype), 1e-6),
        lambda rows: fused.rms_norm(rows, torch.ones(32, dtype=dtype), 1e-6, offset=1.0),
        fused.silu_and_mul,
        fused.gelu_tanh_and_mul,
    ):
        rows = torch.randn(6, 32, dtype=dtype)
        assert torch.equal(call(rows)[4:5], call(rows[4:5])), "a row depends on the others"
        assert call(rows[:0]).shape[0] == 0

# Where a result is rounded shows in its bits, which the interpreter keeps for float16.
x = torch.randn(40, 64, dtype=torch.float16) * 3
weight = torch.randn(64, dtype=torch.float16)
for ours, plain in (
    (fused.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5)),
    (fused.rms_norm(x, weight, 1e-5, offset=1.0), norm.rms_norm(x, weight, 1e-5, offset=1.0)),
    (fused.silu_and_mul(x), activation.silu_and_mul(x)),
    (fused.gelu_tanh_and_mul(x), activation.gelu_tanh_and_mul(x)),
):
    assert (ours != plain).float().mean() < 0.01

from prefixcache.runner.torch.sampling.noise import RowNoise, row_keys
from prefixcache.runner.torch.sampling.race import race
from prefixcache.runner.torch.sampling import race as race_module

for vocab, scale in ((3000, 3.0), (1024, 0.0), (7, 1.0)):
    logits = torch.randn(20, vocab) * scale
    keys = map(torch.from_numpy, row_keys(range(-10, 10), range(20)))
    noise = RowNoise(*keys)
    floors = torch.full((20,), -torch.inf)
    floors[::2] = logits.topk(3).values[::2, 2]
    race_module.fused_kernels = lambda x: None
    plain = race(logits, floors, noise)
    race_module.fused_kernels = lambda x: fused
    assert torch.equal(race(logits, floors, noise), plain)
unusable = torch.tensor([[float("nan")] * 7, [-torch.inf] * 7]).repeat(10, 1)
assert race(unusable, floors, noise).min() >= 0
print("checked")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(_CHECK, id="fused"),
        pytest.param(_BACKEND, id="backend", marks=pytest.mark.long),
    ],
)
def test_kernels_compute_what_the_plain_ops_do(check: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "checked"), done.stderr
