"""Paged attention against the textbook formula over each sequence's own keys and values."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from prefixcache.exceptions import ConfigError
from prefixcache.kv.specs import KVGroup
from prefixcache.runner.torch.attention.base import AttentionGroup, AttentionSpec
from prefixcache.runner.torch.attention.registry import attention_names, make_attention
from support.kernel_attention import backend_of, rounded, rounded_keys
from support.paged_driver import make_batch

BLOCK_SIZE = 4
HEAD_DIM = 16
TABLES = [[9, 2, 7, 4], [1, 8, 3, 6], [5, 10, 11, 12]]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected_rows(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Queries are the last rows of the sequence; k and v hold all of its positions."""
    rows = []
    for row in range(len(q)):
        position = len(k) - len(q) + row
        window = spec.sliding_window or len(k)
        seen = slice(max(0, position - window + 1), position + 1)
        for head in range(spec.num_heads):
            kv_head = head * spec.num_kv_heads // spec.num_heads
            scores = k[seen, kv_head].double() @ q[row, head].double() * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            rows.append(torch.softmax(scores, -1) @ v[seen, kv_head].double())
    return torch.stack(rows).view(len(q), spec.num_heads, spec.head_dim)


@pytest.mark.parametrize(
    ("backend", "heads", "block_size"),
    [
        *product(["torch", "cpu"], [(4, 4)], [BLOCK_SIZE]),
        *product(["torch", "cpu", "int8"], [(4, 2), (7, 1)], [16]),
        ("int8", (4, 4), 64),
    ],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 2.0), (100, None), (None, 2.0)])
def test_mixed_batch(backend, heads, window, softcap, block_size):
    spec = AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=HEAD_DIM,
        scale=0.5,
        sliding_window=window,
        softcap=softcap,
    )
    attention = backend_of(backend, spec)
    kv = torch.full(attention.kv_shape(13, block_size, heads[1], HEAD_DIM), float("nan"))
    attention.bind([kv])
    # A decode, a chunk in the middle of a prompt, a whole prompt that fills its last block.
    lengths, computed = [14, 11, 8], [1, 6, 8]
    keys = [random(n, heads[1], HEAD_DIM, seed=i) for i, n in enumerate(lengths)]
    values = [random(n, heads[1], HEAD_DIM, seed=10 + i) for i, n in enumerate(lengths)]
    queries = [random(n, heads[0], HEAD_DIM, seed=20 + i) for i, n in enumerate(computed)]
    for sequence in (0, 1):
        history = lengths[sequence] - computed[sequence]
        attention.plan(make_batch([(0, history)], [TABLES[sequence]], block_size))
        attention.run(
            0,
            random(history, heads[0], HEAD_DIM, seed=5),
            keys[sequence][:history],
            values[sequence][:history],
        )
    chunks = [(n - new, n) for n, new in zip(lengths, computed, strict=True)]
    attention.plan(make_batch(chunks, TABLES, block_size))
    new = range(3)
    out = attention.run(
        0,
        torch.cat(queries),
        torch.cat([keys[i][chunks[i][0] :] for i in new]),
        torch.cat([values[i][chunks[i][0] :] for i in new]),
    )
    if backend == "int8":
        keys, values = [rounded_keys(rows) for rows in keys], [rounded(rows) for rows in values]
    expected = torch.cat([expected_rows(spec, queries[i], keys[i], values[i]) for i in new])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


def test_keys_and_values_stand_at_their_slots() -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0)
    attention = backend_of("cpu", spec)
    kv = [torch.zeros(attention.kv_shape(13, BLOCK_SIZE, 1, 16)) for _ in range(2)]
    attention.bind(kv)
    attention.plan(make_batch([(0, 6)], TABLES[:1], BLOCK_SIZE))
    k, v = random(6, 1, 16, seed=1), random(6, 1, 16, seed=2)
    attention.run(1, random(6, 2, 16, seed=3), k, v)
    assert torch.equal(kv[1][9, 0], k[:4].transpose(0, 1))
    assert torch.equal(kv[1][2, 1, :, :2], v[4:].transpose(0, 1))
    assert kv[1].count_nonzero() == 2 * k.numel()
    assert kv[0].count_nonzero() == 0


def test_an_unknown_backend_lists_the_known_ones() -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
    with pytest.raises(ConfigError, match=f"auto, {', '.join(attention_names())}, got 'magic'"):
        make_attention("magic", [AttentionGroup(spec, KVGroup((0,)))])


def test_heads_must_divide() -> None:
    with pytest.raises(ConfigError, match="num_heads"):
        AttentionSpec(num_heads=4, num_kv_heads=3, head_dim=8, scale=1.0)
