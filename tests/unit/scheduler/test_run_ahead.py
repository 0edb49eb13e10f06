"""Steps that are submitted before the results of the one before are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from fakes.tape import TapeCapture
from prefixcache import LLM
from prefixcache.engine.engine import Engine
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from prefixcache.runner.torch.batch import resolve_pending
from prefixcache.runner.torch.results import ResultCopies
from prefixcache.types.request import Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import StepPlan
from support.loaded import torch_model
from support.paged_models import CPU, PagedServer
from support.plans import plan_of

TinyCheckpoint = Callable[..., Path]
PROMPT = [1, 2, 3, 4, 5]


def test_tokens_below_zero_are_those_of_the_step_before() -> None:
    sampled = torch.tensor([7, -1, 9])
    resolved = resolve_pending(torch.tensor([4, -1, -3, 5, -2]), sampled)
    assert resolved.tolist() == [4, 7, 9, 5, 0]


@pytest.mark.parametrize("graphs", [False, True])
def test_decodes_can_be_submitted_before_their_tokens_are_known(tiny_checkpoint, graphs):
    folder = tiny_checkpoint("qwen3")
    model = torch_model(folder)
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
    server.scheduler.complete(plan, server.results(plan))
    second = server.scheduler.schedule()
    server.cache.fill(second, server.runner.block_tables)
    in_flight = server.runner.submit(second)
    # The tokens of `second` are not read yet; its successor names them by their place.
    later = [dataclasses.replace(s, start=s.start + 1) for s in second.sequences]
    third = plan_of(later, [-1, -2], decodes=2)
    assert server.cache.ensure_slots([(s.request_id, s.start + 1) for s in later]) == 2
    server.cache.fill(third, server.runner.block_tables)
    after = server.runner.submit(third)
    seconds, thirds = (server.runner.results(step).outputs for step in (in_flight, after))
    assert [[s.token_id, t.token_id] for s, t in zip(seconds, thirds, strict=True)] == [
        answer[1:] for answer in expected
    ]


def test_two_copies_may_be_in_flight() -> None:
    copies = ResultCopies(2, CPU)
    ids = torch.tensor([1, 2, 3])
    first = copies.start(ids)
    ids += 10
    nothing = [copies.start(ids[:0]) for _ in range(3)]  # steps that tell nothing copy nothing
    second = copies.start(ids[:2])
    ids.zero_()
    assert (first().tolist(), second().tolist()) == ([1, 2, 3], [11, 12])
    assert [len(read()) for read in nothing] == [0, 0, 0]


def test_a_step_is_submitted_before_the_last_one_is_read() -> None:
    engine, runner, _ = make_engine(ahead=True)
    engine.add_request(make_request(max_tokens=3))
    read = [[o.token_ids for o in engine.step()] for _ in range(4)]
    assert read == [[], *([(token,)] for token in answer_alone(PROMPT, 3))]
    assert runner.num_ahead == 2
    assert not engine.has_unfinished()


def test_without_run_ahead_every_step_is_read_at_once() -> None:
    engine, _, _ = make_engine()
    engine.add_request(make_request(max_tokens=3))
    read = [[o.token_ids for o in engine.step()] for _ in range(3)]
    assert read == [[(token,)] for token in answer_alone(PROMPT, 3)]


def test_nothing_is_planned_on_a_step_whose_tokens_the_host_chooses() -> None:
    engine, runner, _ = make_engine(ahead=True)
    run_to_end(engine, make_request("a", logprobs=0))
    assert runner.num_ahead == 0


def test_end_tokens_are_banned_while_one_token_is_pending() -> None:
    eos = answer_alone(PROMPT, 3)[2]
    engine, _, _ = make_engine(ahead=True, eos_token_ids=[eos])
    outputs = run_to_end(engine, make_request(max_tokens=9, min_tokens=3))
    assert [o.token_ids[0] for o in outputs][:3] == [*answer_alone(PROMPT, 2), eos + 1]


def test_an_answer_that_ended_gives_no_token_to_one_that_takes_its_id() -> None:
    engine, _, cache = make_engine(ahead=True)
    engine.add_request(make_request("a", PROMPT, max_tokens=50))
    engine.add_request(make_request("b", [9, 8, 7], max_tokens=9))
    engine.step()
    engine.step()
    engine.abort(["a"])
    outputs = run_to_end(engine, make_request("a", [40, 41], max_tokens=6))
    tokens = [o.token_ids[0] for o in outputs if o.request_id == "a"]
    assert tokens == answer_alone([40, 41], 6)
    cache.core.validate()
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1


def test_pausing_reads_the_in_flight_step() -> None:
    engine, _, _ = make_engine(ahead=True)
    engine.add_request(make_request())
    assert engine.step() == []
    engine.control.pause()
    (output,) = engine.take_outputs()
    assert output.token_ids == tuple(answer_alone(PROMPT, 1))
    assert engine.take_outputs() == []
    engine.control.resume()
    rest = [o.token_ids[0] for _ in range(4) for o in engine.step()]
    assert rest == answer_alone(PROMPT, 4)[1:]


def test_requests_are_not_requeued_while_a_step_is_in_flight() -> None:
    engine, _, _ = make_engine(ahead=True)
    engine.add_request(make_request())
    engine.step()
    with pytest.raises(RuntimeError, match="in flight"):
        engine.requests.interrupt("recompute")


def test_a_step_that_fails_late_takes_the_one_on_top_with_it(caplog):
    engine, runner, cache = make_engine(ahead=True)
    engine.add_request(make_request("a"))
    engine.step()
    runner.failures = [RuntimeError("the device failed")]
    engine.add_request(make_request("b", [7, 8, 9]))
    outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", "error")]
    assert "the device failed" in caplog.text
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1
    assert tokens_of(run_to_end(engine, make_request("a"))) == answer_alone(PROMPT, 4)


def test_a_step_that_fails_at_once_leaves_the_one_before() -> None:
    engine, runner, cache = make_engine(ahead=True)
    engine.add_request(make_request("a", max_tokens=1))
    engine.add_request(make_request("b", [7, 8, 9]))
    engine.step()

    def refuse(plan: StepPlan) -> None:
        raise RuntimeError("no memory")

    runner.submit = refuse  # type: ignore[method-assign]
    outputs = engine.step()
    del runner.submit
    assert [(o.request_id, o.finish_reason) for o in outputs] == [
        ("a", "length"),
        ("b", None),
        ("b", "error"),
    ]
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1
    assert tokens_of(run_to_end(engine, make_request("a"))) == answer_alone(PROMPT, 4)


# The runner that may run ahead.
ON_TORCH: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention": "torch"}
REQUESTS = [
    ("The same question asked twice", {}),
    ("The same question asked once", {"logprobs": 1}),
    ("Que sera", {"temperature": 0.9, "seed": 3}),
    ("Que sera, sera", {"repetition_penalty": 1.3}),
    ("Que sera, sera", {"temperature": 0.9, "seed": 1, "presence_penalty": 1.5, "logprobs": 2}),
    ("Que", {"temperature": 1.2, "seed": 4, "top_p": 0.8, "top_k": 30, "logit_bias": {7: 2.0}}),
    ("A block of the cache holds", {"min_tokens": 5, "ignore_eos": False}),
    ("A block of the", {"stop": ("e",)}),
]


@pytest.mark.parametrize("num_blocks", [14, 200])
def test_real_answers_do_not_depend_on_run_ahead(tiny_checkpoint, num_blocks, monkeypatch):
    resolve = mock.Mock(side_effect=resolve_pending)
    monkeypatch.setattr("prefixcache.runner.torch.batch.resolve_pending", resolve)
    prompts = [prompt for prompt, _ in REQUESTS]
    params = [
        SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | options)
        for _, options in REQUESTS
    ]
    answers = []
    for ahead in (False, True):
        assert resolve.call_count == 0
        llm = LLM(str(tiny_checkpoint("qwen3")), **ON_TORCH, num_blocks=num_blocks)
        llm._engine._steps._runner.steps.runs_ahead = ahead
        alone = [llm.generate([prompts[i]], params[i], use_tqdm=False)[0] for i in (0, 2, 4, 7)]
        crowd = llm.generate(prompts, params, use_tqdm=False)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in (*alone, *crowd)])
        assert llm.control.stats()["blocks_in_use"] == 0
    assert answers[0] == answers[1]
    assert resolve.call_count > 10


@pytest.mark.parametrize("options", [options for _, options in REQUESTS], ids=str)
def test_every_option_is_planned_ahead(tiny_checkpoint, options, monkeypatch):
    resolve = mock.Mock(side_effect=resolve_pending)
    monkeypatch.setattr("prefixcache.runner.torch.batch.resolve_pending", resolve)
    llm = LLM(str(tiny_checkpoint("qwen3")), **ON_TORCH, num_blocks=50)
    llm._engine._steps._runner.steps.runs_ahead = True
    given = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True} | options
    (output,) = llm.generate(["Que sera"], SamplingParams(**given), use_tqdm=False)
    assert resolve.call_count >= len(output.outputs[0].token_ids) - 1 > 0


def test_log_probabilities_of_a_prompt_are_planned_ahead(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("prefixcache.runner.torch.model_runner._LOGPROB_ROWS", 5)
    resolve = mock.Mock(side_effect=resolve_pending)
    monkeypatch.setattr("prefixcache.runner.torch.batch.resolve_pending", resolve)
    delivered = []
    for ahead in (False, True):
        small = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 50}
        llm = LLM(str(tiny_checkpoint("qwen3")), **ON_TORCH, **small)
        runner, is_known = llm._engine._steps._runner.steps, []
        runner.runs_ahead = ahead
        start = runner.submit

        def submit(plan: StepPlan, start: Any = start, is_known: Any = is_known) -> Any:
            step = start(plan)
            is_known.append(step.is_known)
            return step

        monkeypatch.setattr(runner, "submit", submit)
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
        outputs = llm.generate([[*range(5, 45)], [7, 8, 9]], params, use_tqdm=False)
        delivered.append([(o.prompt_logprobs, o.outputs[0].token_ids) for o in outputs])
        assert set(is_known) == {not ahead}
        assert len(is_known) > 4
    assert delivered[0] == delivered[1]
    assert [len(prompt_logprobs) for prompt_logprobs, _ in delivered[0]] == [40, 3]
    assert resolve.call_count >= 2


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


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
