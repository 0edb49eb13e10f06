"""The FlashInfer backend with its kernels replaced by torch: planning, models, refusals."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ConfigError
from prefixcache.kv.specs import KVGroup
from prefixcache.models.decoder.shapes import LinearShape
from prefixcache.models.loader import load_model
from prefixcache.runner.torch.attention.base import AttentionBatch, AttentionGroup, AttentionSpec
from prefixcache.runner.torch.attention.flashinfer import (
    FlashInferAttention,
    build_kernels,
    load_kernels,
    make_flashinfer,
)
from prefixcache.runner.torch.attention.flashinfer_kernels import SharedMemory, needed_workspace
from prefixcache.runner.torch.attention.flashinfer_plan import (
    check_supported,
    needs_tensor_cores,
    pad_decodes,
    planned_tiles_alone,
)
from prefixcache.runner.torch.attention.registry import AttentionOptions, make_attention
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.ops.linear import TorchLinear
from prefixcache.runner.torch.ops.sets import Ops
from reference import flashinfer_reference
from reference.paged_attention import SlowSequence, batch_of
from support.loaded import torch_model
from support.paged_models import CPU, PagedServer

TinyCheckpoint = Callable[..., Path]
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)


# With 4 query heads a key-value head, whose decodes go to tensor cores.
WIDE = dataclasses.replace(SPEC, num_heads=8)
INVARIANT = pytest.mark.parametrize("invariant", [False, True])


def backend(spec: AttentionSpec = SPEC, **options) -> FlashInferAttention:
    return FlashInferAttention(
        spec,
        **{"dtype": torch.float32, "device": CPU, "kernels": flashinfer_reference}
        | {"workspace_bytes": 16}
        | options,
    )


def load(folder: Path) -> DecoderModel:
    return torch_model(folder)


def prompts(count: int, length: int, shared: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count * length)
    common = torch.randint(3, 384, (shared,), generator=generator).tolist()
    return [
        common + torch.randint(3, 384, (length - i,), generator=generator).tolist()
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("architecture", "invariant"),
    [
        *(("gemma3", False), ("gemma3", True), ("llama", False), ("qwen3", True)),
        *(("mistral", True), ("mistral-window", False)),
    ],
)
def test_models_answer_as_with_plain_torch_attention(tiny_checkpoint, architecture, invariant):
    model = load(tiny_checkpoint(architecture))
    asked = prompts(5, 37, shared=9)
    options = {"temperature": 0.0, "logprobs": 0}
    plain = PagedServer(model)
    ours = PagedServer(model, partial(backend, batch_invariant=invariant))
    assert ours.generate(asked, **options) == plain.generate(asked, **options)
    for name, values in plain.logprobs.items():
        assert ours.logprobs[name] == pytest.approx(values, abs=1e-4)


def test_a_hybrid_models_answers_have_the_same_bits_on_a_hit_and_in_chunks(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    answers = _hybrid_answers(tiny_checkpoint("gemma3"))
    assert answers["hit"] == answers["chunks"] == answers["cold"]


def test_a_hybrid_models_bits_would_change_were_tables_not_aligned(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(
        "prefixcache.runner.torch.attention.flashinfer_planner.grid_pages", lambda _page_size: 1
    )
    answers = _hybrid_answers(tiny_checkpoint("gemma3"))
    assert answers["hit"] != answers["cold"]


def _hybrid_answers(folder: Path) -> dict[str, list[list[float]]]:
    """Log probabilities of two answers; linears and norms keep their rows' bits too."""
    config = ModelConfig.from_hf(folder)
    make = partial(DecoderModel, config, RowByRow(torch.float32, CPU), config.max_context_length)
    model = load_model(make, config, folder)
    asked = prompts(2, 30, shared=50)
    make_server = partial(_led_server, model, num_blocks=300)
    server, answers = make_server(), {}
    for name in ("cold", "hit"):
        server.generate(asked, 5, logprobs=0)
        answers[name] = list(server.logprobs.values())[-2:]
    assert server.scheduler.admission.counter.hit_tokens > 100
    chunked = make_server(max_tokens=11)
    chunked.generate(asked, 5, logprobs=0)
    return answers | {"chunks": list(chunked.logprobs.values())}


class RowByRow(Ops):
    """Ops whose rows do not depend on the batch: each is computed alone."""

    def linear(self, shape: LinearShape) -> TorchLinear:
        return AloneLinear(self.empty(shape.outputs, shape.inputs))

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        rows = x.split(1)
        return torch.cat([Ops.rms_norm(row, weight, eps, offset=offset) for row in rows])

    @staticmethod
    def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
        return torch.cat([Ops.gelu_tanh_and_mul(row) for row in gate_up.split(1)])


class AloneLinear(TorchLinear):
    def __call__(self, x_TI: Tensor, residual_TO: Tensor | None = None) -> Tensor:  # noqa: N803
        rows = [F.linear(row, self.weight_OI) for row in x_TI.contiguous().split(1)]
        return torch.cat(rows) if residual_TO is None else residual_TO + torch.cat(rows)


def _led_server(model: DecoderModel, **options: int) -> PagedServer:
    """Groups of one window run by the plan of the first of them."""
    leaders: dict[AttentionSpec, FlashInferAttention] = {}

    def made(spec: AttentionSpec) -> FlashInferAttention:
        one = backend(spec, batch_invariant=True, leader=leaders.get(spec))
        leaders.setdefault(spec, one)
        return one

    return PagedServer(model, made, **options)


def test_the_steps_mix_decodes_with_chunks_and_hit_the_cache(tiny_checkpoint):
    model = load(tiny_checkpoint("qwen3"))
    asked = prompts(6, 41, shared=16)
    ours = PagedServer(model, backend, num_blocks=48, max_tokens=16)
    assert ours.generate(asked, 12) == PagedServer(model).generate(asked, 12)
    kinds = [{s.num_tokens == 1 for s in plan.sequences} for plan in ours.plans]
    assert {True, False} in kinds, "no step held decodes with chunks"
    assert ours.scheduler.num_preemptions, "the pool was large enough for all"
    assert ours.scheduler.admission.counter.hit_tokens, "no prompt hit the cache"


@pytest.mark.parametrize(("invariant", "hopper"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("window", [None, 5])
def test_a_graphs_step_computes_what_a_plain_one_does(window, invariant, hopper):
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5, sliding_window=window)
    make = partial(backend, spec, batch_invariant=invariant, hopper=hopper)
    sequences = [
        SlowSequence(n, 1, tuple(range(5 * i + 1, 5 * i + 6)), True, (n - 4) // 4 * (window == 5))
        for i, n in enumerate((4, 7, 16))
    ]
    batch = batch_of(sequences, page_size=4)
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(20, 2, 4, 2, 8, generator=generator)
    q = torch.randn(4, 4, 8, generator=generator)
    k, v = torch.randn(2, 4, 2, 8, generator=generator)
    plain, graph = make(), make()
    pools = pool.clone(), pool.clone()
    plain.bind([pools[0]])
    plain.plan(batch)
    graph.bind([pools[1]])
    graph.reserve_graphs([2, 4], max_page_indices=15)
    graph.plan_graph(batch, 4)
    outputs = graph.run(0, q, k, v)[:3], plain.run(0, q[:3], k[:3], v[:3])
    torch.testing.assert_close(*outputs)
    assert torch.equal(*outputs) or not invariant
    assert torch.equal(pools[0][1:], pools[1][1:]), "a row that was added wrote to a real block"
    assert not torch.equal(pools[0][0], pools[1][0]), "the added row wrote nothing"


WINDOWS = (None, 5, 5, 9)
GROUPS = [dataclasses.replace(SPEC, sliding_window=window) for window in WINDOWS]


@pytest.mark.parametrize(("graph", "hopper"), [(False, False), (True, True)])
@pytest.mark.parametrize(("invariant", "base"), [(False, SPEC), (False, WIDE), (True, SPEC)])
def test_groups_that_share_memory_are_planned_before_any_of_them_runs(
    invariant, base, hopper, graph
):
    """Each with its window and its own tables; two layers of each, as a model interleaves them."""
    memory = SharedMemory(CPU, 1 << 20)
    starts = (21, 9, 0) if graph else (21, 9)
    chunks = [] if graph else [(0, 6), (17, 7)]
    lengths = [(start, 1) for start in starts] + chunks
    rows = 4 if graph else sum(count for _, count in lengths)
    generator = torch.Generator().manual_seed(4)
    pools = torch.randn(2, 99, 2, 4, 2, 8, generator=generator)
    q, k, v = torch.randn(2, len(WINDOWS), rows, base.num_heads + 4, 8, generator=generator).split(
        [base.num_heads, 2, 2], dim=3
    )
    free = iter(torch.randperm(98, generator=generator).add(1).tolist())
    shared, alone, leaders = [], [], {}
    for window in WINDOWS:
        spec = dataclasses.replace(base, sliding_window=window)
        sequences = []
        for start, count in lengths:
            behind = start + 1 - spec.sliding_window if spec.sliding_window else 0
            left_out = max(0, behind) // 4
            pages = [next(free) for _ in range(-(-(start + count) // 4) - left_out)]
            listed = (0,) * left_out + tuple(pages)
            sequences.append(SlowSequence(start, count, listed, count == 1, left_out))
        batch = batch_of(sequences, page_size=4)
        joined = {"memory": memory, "leader": leaders.get(spec)}
        for backends, given in ((shared, joined), (alone, {"workspace_bytes": 1 << 20})):
            attention = backend(spec, batch_invariant=invariant, hopper=hopper, **given)
            attention.bind(list(pools.clone()))
            backends.append((attention, batch))
        leaders.setdefault(spec, shared[-1][0])
    for attention, batch in shared:
        _plan(attention, batch, rows if graph else None)
    for layer in range(2):
        for group, (attention, batch) in enumerate(alone):
            given = q[layer, group], k[layer, group], v[layer, group]
            _plan(attention, batch, rows if graph else None)
            expected = attention.run(layer, *given)
            assert torch.equal(shared[group][0].run(layer, *given), expected)


def _plan(attention: FlashInferAttention, batch: AttentionBatch, size: int | None) -> None:
    if size is None:
        attention.plan(batch)
    else:
        attention.reserve_graphs([size], max_page_indices=len(batch.kv_indices))
        attention.plan_graph(batch, size)


def test_tables_of_one_window_and_other_lengths_are_refused() -> None:
    leader = backend(GROUPS[1])
    follower = backend(GROUPS[1], leader=leader)
    for attention in (leader, follower):
        attention.bind([torch.zeros(9, 2, 4, 2, 8)])
    with pytest.raises(RuntimeError, match="planned before the others"):
        follower.plan(batch_of([SlowSequence(7, 1, (1, 2), True)], page_size=4))
    leader.plan(batch_of([SlowSequence(7, 1, (1, 2), True)], page_size=4))
    for other in ((6, (3, 4)), (8, (3, 4, 5))):
        with pytest.raises(RuntimeError, match="tables of the same lengths"):
            follower.plan(batch_of([SlowSequence(*other[:1], 1, other[1], True)], page_size=4))


def test_groups_share_the_workspace_and_the_pools_table_and_a_plan_where_they_are_equal() -> None:
    memory = SharedMemory(CPU, 16)
    ours = [backend(spec, memory=memory) for spec in (GROUPS[0], GROUPS[1], GROUPS[3])]
    follower = backend(GROUPS[1], leader=ours[1])
    assert follower.planner is ours[1].planner
    assert follower.memory is memory
    for attention in ours:
        attention.bind([torch.zeros(3, 2, 4, 2, 8)])
    assert len({a.planner._makes._workspace.data_ptr() for a in ours}) == 1
    assert len({a._pool_table[0].data_ptr() for a in ours}) == 1
    plans = [
        p for a in ours for p in (a.planner._makes._prefill_plans, a.planner._makes._decode_plans)
    ]
    assert len({p.data_ptr() for p in plans}) == 2 * len(ours)


def test_a_models_groups_are_made_at_once_and_each_kernel_is_tried_once(monkeypatch) -> None:
    """A window has kernels of its own; groups of one window have the same."""
    monkeypatch.setattr(
        "prefixcache.runner.torch.attention.flashinfer.load_kernels", _reference_kernels
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    tried = mock.Mock(side_effect=build_kernels)
    monkeypatch.setattr("prefixcache.runner.torch.attention.flashinfer.build_kernels", tried)
    full = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)
    window = dataclasses.replace(full, sliding_window=20)
    groups = [
        AttentionGroup(full, KVGroup((2,))),
        AttentionGroup(window, KVGroup((0,))),
        AttentionGroup(window, KVGroup((1,))),
    ]
    options = AttentionOptions(dtype=torch.bfloat16)
    made = make_attention("flashinfer", groups, options)
    assert [call.args[1] for call in tried.mock_calls] == [full, window]
    assert len({backend.memory for backend in made.backends}) == 1
    assert made.batch_invariant
    packed, first, second = (backend.planner for backend in made.backends)
    assert first is second
    assert packed._make_decode is not None
    assert first._make_decode is None


def _reference_kernels(_device: torch.device) -> types.ModuleType:
    return flashinfer_reference


@pytest.mark.parametrize(
    ("invariant", "heads"),
    [
        *((invariant, heads) for invariant in (False, True) for heads in ((28, 4), (64, 8))),
        *((False, (4, 1)), (True, (1, 1))),
    ],
)
def test_the_plan_of_a_graph_fits_what_it_pins_on_the_host(invariant, heads) -> None:
    """And it is little: models of seven groups have well over a hundred graphs."""
    spec = AttentionSpec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, scale=0.1)
    memory = SharedMemory(CPU, 16)
    memory.workspace = torch.empty(1 << 30, dtype=torch.uint8)  # which nobody touches
    attention = backend(spec, batch_invariant=invariant, memory=memory)
    attention.bind([torch.zeros(2, 2, 4, heads[1], 64)])
    attention.reserve_graphs([1, 8, 512], max_page_indices=2048)
    for size in (1, 8, 512):
        decodes = [SlowSequence(3, 1, (1,), True)] * size
        attention.plan_graph(batch_of(decodes, page_size=4), size)
    pinned = [k._wrapper._int_workspace for k in attention.planner._graphs.values()]
    assert max(len(p) for p in pinned) <= 256 * 1024 + 512 * heads[0] * 64


@pytest.mark.parametrize(("page_size", "head_dim"), [(4, 8), (16, 256), (80, 8)])
def test_bits_do_not_depend_on_the_pages_left_out_behind_a_window(page_size, head_dim):
    """Each chunk lists other pages: the key tiles must begin at the same tokens all the same."""
    attend = partial(_attend_in_chunks, page_size, head_dim)
    whole = attend([260])
    for chunks in ([31, 229], [64, 64, 64, 68], [243, 17], [97, 96, 64, 3], [256, *[1] * 4]):
        assert torch.equal(attend(chunks), whole)


def test_bits_would_depend_on_the_pages_left_out_were_tables_not_aligned(monkeypatch) -> None:
    monkeypatch.setattr(
        "prefixcache.runner.torch.attention.flashinfer_planner.grid_pages", lambda _page_size: 1
    )
    attend = partial(_attend_in_chunks, 16, 8)
    assert not torch.equal(attend([64, 64, 64, 68]), attend([260]))


def _attend_in_chunks(page_size: int, head_dim: int, chunks: list[int]) -> torch.Tensor:
    """A prompt's rows, with all pages left out that are behind the window of its first row."""
    spec = AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=head_dim, scale=0.5, sliding_window=37
    )
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(260, 2, head_dim, generator=generator)
    k, v = torch.randn(2, 260, 1, head_dim, generator=generator)
    attention = backend(spec, batch_invariant=True)
    pages = tuple(range(1, 2 + 260 // page_size))
    attention.bind([torch.zeros(len(pages) + 1, 2, page_size, 1, head_dim)])
    out, start = [], 0
    for count in chunks:
        left_out = max(0, start - 36) // page_size
        listed = (0,) * left_out + pages[left_out:]
        one = SlowSequence(start, count, listed, count == 1, left_out)
        rows = slice(start, start + count)
        attention.plan(batch_of([one], page_size))
        out.append(attention.run(0, q[rows], k[rows], v[rows]))
        start += count
    return torch.cat(out)


@pytest.mark.parametrize("graph", [False, True])
def test_no_block_but_a_sequences_own_can_reach_its_rows(graph: bool) -> None:
    """A value behind the window is multiplied by zero, and zero times NaN is NaN."""
    spec = dataclasses.replace(SPEC, sliding_window=5)
    attention = backend(spec, batch_invariant=True)
    pool = torch.full((20, 2, 4, 2, 8), torch.nan)
    pool[[7, 8, 9]] = 1.0
    attention.bind([pool])
    one = SlowSequence(27, 1, (0, 0, 0, 0, 0, 7, 8), True, left_out=5)
    if graph:
        attention.reserve_graphs([1], max_page_indices=3)
        attention.plan_graph(batch_of([one], 4), 1)
    else:
        attention.plan(batch_of([one, SlowSequence(16, 3, (0, 0, 0, 8, 9), left_out=3)], 4))
    rows = 1 if graph else 4
    out = attention.run(0, torch.ones(rows, 4, 8), *torch.ones(2, rows, 2, 8))
    assert out.isfinite().all()


@INVARIANT
def test_a_graph_launches_no_block_whose_tables_nobody_wrote(invariant: bool) -> None:
    """28 query heads on 4: FlashInfer would launch 66 tiles for one sequence, and 91 for 64."""
    spec = AttentionSpec(num_heads=28, num_kv_heads=4, head_dim=8, scale=0.5)
    attention = backend(spec, batch_invariant=invariant)
    attention.bind([torch.zeros(95, 2, 4, 4, 8)])
    attention.reserve_graphs([1, 64], max_page_indices=95)
    for size in (1, 64):
        decodes = [SlowSequence(3, 1, (page,), True) for page in range(1, size + 1)]
        attention.plan_graph(batch_of(decodes, page_size=4), size)
        out = attention.run(0, torch.ones(size, 28, 8), *torch.ones(2, size, 4, 8))
        assert out.isfinite().all()


def test_tables_go_to_the_device_from_pinned_memory(monkeypatch) -> None:
    """From other memory a copy waits for all work before it."""
    pinned = []

    def pin(table: torch.Tensor) -> torch.Tensor:
        pinned.append(table.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    seen = []

    class Kernels(types.SimpleNamespace):
        append_paged_kv_cache = staticmethod(flashinfer_reference.append_paged_kv_cache)

    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        base = getattr(flashinfer_reference, name)

        def plan(self, *args, base=base, **kwargs):
            seen.extend(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
            base.plan(self, *args, **kwargs)

        setattr(Kernels, name, type(name, (base,), {"plan": plan}))
    attention = backend(kernels=Kernels)
    attention.planner._makes._pins = True
    attention.bind([torch.zeros(9, 2, 4, 2, 8)])
    mixed = [SlowSequence(2, 1, (1,), True), SlowSequence(0, 6, (2, 3))]
    attention.plan(batch_of(mixed, page_size=4))
    attention.reserve_graphs([2], max_page_indices=9)
    attention.plan_graph(batch_of(mixed[:1], page_size=4), 2)
    pages = [t for t in seen if t.data_ptr() not in {own.data_ptr() for own in pinned}]
    assert len(seen) == 4 + 5 + 4
    assert len(pages) == 3  # the page indices, which are on the device already


@pytest.mark.parametrize("graph", [False, True])
@INVARIANT
def test_the_hosts_tables_may_be_filled_again_once_a_step_is_planned(
    monkeypatch: pytest.MonkeyPatch, invariant: bool, graph: bool
) -> None:
    """The next step is planned while the device computes this one."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    decodes = [SlowSequence(9, 1, (1, 2, 3), True), SlowSequence(5, 1, (4, 5), True)]
    sequences = decodes if graph else [*decodes, SlowSequence(2, 4, (6, 7))]
    generator = torch.Generator().manual_seed(6)
    pool = torch.randn(9, 2, 4, 2, 8, generator=generator)
    rows = 2 if graph else 6
    q, k, v = torch.randn(rows, 8, 8, generator=generator).split([4, 2, 2], dim=1)
    outputs = []
    for refilled in (False, True):
        batch = batch_of(sequences, page_size=4)
        attention = backend(batch_invariant=invariant)
        attention.planner._makes._pins = True
        attention.bind([pool.clone()])
        if graph:
            attention.reserve_graphs([2], max_page_indices=9)
            attention.plan_graph(batch, 2)
        else:
            attention.plan(batch)
        if refilled:
            for table in (batch.qo_indptr, batch.kv_indptr, batch.last_page_len):
                table.fill_(1)
        outputs.append(attention.run(0, q, k, v))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "splitting"),
    [
        (28, 4, [1, 64, 256, 512]),  # Qwen2.5-7B
        (64, 8, [1, 64, 256]),  # Llama 70B
        (16, 8, [1, 64, 256, 512, 1024]),  # the plain kernel needs less
        (32, 1, [1, 64]),  # more for one row than the others for many
    ],
)
def test_graphs_split_keys_as_far_as_the_workspace_has_room_and_none_is_refused(
    heads: int, kv_heads: int, splitting: list[int]
) -> None:
    made = []

    class Kernels:
        append_paged_kv_cache = staticmethod(flashinfer_reference.append_paged_kv_cache)
        BatchPrefillWithPagedKVCacheWrapper = (
            flashinfer_reference.BatchPrefillWithPagedKVCacheWrapper
        )

        class BatchDecodeWithPagedKVCacheWrapper(
            flashinfer_reference.BatchDecodeWithPagedKVCacheWrapper
        ):
            def plan(self, *args, **kwargs):
                made.append(not kwargs["disable_split_kv"])
                super().plan(*args, **kwargs)

    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=128, scale=0.1)
    attention = backend(spec, kernels=Kernels, workspace_bytes=needed_workspace([spec], CPU))
    attention.bind([torch.zeros(2, 2, 4, kv_heads, 128)])
    sizes = [1, 64, 256, 512, 1024]
    attention.reserve_graphs(sizes, max_page_indices=1)
    for size in sizes:
        attention.plan_graph(batch_of([SlowSequence(3, 1, (1,), True)], page_size=4), size)
    assert [size for size, splits in zip(sizes, made, strict=True) if splits] == splitting


def test_kernels_that_cannot_be_built_say_what_to_install(caplog) -> None:
    caplog.set_level("INFO")
    build_kernels(backend(), SPEC, torch.float32, CPU)
    assert "compiled once" in caplog.text
    failing = types.SimpleNamespace(**vars(flashinfer_reference))

    def fail(*_args) -> None:
        raise RuntimeError("Could not find nvcc\nand a long log")

    failing.append_paged_kv_cache = fail
    with pytest.raises(ConfigError, match=r"\(Could not find nvcc\)\. Install prebuilt"):
        build_kernels(backend(kernels=failing), SPEC, torch.float32, CPU)


def test_a_plan_of_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="plans FA2 by 16 numbers"):
        planned_tiles_alone([66, 0, 0, 16, *[0] * 12], num_rows=1, group_size=7)


def test_rows_added_after_a_larger_step_keep_nothing_of_it() -> None:
    generator = torch.Generator().manual_seed(4)
    pool = torch.randn(20, 2, 4, 2, 8, generator=generator)
    q = torch.randn(4, 4, 8, generator=generator)
    k, v = torch.randn(2, 4, 2, 8, generator=generator)
    graph = backend()
    graph.bind([pool])
    graph.reserve_graphs([4], max_page_indices=16)
    full = [SlowSequence(9, 1, tuple(range(3 * i + 1, 3 * i + 4)), True) for i in range(4)]
    graph.plan_graph(batch_of(full, page_size=4), 4)
    graph.run(0, q, k, v)
    before = pool.clone()
    graph.plan_graph(batch_of(full[:1], page_size=4), 4)
    null_key, null_value = k[3].clone(), v[3].clone()
    out = graph.run(0, q, k + 1, v + 1)
    page, offset = full[0].pages[2], 1
    before[page, 0, offset], before[page, 1, offset] = k[0] + 1, v[0] + 1
    assert torch.equal(pool[1:], before[1:]), "an added row wrote where the larger step did"
    assert torch.equal(pool[0, 0, 0], null_key + 1)
    alone = (null_value + 1).repeat_interleave(2, dim=0)
    torch.testing.assert_close(out[3], alone)


def test_a_graph_takes_no_step_that_it_cannot_hold() -> None:
    chunk = batch_of([SlowSequence(0, 3, (1,))], page_size=4)
    with pytest.raises(ValueError, match="cannot run 0 decodes of 1"):
        pad_decodes(chunk, 4)
    decodes = batch_of([SlowSequence(1, 1, (p,), True) for p in (1, 2, 3)], page_size=4)
    with pytest.raises(ValueError, match="graph of 2 rows"):
        pad_decodes(decodes, 2)


def test_decode_goes_to_tensor_cores_for_groups_without_a_plain_kernel() -> None:
    groups = {
        g: needs_tensor_cores(AttentionSpec(num_heads=g, num_kv_heads=1, head_dim=64, scale=1))
        for g in range(1, 17)
    }
    assert [g for g, needed in groups.items() if not needed] == [1, 2, 3]


@pytest.mark.parametrize(
    ("invariant", "hopper", "kept"),
    [(False, True, False), (True, True, True), (True, False, False)],
)
def test_a_backend_says_what_it_keeps_equal(invariant, hopper, kept) -> None:
    assert backend(batch_invariant=invariant, hopper=hopper).batch_invariant is kept


@pytest.mark.parametrize(
    ("spec", "invariant", "hopper", "expected"),
    [
        (SPEC, False, True, {("fa2", False, False), ("fa3", None, False)}),
        (SPEC, False, False, {("fa2", False, False), ("fa2", None, False)}),
        (WIDE, False, True, {("fa2", True, False), ("fa3", None, False)}),
        (WIDE, True, True, {("fa3", None, True)}),
        (WIDE, True, False, {("fa2", True, False), ("fa2", None, False)}),
    ],
)
def test_kernels_are_chosen_by_name_and_never_split_keys_in_invariant_mode(
    spec, invariant, hopper, expected
) -> None:
    made = []

    class Kernels:
        append_paged_kv_cache = staticmethod(flashinfer_reference.append_paged_kv_cache)

        class BatchPrefillWithPagedKVCacheWrapper(
            flashinfer_reference.BatchPrefillWithPagedKVCacheWrapper
        ):
            def plan(self, *args, **kwargs):
                made.append((self.backend, None, kwargs["disable_split_kv"]))
                super().plan(*args, **kwargs)

        class BatchDecodeWithPagedKVCacheWrapper(
            flashinfer_reference.BatchDecodeWithPagedKVCacheWrapper
        ):
            def plan(self, *args, **kwargs):
                made.append((self.backend, self._use_tensor_cores, kwargs["disable_split_kv"]))
                super().plan(*args, **kwargs)

    attention = backend(spec, kernels=Kernels, batch_invariant=invariant, hopper=hopper)
    attention.bind([torch.zeros(9, 2, 4, 2, 8)])
    mixed = [SlowSequence(2, 1, (1,), True), SlowSequence(0, 6, (2, 3))]
    attention.plan(batch_of(mixed, page_size=4))
    assert set(made) == expected


def test_packed_decodes_are_a_tile_a_key_value_head_and_compute_the_same() -> None:
    """28 query heads on 4: seven rows of each of four heads in place of 28 heads of one row."""
    spec = AttentionSpec(num_heads=28, num_kv_heads=4, head_dim=8, scale=0.5)
    shapes = []

    class Kernels:
        append_paged_kv_cache = staticmethod(flashinfer_reference.append_paged_kv_cache)

        class BatchPrefillWithPagedKVCacheWrapper(
            flashinfer_reference.BatchPrefillWithPagedKVCacheWrapper
        ):
            def run(self, q, kv, **kwargs):
                shapes.append((tuple(q.shape), self._options["causal"]))
                return super().run(q, kv, **kwargs)

    lengths = ((9, 1), (2, 1), (0, 1), (4, 6), (0, 3))
    pages = iter(range(1, 40))
    sequences = [
        SlowSequence(start, count, tuple(next(pages) for _ in range(3)), count == 1)
        for start, count in lengths
    ]
    batch = batch_of(sequences, page_size=4)
    generator = torch.Generator().manual_seed(5)
    pool = torch.randn(40, 2, 4, 4, 8, generator=generator)
    q = torch.randn(12, 28, 8, generator=generator)
    k, v = torch.randn(2, 12, 4, 8, generator=generator)
    outputs = []
    for num_decodes in (batch.num_decodes, 0):
        attention = backend(spec, kernels=Kernels, batch_invariant=True)
        attention.bind([pool.clone()])
        attention.plan(dataclasses.replace(batch, num_decodes=num_decodes))
        outputs.append(attention.run(0, q, k, v))
    assert torch.equal(*outputs)
    assert shapes == [((21, 4, 8), False), ((9, 28, 8), True), ((12, 28, 8), True)]


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 5}, {"num_kv_heads": 4}], ids=["window", "group of one"]
)
def test_what_cannot_be_packed_is_not(changes) -> None:
    attention = backend(dataclasses.replace(SPEC, **changes), batch_invariant=True)
    attention.bind([torch.zeros(2, 2, 4, changes.get("num_kv_heads", 2), 8)])
    assert attention.planner._decode is None


def test_calls_out_of_order_say_what_is_missing() -> None:
    batch = batch_of([SlowSequence(0, 1, (1,), True)], page_size=4)
    attention = backend()
    with pytest.raises(RuntimeError, match="needs bind"):
        attention.plan(batch)
    attention.bind([torch.zeros(2, 2, 4, 2, 8)])
    with pytest.raises(RuntimeError, match="needs a plan"):
        attention.run(0, torch.zeros(1, 4, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    with pytest.raises(RuntimeError, match="needs reserve_graphs"):
        attention.plan_graph(batch, 1)


def test_more_slots_than_int32_can_count_are_refused() -> None:
    with pytest.raises(ConfigError, match="2147483647 KV cache slots"):
        backend().bind([torch.empty(2**27, 2, 16, 2, 8, device="meta")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head_dim 96"),
        ({"dtype": torch.float32}, "torch.float32"),
    ],
)
def test_shapes_and_types_without_a_kernel_are_refused(change, message) -> None:
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=change.get("head_dim", 64), scale=0.5
    )
    with pytest.raises(ConfigError, match=message):
        check_supported(spec, change.get("dtype", torch.bfloat16))


def test_asking_for_it_without_a_device_or_the_package_says_what_to_install(monkeypatch) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        make_flashinfer([SPEC], dtype=torch.bfloat16, device=CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[cuda\]'"):
        load_kernels(torch.device("cuda"))


@pytest.mark.slow
def test_importing_the_backend_neither_imports_flashinfer_nor_says_a_word() -> None:
    code = (
        "import sys; import prefixcache.runner.torch.attention.flashinfer; "
        "import prefixcache.runner.torch.cuda_graph; "
        "assert 'flashinfer' not in sys.modules; import torch; "
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
