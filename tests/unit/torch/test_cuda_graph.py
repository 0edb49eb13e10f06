"""Decode graphs on a CPU: sizes, padding, and replays of a recording in place of a CUDA graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from fakes.plain_drafts import HostileDrafter
from fakes.tape import TapeCapture
from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from prefixcache.runner.torch.cuda_graph import choose_size, graph_sizes
from prefixcache.runner.torch.decoder_model import DecoderModel
from support.loaded import torch_model
from support.paged_models import CPU, PagedServer

TinyCheckpoint = Callable[..., Path]


def load(folder: Path) -> DecoderModel:
    return torch_model(folder)


def server(model: DecoderModel, capture: TapeCapture, **options) -> PagedServer:
    leaders: dict[AttentionSpec, FlashInferAttention] = {}

    def attention(spec: AttentionSpec) -> FlashInferAttention:
        one = make(spec, leader=leaders.get(spec))
        leaders.setdefault(spec, one)
        return one

    make = partial(
        FlashInferAttention,
        dtype=torch.float32,
        device=CPU,
        kernels=capture.kernels,
        batch_invariant=options.pop("batch_invariant", False),
        workspace_bytes=16,
    )
    return PagedServer(model, attention, capture=capture, **options)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 7, 8, 9, 64, 100, 256, 300, 1024])
def test_sizes_ascend_to_the_largest_batch_and_waste_little(max_seqs: int) -> None:
    sizes = graph_sizes(max_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_seqs)
    for count in range(1, max_seqs + 1):
        size = choose_size(sizes, count)
        assert size == min(s for s in sizes if s >= count)
        assert size - count <= max(7, size // 4)


def test_no_size_holds_more_than_the_largest() -> None:
    assert choose_size((1, 2, 4), 5) is None
    with pytest.raises(ValueError, match="max_seqs"):
        graph_sizes(0)


@pytest.mark.parametrize(
    ("architecture", "invariant"),
    [("gemma3", False), ("gemma3", True), ("qwen2", False), ("qwen3", True)],
)
def test_replays_answer_as_plain_steps_do(tiny_checkpoint, architecture, invariant):
    model = load(tiny_checkpoint(architecture))
    capture = TapeCapture()
    graphs = server(model, capture, batch_invariant=invariant)
    asked = prompts(5, 19, 33)
    assert graphs.generate(asked, 9) == PagedServer(model).generate(asked, 9)
    assert capture.num_replays >= 7
    again = graphs.generate(prompts(12), 5)
    assert again == PagedServer(model).generate(prompts(12), 5)


def test_nothing_is_collected_while_a_graph_is_captured(tiny_checkpoint: TinyCheckpoint) -> None:
    """A tensor that is freed during a capture would end it with an error."""

    class Old:
        """Something that only the collector frees."""

        def __init__(self) -> None:
            self.itself = self

    collecting = []

    class Watching(TapeCapture):
        def __call__(self, step):
            collecting.append(gc.isenabled() or old() is not None)
            return super().__call__(step)

    old = weakref.ref(Old())
    server(load(tiny_checkpoint("qwen3")), Watching())
    assert set(collecting) == {False}
    assert gc.isenabled()


def test_batches_shrink_through_the_sizes_and_others_run_plainly(tiny_checkpoint):
    model = load(tiny_checkpoint("smollm2"))
    capture = TapeCapture()
    graphs = server(model, capture, max_tokens=16, num_blocks=40)
    asked = prompts(40, 3, 17, 29, 8)
    plain = PagedServer(model)
    assert graphs.generate(asked, 11) == plain.generate(asked, 11)
    pure = [p for p in graphs.plans if all(_is_decode(s) for s in p.sequences)]
    assert capture.num_replays == len(pure)
    assert len({len(plan.sequences) for plan in pure}) > 1, "all batches had one size"
    assert len(pure) < len(graphs.plans)


def _is_decode(sequence) -> bool:
    return sequence.sampling is not None and (
        sequence.start >= sequence.sampling.tokens.num_prompt_tokens
    )


def test_other_sampling_follows_on_the_graphs_logits(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load(tiny_checkpoint("qwen3"))
    capture = TapeCapture()
    graphs, plain = server(model, capture), PagedServer(model)
    options = {"temperature": 0.8, "top_p": 0.9, "logprobs": 0, "seed": 5}
    assert graphs.generate(prompts(9, 14), 8, **options) == plain.generate(
        prompts(9, 14), 8, **options
    )
    assert capture.num_replays
    for name, values in plain.logprobs.items():
        assert graphs.logprobs[name] == pytest.approx(values, abs=1e-4)


def test_guesses_are_rows_of_the_same_graphs(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load(tiny_checkpoint("gemma3"))
    asked, options = prompts(5, 19), {"temperature": 0.8, "logprobs": 0, "frequency_penalty": 0.4}
    plain = PagedServer(model)
    expected = plain.generate(asked, 30, **options)
    capture = TapeCapture()
    graphs = server(model, capture)
    answers = {f"request-{n}": asked[n] + expected[n] for n in range(2)}
    graphs.scheduler.drafter = HostileDrafter(5, answers, 384, most=3)
    assert graphs.generate(asked, 30, **options) == expected
    for name, values in plain.logprobs.items():
        assert graphs.logprobs[name] == pytest.approx(values, abs=1e-4)
    pure = [p for p in graphs.plans if p.sequences and p.num_decodes == len(p.sequences)]
    assert capture.num_replays == len(pure)
    assert sum(bool(plan.drafts) for plan in pure) > 5
    assert len(graphs.plans) < len(plain.plans)


def test_added_rows_leave_all_blocks_but_the_null_block_alone(tiny_checkpoint):
    model = load(tiny_checkpoint("smollm2"))
    graphs, plain = server(model, TapeCapture()), PagedServer(model)
    asked = prompts(6, 10, 4, 15, 7)
    graphs.generate(asked, 6)
    plain.generate(asked, 6)
    for ours, theirs in zip(graphs.kv, plain.kv, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], atol=1e-4, rtol=1e-4)
    assert ours[0].any(), "no row was added"


def test_unusable_logits_end_their_sequence_alone(tiny_checkpoint, monkeypatch):
    model = load(tiny_checkpoint("smollm2"))
    graphs = server(model, TapeCapture())
    graphs.generate(prompts(5, 6), 3)
    graphs.scheduler.add(_request("a", [5, 6, 7]), seed=1)
    graphs.scheduler.add(_request("b", [8, 9, 10, 11]), seed=1)
    plan = graphs.scheduler.schedule()
    graphs.cache.fill(plan, graphs.runner.block_tables)
    graphs.scheduler.complete(plan, graphs.results(plan))
    plan = graphs.scheduler.schedule()
    graphs.cache.fill(plan, graphs.runner.block_tables)
    page = int(graphs.runner.block_tables[0].indices[0])
    graphs.kv[0][page, 1, 0] = float("nan")
    first, second = graphs.results(plan)
    assert first.error is not None
    assert first.token_id is None
    assert second.token_id is not None


def _request(name: str, prompt: list[int]):
    from prefixcache.types.request import Request
    from prefixcache.types.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0.0)
    return Request(request_id=name, prompt_token_ids=prompt, params=params)
