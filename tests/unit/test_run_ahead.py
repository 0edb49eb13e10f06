"""Steps that are submitted before the results of the one before are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from fake_engine import make_engine, make_request
from paged_models import CPU, PagedServer
from prefixcache.attention.flashinfer import FlashInferAttention
from prefixcache.config import ModelConfig
from prefixcache.engine.cuda import shares_answers
from prefixcache.engine.engine import Engine
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.models.registry import load_model
from prefixcache.request import Request, RequestOutput
from prefixcache.runner.batch import resolve_pending
from prefixcache.runner.pending import TokenCopies
from prefixcache.sampling_params import SamplingParams
from prefixcache.step_plan import StepPlan
from tape import TapeCapture

TinyCheckpoint = Callable[..., Path]


def test_tokens_below_zero_are_those_of_the_step_before() -> None:
    sampled = torch.tensor([7, -1, 9])
    resolved = resolve_pending(torch.tensor([4, -1, -3, 5, -2]), sampled)
    assert resolved.tolist() == [4, 7, 9, 5, 0]


@pytest.mark.parametrize("graphs", [False, True])
def test_decodes_can_be_submitted_before_their_tokens_are_known(
    tiny_checkpoint: TinyCheckpoint, graphs: bool
) -> None:
    folder = tiny_checkpoint("qwen3")
    model = load_model(ModelConfig.from_hf(folder), folder, dtype=torch.float32, device=CPU)
    capture = TapeCapture()
    attention = partial(
        FlashInferAttention,
        dtype=torch.float32,
        device=CPU,
        kernels=capture.kernels,
        workspace_bytes=16,
    )
    server = PagedServer(model, attention, max_seqs=2, capture=capture if graphs else None)
    prompts = [[5, 6, 7, 8, 9], [200, 100, 50]]
    expected = PagedServer(model).generate(prompts, 3)
    for name, prompt in zip("ab", prompts, strict=True):
        params = SamplingParams(max_tokens=3, temperature=0.0)
        server.scheduler.add(
            Request(request_id=name, prompt_token_ids=prompt, params=params), seed=0
        )
    plan = server.scheduler.schedule()
    server.cache.fill(plan, server.runner.block_tables)
    server.scheduler.complete(plan, server.runner.execute(plan))
    second = server.scheduler.schedule()
    server.cache.fill(second, server.runner.block_tables)
    in_flight = server.runner.submit(second)
    # The tokens of `second` are not read yet; its successor names them by their place.
    third = StepPlan(
        tuple(
            dataclasses.replace(s, token_ids=[-1 - i], start=s.start + 1)
            for i, s in enumerate(second.sequences)
        )
    )
    assert server.cache.append([("a", 4), ("b", 4)]) == 2
    server.cache.fill(third, server.runner.block_tables)
    after = server.runner.submit(third)
    seconds, thirds = in_flight.outputs(), after.outputs()
    assert [[s.token_id, t.token_id] for s, t in zip(seconds, thirds, strict=True)] == [
        answer[1:] for answer in expected
    ]


def test_two_copies_may_be_under_way() -> None:
    copies = TokenCopies(4, CPU)
    ids = torch.tensor([1, 2, 3])
    first = copies.start(ids)
    ids += 10
    second = copies.start(ids[:2])
    ids.zero_()
    assert (first(), second()) == ([1, 2, 3], [11, 12])


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_failed_step_withdraws_what_was_published_ahead_of_the_device(runs_ahead: bool) -> None:
    engine, runner, _ = make_engine()
    runner.runs_ahead = runs_ahead
    prompt = list(range(1, 14))
    run_to_end(engine, make_request("first", prompt))
    runner.failures = [RuntimeError("the device failed")]
    run_to_end(engine, make_request("failing", [50, 51, 52]))
    (last, *_) = run_to_end(engine, make_request("later", prompt))
    assert (last.num_cached_tokens == 0) is runs_ahead


def run_to_end(engine: Engine, request: Request) -> list[RequestOutput]:
    engine.add_request(request)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs


def _manager(*, publish_answers: bool) -> CacheManager:
    cache = CacheManager(20, 4, publish_answers=publish_answers)
    cache.start(Request(request_id="a", prompt_token_ids=[1] * 6, params=SamplingParams()))
    cache.commit("a", 0, 12)
    cache.append_tokens(["a"] * 1, [2])
    for token in (3, 4, 5, 6, 7):
        cache.append_tokens(["a"], [token])
    cache.mark_filled(["a"], [12])
    cache.free(["a"])
    follow_up = [1] * 6 + [2, 3, 4, 5, 6, 7, 8]
    cache.start(Request(request_id="b", prompt_token_ids=follow_up, params=SamplingParams()))
    return cache


def test_answers_blocks_are_shared_unless_their_bits_differ_from_a_prefills() -> None:
    assert _manager(publish_answers=True).count_hits("b") == 12
    assert _manager(publish_answers=False).count_hits("b") == 4


@pytest.mark.parametrize(
    ("invariance", "shared"), [("off", True), ("split", False), ("unified", True)]
)
def test_only_the_split_mode_keeps_answers_to_itself(invariance: str, shared: bool) -> None:
    from prefixcache.attention import flashinfer_reference
    from prefixcache.attention.base import AttentionSpec

    attention = FlashInferAttention(
        AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0),
        dtype=torch.float32,
        device=CPU,
        kernels=flashinfer_reference,
        invariance=invariance,
        workspace_bytes=16,
    )
    assert shares_answers(attention) is shared
