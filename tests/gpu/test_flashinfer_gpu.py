"""FlashInfer's own kernels against their torch reference, and what must be equal in bits."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from prefixcache.config.model_config import ModelConfig
from prefixcache.runner.torch.attention.base import AttentionBatch, AttentionSpec
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention, make_flashinfer
from prefixcache.runner.torch.cuda_graph import CudaCapture
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.ops.sets import Ops
from reference import flashinfer_reference
from reference.paged_attention import SlowSequence, batch_of
from support.paged_models import PagedServer

PAGE = 16
SPECS = {
    "group 7": AttentionSpec(num_heads=28, num_kv_heads=4, head_dim=128, scale=128**-0.5),
    "group 2": AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5),
    "head 64": AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.125),
    "window": AttentionSpec(
        num_heads=16, num_kv_heads=8, head_dim=128, scale=0.09, sliding_window=37
    ),
    "window of heads of 256": AttentionSpec(
        num_heads=4, num_kv_heads=1, head_dim=256, scale=0.0625, sliding_window=70
    ),
    "soft cap": AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.09, softcap=20.0),
}
# Kernels for the others are prebuilt.
COMPILED = ("head 64", "window", "window of heads of 256", "soft cap")
CASES = [
    pytest.param(spec, id=name, marks=[pytest.mark.jit] if name in COMPILED else [])
    for name, spec in SPECS.items()
]
INVARIANT = pytest.mark.parametrize("invariant", [False, True])
LENGTHS = ((700, 1), (33, 1), (15, 1), (0, 130), (250, 77), (16, 1))


def step(
    lengths: tuple[tuple[int, int], ...],
    device: torch.device,
    window: int | None = None,
    seed: int = 2,
) -> tuple[AttentionBatch, int]:
    """Leading sequences of one row are decodes; pages in no order. Also the pool's size.

    Pages behind the window are left out.
    """
    counts = [-(-(start + count) // PAGE) for start, count in lengths]
    generator = torch.Generator().manual_seed(seed)
    pages = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    sequences = []
    for (start, count), used in zip(lengths, counts, strict=True):
        left_out = behind(window, start)
        sequences.append(SlowSequence(start, count, tuple(pages[:used]), count == 1, left_out))
        pages = pages[used:]
    return on_device(batch_of(sequences, PAGE), device), sum(counts) + 1


def behind(window: int | None, start: int) -> int:
    """Pages that no row from `start` on sees."""
    return 0 if window is None else max(0, start - window + 1) // PAGE


def on_device(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    """Slots and page indices there, as a runner sends them."""
    return dataclasses.replace(
        batch,
        slot_mapping=batch.slot_mapping.to(device),
        kv_indices=batch.kv_indices.to(device),
    )


def inputs(spec: AttentionSpec, rows: int, num_pages: int, device: torch.device):
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    pool = noise(num_pages, 2, PAGE, spec.num_kv_heads, spec.head_dim)
    key, value = noise(2, rows, spec.num_kv_heads, spec.head_dim)
    return pool, noise(rows, spec.num_heads, spec.head_dim), key, value


def made(spec: AttentionSpec, invariant: bool, device: torch.device) -> FlashInferAttention:
    return _made([spec], invariant, device)[0]


def _made(
    specs: list[AttentionSpec], invariant: bool, device: torch.device
) -> list[FlashInferAttention]:
    return make_flashinfer(
        specs,
        dtype=torch.bfloat16,
        device=device,
        batch_invariant=invariant,
    )


def reference(spec: AttentionSpec, device: torch.device) -> FlashInferAttention:
    return FlashInferAttention(
        spec,
        dtype=torch.bfloat16,
        device=device,
        kernels=flashinfer_reference,
        workspace_bytes=16,
    )


@INVARIANT
@pytest.mark.parametrize("spec", CASES)
def test_kernels_compute_what_their_reference_does(spec, invariant, device) -> None:
    batch, num_pages = step(LENGTHS, device, spec.sliding_window)
    pool, q, k, v = inputs(spec, len(batch.slot_mapping), num_pages, device)
    results = []
    for attention in (
        made(spec, invariant, device),
        reference(spec, device),
    ):
        own = pool.clone()
        attention.bind([own])
        attention.plan(batch)
        results.append((attention.run(0, q, k, v), own))
    (ours, our_pool), (plain, plain_pool) = results
    assert torch.equal(our_pool, plain_pool)
    torch.testing.assert_close(ours, plain, atol=0.02, rtol=0.02)


@INVARIANT
@pytest.mark.parametrize("spec", [CASES[0], pytest.param(SPECS["window"], marks=pytest.mark.jit)])
def test_a_replayed_graph_computes_what_a_plain_step_does(spec, invariant, device) -> None:
    attention = made(spec, invariant, device)
    batch, num_pages = step(((700, 1), (33, 1), (15, 1)), device, spec.sliding_window)
    pool, q, k, v = inputs(spec, 4, num_pages, device)
    attention.bind([pool])
    attention.plan(batch)
    plain = attention.run(0, q[:3], k[:3], v[:3])
    written = pool.clone()
    attention.reserve_graphs([4], max_page_indices=100)
    attention.plan_graph(batch, 4)
    out = torch.empty_like(q)
    replay = CudaCapture(device)(lambda: out.copy_(attention.run(0, q, k, v)))
    longer, _ = step(((640, 1), (40, 1), (2, 1)), device, spec.sliding_window)
    attention.plan_graph(longer, 4)
    replay()
    pool.copy_(written)
    attention.plan_graph(batch, 4)
    replay()
    torch.testing.assert_close(out[:3], plain, atol=0.02, rtol=0.02)
    if attention.batch_invariant:
        assert torch.equal(out[:3], plain)


@pytest.mark.parametrize("spec", CASES)
def test_bits_depend_on_neither_chunks_nor_batch(spec, device) -> None:
    """One prompt of 300 rows: whole, in chunks, with others, its last row as a decode."""
    attention = made(spec, invariant=True, device=device)
    if not attention.batch_invariant:
        pytest.skip("needs a Hopper device")
    _, q, k, v = inputs(spec, 300, 1, device)
    whole = _computed(attention, spec, q, k, v, [300], device)
    for chunks in ([17, 283], [128, 100, 72], [299, 1]):
        assert torch.equal(_computed(attention, spec, q, k, v, chunks, device), whole)


def _computed(attention, spec, q, k, v, chunks, device) -> torch.Tensor:
    pool = torch.zeros(64, 2, PAGE, spec.num_kv_heads, spec.head_dim, device=device).bfloat16()
    attention.bind([pool])
    pages, other = tuple(range(1, 20)), tuple(range(30, 50))
    out, start = [], 0
    for count in chunks:
        left_out = behind(spec.sliding_window, start)
        sequences = [
            SlowSequence(start, count, pages, count == 1, left_out),
            SlowSequence(start // 2, 9, other),
        ]
        attention.plan(on_device(batch_of(sequences, PAGE), device))
        rows = slice(start, start + count)
        both = [torch.cat([part[rows], part[:9]]) for part in (q, k, v)]
        out.append(attention.run(0, *both)[:count])
        start += count
    return torch.cat(out)


@pytest.mark.jit
@INVARIANT
def test_groups_that_share_memory_compute_what_each_does_alone(invariant, device) -> None:
    """All are planned before the first one runs; a mixed step, then decodes from a graph."""
    full, window = SPECS["group 2"], SPECS["window"]
    specs = [full, window, dataclasses.replace(window, sliding_window=90), window, full]
    together = _made(specs, invariant, device)
    for lengths, size in ((LENGTHS, None), (LENGTHS[:3], 4)):
        rows = size or sum(count for _, count in lengths)
        expected = []
        for seed, (spec, attention) in enumerate(zip(specs, together, strict=True)):
            batch, num_pages = step(lengths, device, spec.sliding_window, seed)
            pool, *qkv = inputs(spec, rows, num_pages, device)
            alone = made(spec, invariant, device)
            for one, own in ((attention, pool), (alone, pool.clone())):
                one.bind([own])
                if size is None:
                    one.plan(batch)
                else:
                    one.reserve_graphs([size], max_page_indices=100)
                    one.plan_graph(batch, size)
            expected.append((alone.run(0, *qkv), qkv))
        for attention, (alone_out, qkv) in zip(together, expected, strict=True):
            assert torch.equal(attention.run(0, *qkv), alone_out)


def test_a_model_answers_from_graphs_as_it_does_step_by_step(device) -> None:
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=512,
        qk_norm=True,
    )
    model = DecoderModel(config, Ops(torch.bfloat16, device), 512)
    generator = torch.Generator(device).manual_seed(0)
    for slot in model.slots.values():
        slot.write(torch.randn(slot.shape, generator=generator, device=device) * 0.1)
    make = partial(made, invariant=True, device=device)
    prompts = [list(range(3, 60)), list(range(100, 120)), [7, 8, 9]]
    plain = PagedServer(model, make, block_size=PAGE, num_blocks=40)
    capture = CudaCapture(device)
    options = {"block_size": PAGE, "num_blocks": 40}
    graphs = PagedServer(model, make, capture=capture, step_sizes=(16, 32), **options)
    assert graphs.generate(prompts, 20) == plain.generate(prompts, 20)
