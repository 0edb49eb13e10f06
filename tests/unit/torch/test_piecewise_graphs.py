"""Steps in pieces on a CPU, with recordings in place of CUDA graphs, against plain steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fakes.tape import TapeCapture
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from prefixcache.runner.torch.piecewise_graphs import step_sizes
from support.loaded import torch_model
from support.paged_models import PagedServer
from unit.torch.test_cuda_graph import prompts, server

TinyCheckpoint = Callable[..., Path]


def test_sizes_end_where_the_step_or_the_model_is_large() -> None:
    assert step_sizes(8192, 600_000_000)[-1] == 2048
    assert step_sizes(8192, 7_600_000_000)[-1] == 512
    assert step_sizes(100, 600_000_000) == (16, 32, 64)
    assert step_sizes(8, 600_000_000) == step_sizes(8192, 10**12) == ()
    sizes = step_sizes(8192, 1)
    assert list(sizes) == sorted(set(sizes))
    for size, larger in pairwise(sizes):
        assert larger <= (2 * size if size <= 64 else 1.5 * size)


@pytest.mark.parametrize(
    ("architecture", "invariant"), [("gemma3", False), ("gemma3", True), ("qwen3", True)]
)
def test_answers_and_kv_are_those_of_plain_steps(
    tiny_checkpoint: TinyCheckpoint, architecture: str, invariant: bool
) -> None:
    """Prompts of several lengths, in chunks and next to decodes; some steps fit no size."""
    model = torch_model(tiny_checkpoint(architecture))
    plain, capture = PagedServer(model, num_blocks=150), TapeCapture()
    graphs = server(
        model, capture, step_sizes=(4, 12, 25), num_blocks=150, batch_invariant=invariant
    )
    for asked, num_tokens in ((prompts(5, 19, 33), 9), (prompts(70, 3), 5), (prompts(12), 4)):
        assert graphs.generate(asked, num_tokens) == plain.generate(asked, num_tokens)
    for ours, theirs in zip(graphs.kv, plain.kv, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], atol=1e-4, rtol=1e-4)
    counts = [sum(s.num_tokens for s in plan.sequences) for plan in graphs.plans]
    pure = sum(plan.num_decodes == len(plan.sequences) for plan in graphs.plans)
    steps = sum(
        count <= 25 and plan.num_decodes < len(plan.sequences)
        for count, plan in zip(counts, graphs.plans, strict=True)
    )
    assert 2 <= steps < len(graphs.plans) - pure, "some steps must fit, and some not"
    # Each layer's attention ends a piece.
    assert capture.num_replays == pure + steps * (model.config.num_layers + 1)


def test_attention_that_rotates_nothing_itself_runs_between_pieces_too(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlashInferAttention, "rotate_and_run", None)
    model = torch_model(tiny_checkpoint("qwen3"))
    plain, capture = PagedServer(model), TapeCapture()
    graphs = server(model, capture, step_sizes=(16, 32))
    asked = prompts(5, 19, 33)
    assert graphs.generate(asked, 9) == plain.generate(asked, 9)
    assert capture.num_replays > 9


def test_more_tokens_than_the_largest_size_are_refused(tiny_checkpoint: TinyCheckpoint) -> None:
    graphs = server(torch_model(tiny_checkpoint("qwen3")), TapeCapture(), step_sizes=(4,))
    graphs.scheduler.add(_request(6), seed=1)
    plan = graphs.scheduler.schedule()
    graphs.cache.fill(plan, graphs.runner.block_tables)
    batch = graphs.runner._buffers.load(plan, torch.zeros(0, dtype=torch.int64))
    held = graphs.runner.graphs
    assert held is not None
    assert held.steps is not None
    assert not held.steps.fits(batch)
    with pytest.raises(ValueError, match="largest has 4"):
        held.steps.forward(batch)


def _request(length: int):
    from prefixcache.types.request import Request
    from prefixcache.types.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0.0)
    return Request(request_id="a", prompt_token_ids=prompts(length)[0], params=params)
