"""Random steps through the FlashInfer backend, against attention written from its definition."""

from __future__ import annotations

import dataclasses
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from prefixcache.runner.torch.attention.flashinfer_plan import pad_decodes, select_sequences
from reference import flashinfer_reference
from reference.paged_attention import SlowSequence, batch_of, slow_attention

CPU = torch.device("cpu")


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[SlowSequence]]:
    """A page size, then decodes and chunks whose pages are in any order and may be shared."""
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_decodes = draw(st.integers(0, 4))
    num_chunks = draw(st.integers(0 if num_decodes else 1, 3))
    lengths = [(draw(st.integers(1, 40)), 1, True) for _ in range(num_decodes)]
    lengths += [(draw(st.integers(0, 24)), draw(st.integers(1, 9)), False)] * num_chunks
    free = iter(draw(st.permutations(range(1, 400))))
    sequences = []
    for start, count, is_decode in lengths:
        prefix = sequences[-1].pages if sequences and draw(st.booleans()) else ()
        shared = prefix[: min(start, sequences[-1].start if sequences else 0) // page_size]
        needed = math.ceil((start + count) / page_size) - len(shared)
        own = tuple(next(free) for _ in range(needed))
        sequences.append(SlowSequence(start, count, shared + own, is_decode))
    return page_size, sequences


@settings(max_examples=40, deadline=None)
@given(
    step=steps(),
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1), (6, 1)]),
    window=st.sampled_from([None, 1, 3, 17]),
    softcap=st.sampled_from([None, 2.0]),
    invariant=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_row_attends_to_what_its_block_table_says(
    step, heads, window, softcap, invariant, seed
):
    page_size, sequences = step
    sequences = [_leave_out(one, window, page_size) for one in sequences]
    spec = AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=8,
        scale=0.4,
        sliding_window=window,
        softcap=softcap,
    )
    generator = torch.Generator().manual_seed(seed)
    attention = FlashInferAttention(
        spec,
        dtype=torch.float32,
        device=CPU,
        kernels=flashinfer_reference,
        batch_invariant=invariant,
        workspace_bytes=16,
    )
    kv = torch.randn(400, 2, page_size, heads[1], 8, generator=generator)
    batch = batch_of(sequences, page_size)
    total = len(batch.slot_mapping)
    q = torch.randn(total, heads[0], 8, generator=generator)
    k, v = torch.randn(2, total, heads[1], 8, generator=generator)
    attention.bind([kv])
    attention.plan(batch)
    out = attention.run(0, q, k, v)
    pages, offsets = batch.slot_mapping // page_size, batch.slot_mapping % page_size
    torch.testing.assert_close(kv[pages, 0, offsets], k)
    torch.testing.assert_close(kv[pages, 1, offsets], v)
    expected = slow_attention(spec, sequences, kv, q)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def _leave_out(one: SlowSequence, window: int | None, page_size: int) -> SlowSequence:
    """The sequence without the pages behind its window, in whose place stands the null block."""
    count = 0 if window is None else max(0, one.start - window + 1) // page_size
    return dataclasses.replace(one, pages=(0,) * count + one.pages[count:], left_out=count)


@settings(max_examples=100, deadline=None)
@given(step=steps(), data=st.data())
def test_a_kernels_rows_are_those_of_its_sequences_alone(step, data):
    page_size, sequences = step
    first = data.draw(st.integers(0, len(sequences) - 1))
    stop = data.draw(st.integers(first + 1, len(sequences)))
    batch = batch_of(sequences, page_size)
    rows = select_sequences(batch, first, stop)
    alone = batch_of(sequences[first:stop], page_size)
    assert rows.qo_indptr.tolist() == alone.qo_indptr.tolist()
    assert rows.kv_indptr.tolist() == alone.kv_indptr.tolist()
    assert rows.last_page_len.tolist() == alone.last_page_len.tolist()
    assert batch.kv_indices[rows.pages].tolist() == alone.kv_indices.tolist()
    assert rows.num_rows == len(alone.slot_mapping)
    assert {t.dtype for t in (rows.qo_indptr, rows.kv_indptr, rows.last_page_len)} == {torch.int32}


@settings(max_examples=100, deadline=None)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    starts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    added=st.integers(0, 5),
)
def test_added_rows_are_sequences_of_one_token_in_one_page(page_size, starts, added):
    pages = iter(range(1, 1000))
    sequences = [
        SlowSequence(s, 1, tuple(next(pages) for _ in range(s // page_size + 1)), is_decode=True)
        for s in starts
    ]
    null = [SlowSequence(0, 1, (0,), is_decode=True)] * added
    rows = pad_decodes(batch_of(sequences, page_size), len(starts) + added)
    expected = batch_of(sequences + null, page_size)
    assert rows.qo_indptr.tolist() == expected.qo_indptr.tolist()
    assert rows.kv_indptr.tolist() == expected.kv_indptr.tolist()
    assert rows.last_page_len.tolist() == expected.last_page_len.tolist()
    assert rows.pages == slice(0, len(expected.kv_indices))
    assert rows.kv_indptr.dtype == rows.last_page_len.dtype == torch.int32
