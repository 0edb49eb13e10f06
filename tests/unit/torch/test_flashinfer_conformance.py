"""Our calls through FlashInfer's own Python; torch stands in for its CUDA modules.

`make setup-dev` installs the package without what it declares: 17 MB to fetch, and no CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("flashinfer")

from fakes.native_flashinfer import replace_native_modules
from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from reference import flashinfer_reference
from reference.paged_attention import SlowSequence, batch_of

PAGE = 16
SPECS = {
    "group 7": AttentionSpec(num_heads=28, num_kv_heads=4, head_dim=128, scale=0.09),
    "group 2": AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.09),
    "window": AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, sliding_window=37),
    "soft cap": AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, softcap=20.0),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    return replace_native_modules(monkeypatch), flashinfer_reference


def _backend(
    spec: AttentionSpec,
    kernels: Any,
    invariant: bool,
    hopper: bool = True,
    leader: FlashInferAttention | None = None,
) -> FlashInferAttention:
    return FlashInferAttention(
        spec,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=kernels,
        batch_invariant=invariant,
        hopper=hopper,
        workspace_bytes=1 << 22,
        leader=leader,
    )


def _step(lengths: tuple[tuple[int, int], ...]) -> list[SlowSequence]:
    counts = [-(-(start + count) // PAGE) for start, count in lengths]
    first = [1 + sum(counts[:i]) for i in range(len(counts))]
    return [
        SlowSequence(start, count, tuple(range(at, at + pages)), count == 1)
        for (start, count), at, pages in zip(lengths, first, counts, strict=True)
    ]


def _inputs(spec: AttentionSpec, rows: int, num_pages: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (num_pages, 2, PAGE, spec.num_kv_heads, spec.head_dim),
        (rows, spec.num_heads, spec.head_dim),
        (rows, spec.num_kv_heads, spec.head_dim),
        (rows, spec.num_kv_heads, spec.head_dim),
    )
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


INVARIANT = pytest.mark.parametrize("invariant", [False, True])
# Where bits are not kept, on Hopper or before it by turns.
STEPS = [
    (spec, invariant, invariant or row % 2 == 0)
    for row, spec in enumerate(SPECS.values())
    for invariant in (False, True)
]


@pytest.mark.parametrize(("spec", "invariant", "hopper"), STEPS)
def test_a_step_computes_what_the_reference_does(spec, kernels, invariant, hopper) -> None:
    lengths = ((70, 1), (33, 1), (15, 1), (0, 130), (50, 77), (16, 1))
    batch = batch_of(_step(lengths), PAGE)
    pool, q, k, v = _inputs(spec, sum(count for _, count in lengths), 40)
    results = []
    for kernel in kernels:
        attention, own = _backend(spec, kernel, invariant, hopper), pool.clone()
        attention.bind([own])
        attention.plan(batch)
        results.append((attention.run(0, q, k, v), own))
    (ours, our_pool), (plain, plain_pool) = results
    assert torch.equal(ours, plain)
    assert torch.equal(our_pool, plain_pool)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "invariant", "hopper"), STEPS)
def test_graphs_of_several_sizes_compute_what_the_reference_does(
    spec, kernels, invariant, hopper
) -> None:
    lengths = ((70, 1), (33, 1), (15, 1))
    batch = batch_of(_step(lengths), PAGE)
    for size in (3, 80):
        pool, q, k, v = _inputs(spec, size, 40)
        results = []
        for kernel in kernels:
            attention, own = _backend(spec, kernel, invariant, hopper), pool.clone()
            attention.bind([own])
            attention.reserve_graphs([size], max_page_indices=100)
            attention.plan_graph(batch, size)
            results.append(attention.run(0, q, k, v)[:3])
        assert torch.equal(*results)


@INVARIANT
def test_groups_of_one_attention_run_by_one_plan_over_their_own_pages(kernels, invariant) -> None:
    lengths = ((70, 1), (33, 1), (15, 1))
    spec = SPECS["window"]
    pool, q, k, v = _inputs(spec, 3, 40)
    leader = _backend(spec, kernels[0], invariant)
    follower = _backend(spec, kernels[0], invariant, leader=leader)
    batches = [batch_of(_step(lengths), PAGE)]
    batches.append(replace(batches[0], kv_indices=batches[0].kv_indices.flip(0)))
    for size in (None, 3):
        for attention, batch in zip((leader, follower), batches, strict=True):
            attention.bind([pool.clone()])
            if size is None:
                attention.plan(batch)
            else:
                attention.reserve_graphs([size], max_page_indices=100)
                attention.plan_graph(batch, size)
        for attention, batch in zip((leader, follower), batches, strict=True):
            alone = _backend(spec, kernels[1], invariant)
            alone.bind([pool.clone()])
            alone.plan(batch)
            assert torch.equal(attention.run(0, q, k, v), alone.run(0, q, k, v))


@INVARIANT
def test_planning_looks_at_no_table_entry_by_entry(kernels, invariant, monkeypatch) -> None:
    """Python's max of a tensor takes 0.5 ms for 256 sequences."""
    lengths = ((70, 1), (33, 1), (15, 1), (0, 30))
    attention = _backend(SPECS["group 7"], kernels[0], invariant)
    attention.bind([torch.zeros(40, 2, PAGE, 4, 128).bfloat16()])
    attention.reserve_graphs([3], max_page_indices=40)
    iterated = []
    monkeypatch.setattr(torch.Tensor, "__iter__", lambda tensor: iterated.append(tensor))
    monkeypatch.setattr("fakes.native_flashinfer._plan_fa2", lambda *_args: [1] * 15)
    attention.plan(batch_of(_step(lengths), PAGE))
    attention.plan_graph(batch_of(_step(lengths[:3]), PAGE), 3)
    assert iterated == []
