"""The step loop: validation, ends of answers, failures, metrics."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest

from fakes.fake_engine import IdText, make_engine, make_request
from fakes.fake_runner import answer_alone
from fakes.plain_runner import VOCAB_SIZE, next_token
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import EngineDeadError, InvalidRequestError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler import loading
from prefixcache.types.request import CacheOptions, Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams

PROMPT = [1, 2, 3, 4, 5]


def run(engine: Engine, *requests: Request) -> dict[str, list[RequestOutput]]:
    outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)
    for request in requests:
        engine.add_request(request)
    for _ in range(1000):
        if not engine.has_unfinished():
            return outputs
        for output in engine.step():
            outputs[output.request_id].append(output)
    raise AssertionError("the loop hangs")


def run_one(engine: Engine, **params: Any) -> list[RequestOutput]:
    return run(engine, make_request(**params))["a"]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_an_answer_ends_at_max_tokens() -> None:
    engine, _, cache = make_engine()
    outputs = run_one(engine, max_tokens=4)
    assert tokens_of(outputs) == answer_alone(PROMPT, 4)
    assert "".join(output.text for output in outputs) == "".join(
        f"{token} " for token in answer_alone(PROMPT, 4)
    )
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
    assert outputs[-1].num_prompt_tokens == 5
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1


def test_max_tokens_none_fills_the_context() -> None:
    engine, _, _ = make_engine(max_model_len=16)
    assert len(tokens_of(run_one(engine, max_tokens=None))) == 11


def test_an_eos_token_ends_the_answer_and_leaves_no_text() -> None:
    eos = answer_alone(PROMPT, 3)[2]
    engine, _, _ = make_engine(eos_token_ids=[eos])
    outputs = run_one(engine, max_tokens=9)
    assert tokens_of(outputs) == answer_alone(PROMPT, 3)
    last = outputs[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", None)


def test_ignore_eos_goes_on() -> None:
    eos = answer_alone(PROMPT, 3)[2]
    engine, _, _ = make_engine(eos_token_ids=[eos])
    assert len(tokens_of(run_one(engine, max_tokens=9, ignore_eos=True))) == 9


def test_a_stop_token_is_named_as_the_reason() -> None:
    stop = answer_alone(PROMPT, 2)[1]
    engine, _, _ = make_engine()
    last = run_one(engine, max_tokens=9, stop_token_ids=(stop,))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_min_tokens_puts_the_end_off() -> None:
    eos = answer_alone(PROMPT, 3)[2]
    engine, _, _ = make_engine(eos_token_ids=[eos])
    outputs = run_one(engine, max_tokens=9, min_tokens=3)
    assert tokens_of(outputs)[:2] == answer_alone(PROMPT, 2)
    assert tokens_of(outputs)[2] == (eos + 1) % VOCAB_SIZE


def test_a_stop_string_ends_the_answer_and_wins_over_the_length() -> None:
    stop = f"{answer_alone(PROMPT, 3)[2]} "
    engine, _, cache = make_engine()
    last = run_one(engine, max_tokens=3, stop=(stop,))[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", stop)
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1, VOCAB_SIZE]}, "token id 97; ids are from 0 to 96"),
        ({"prompt": [1, -3]}, "token id -3"),
        ({"prompt": [1, 2**31]}, "token id 2147483648, which no vocabulary has"),
        ({"prompt": [1, 2**70]}, "must be integers"),
        ({"prompt": [1.5]}, "must be integers"),
        ({"prompt": [True]}, "must be integers"),
        ({"prompt": [[1], [2, 3]]}, "must be integers"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias holds the token id 97"),
        ({"max_tokens": 200}, "context length is 128 tokens"),
    ],
)
def test_wrong_requests_are_refused_at_once(wrong: dict[str, Any], message: str) -> None:
    engine, _, _ = make_engine()
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.add_request(make_request(**wrong))
    assert caught.value.param in ("prompt", "logit_bias", "max_tokens")
    assert not engine.has_unfinished()


def test_abort_frees_running_and_waiting_requests() -> None:
    engine, _, cache = make_engine(max_num_seqs=1)
    engine.add_request(make_request("a", max_tokens=50))
    engine.add_request(make_request("b", max_tokens=50))
    engine.step()
    ended = engine.abort(["a", "b", "nobody"])
    assert [(output.request_id, output.finish_reason) for output in ended] == [
        ("a", "abort"),
        ("b", "abort"),
    ]
    assert not engine.has_unfinished()
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1


def test_an_unusable_row_fails_its_request_alone() -> None:
    engine, runner, cache = make_engine()
    runner.broken_tokens = {50}
    outputs = run(
        engine, make_request("bad", [50, 1, 2]), make_request("good", PROMPT, max_tokens=3)
    )
    assert [(output.finish_reason, output.error) for output in outputs["bad"]] == [
        ("error", "broken")
    ]
    assert tokens_of(outputs["good"]) == answer_alone(PROMPT, 3)
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1


def test_a_failing_detokenizer_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(IdText):
        def push(self, token_ids: Any, *, ended_by_token: bool = False) -> str:
            raise RuntimeError("no such byte")

    def make(params: SamplingParams) -> IdText:
        return Broken(params) if params.max_tokens == 7 else IdText(params)

    engine, _, cache = make_engine(make_detokenizer=make)
    with caplog.at_level(logging.CRITICAL):
        outputs = run(engine, make_request("bad", max_tokens=7), make_request("good", [9, 8]))
    assert [output.error for output in outputs["bad"]] == [
        "RuntimeError, of which the log says more"
    ]
    assert tokens_of(outputs["good"]) == answer_alone([9, 8], 4)
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1


def test_a_failed_step_ends_its_requests_and_the_engine_serves_on() -> None:
    engine, runner, cache = make_engine()
    runner.failures = [RuntimeError("no memory")]
    (failed,) = run_one(engine)
    assert (failed.finish_reason, failed.error) == (
        "error",
        "RuntimeError, of which the log says more",
    )
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1
    assert tokens_of(run_one(engine)) == answer_alone(PROMPT, 4)


def test_a_failed_step_publishes_nothing() -> None:
    engine, runner, _ = make_engine()
    runner.failures = [RuntimeError("no memory")]
    run_one(engine)
    assert run_one(engine)[0].num_cached_tokens == 0


def test_a_device_that_cannot_compute_an_empty_step_ends_the_engine() -> None:
    engine, runner, _ = make_engine()
    runner.lost = RuntimeError("device lost")
    with pytest.raises(EngineDeadError, match=r"failed with .*device lost.* an empty one"):
        run_one(engine)


def leaves_nothing(engine: Engine, cache: CacheManager) -> bool:
    """Whether the engine knows of no request, and serves one under the id "a"."""
    return (
        not engine.has_unfinished()
        and tokens_of(run_one(engine)) == answer_alone(PROMPT, 4)
        and cache.core.num_free_blocks == cache.size.num_blocks - 1
    )


def test_a_request_without_a_detokenizer_leaves_no_orphan() -> None:
    def make(params: SamplingParams) -> IdText:
        if params.max_tokens == 7:
            raise RuntimeError("no such tokenizer")
        return IdText(params)

    engine, _, cache = make_engine(make_detokenizer=make)
    with pytest.raises(RuntimeError, match="no such tokenizer"):
        engine.add_request(make_request(max_tokens=7))
    assert leaves_nothing(engine, cache)


def test_a_request_that_the_cache_refuses_leaves_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, cache = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "start", lambda request, **_: float(10**400))
        with pytest.raises(OverflowError):
            engine.add_request(make_request())
    assert leaves_nothing(engine, cache)


def test_an_answer_that_cannot_begin_again_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    made: list[SamplingParams] = []

    def make(params: SamplingParams) -> IdText:
        made.append(params)
        if len(made) == 3:
            raise RuntimeError("no such tokenizer")
        return IdText(params)

    engine, _, cache = make_engine(make_detokenizer=make)
    engine.add_request(make_request("bad"))
    engine.add_request(make_request("good"))
    engine.step()
    with caplog.at_level(logging.CRITICAL):
        engine.requests.restart_all()
    failed, restarted = engine.take_outputs()
    assert (failed.request_id, failed.error) == ("bad", "RuntimeError, of which the log says more")
    assert (restarted.request_id, restarted.restarted) == ("good", True)
    assert tokens_of([output for _ in range(4) for output in engine.step()]) == answer_alone(
        PROMPT, 4
    )
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1


@pytest.mark.parametrize("salt", ["\ud800", "a\udfffb", b"bytes", 7])
def test_a_salt_that_cannot_be_hashed_names_the_field(salt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cache_salt must be text") as caught:
        CacheOptions(salt=salt)
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("field", ["priority", "arrival_time"])
@pytest.mark.parametrize("value", [float("nan"), "soon", None, [1]])
def test_what_has_no_place_in_an_order_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} must be a number") as caught:
        Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(), **{field: value})
    assert caught.value.param == field


def test_prompt_logprobs_come_with_the_first_token() -> None:
    engine, _, _ = make_engine(max_num_batched_tokens=8)
    prompt = list(range(20))
    first, second = run_one(engine, prompt=prompt, prompt_logprobs=0, max_tokens=2)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    known = [
        (logprobs.token_id, logprobs.logprob) for logprobs in first.prompt_logprobs[1:] if logprobs
    ]
    assert known == [(t, -float(next_token(prompt[:t]))) for t in prompt[1:]]
    assert second.prompt_logprobs is None


def test_prompt_logprobs_are_the_same_after_a_preemption() -> None:
    engine, _, _ = make_engine(num_blocks=13, max_model_len=48, max_num_batched_tokens=8)
    prompt = list(range(20))
    old = make_request("old", list(range(40, 60)), max_tokens=20)
    new = make_request("new", prompt, prompt_logprobs=0, max_tokens=20)
    outputs = run(engine, old, new)
    assert engine.metrics.registry.get_sample_value("prefixcache:num_preemptions_total")
    first = outputs["new"][0].prompt_logprobs
    assert first is not None
    assert [logprobs.token_id for logprobs in first[1:] if logprobs] == prompt[1:]
    assert tokens_of(outputs["new"]) == answer_alone(prompt, 20)


def test_unseeded_requests_take_their_seeds_from_the_engines() -> None:
    def seeds(engine_seed: int) -> list[int]:
        engine, runner, _ = make_engine(seed=engine_seed)
        run(engine, make_request("a"), make_request("b"), make_request("c", seed=5))
        return [s.sampling.seed for s in runner.plans[0].sequences if s.sampling]

    assert seeds(1) == seeds(1)
    assert seeds(1)[:2] != seeds(2)[:2]
    assert len(set(seeds(1))) == 3
    assert seeds(1)[2] == 5


def test_metrics_count_what_happened() -> None:
    engine, _, _ = make_engine()
    for name, max_tokens in (("a", 3), ("b", 2)):
        request = make_request(name, range(18), max_tokens=max_tokens)
        run(engine, dataclasses.replace(request, arrival_time=time.monotonic()))
    value = engine.metrics.registry.get_sample_value
    expected = {
        "prompt_tokens_total": 36,
        "generation_tokens_total": 5,
        "prefix_cache_queries_total": 36,
        "prefix_cache_hits_total": 16,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "num_preemptions_total": 0,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 3,
        "e2e_request_latency_seconds_count": 2,
        "iteration_tokens_total_sum": 18 + 1 + 1 + 2 + 1,
        "step_overhead_seconds_count": 5,
        "request_prompt_tokens_sum": 36,
        "request_generation_tokens_sum": 5,
    }
    phases = ("request_queue_time", "request_prefill_time", "request_decode_time")
    times = [value(f"prefixcache:{phase}_seconds_sum") for phase in phases]
    assert min(times) > 0
    assert sum(times) == pytest.approx(value("prefixcache:e2e_request_latency_seconds_sum"))
    assert {name: value(f"prefixcache:{name}") for name in expected} == expected
    assert value("prefixcache:request_success_total", {"finished_reason": "length"}) == 2


def test_a_prompt_alone_counts_no_generated_token() -> None:
    engine, _, _ = make_engine()
    (ended,) = run_one(engine, prompt=range(18), max_tokens=0)
    assert ended.started_at is not None
    value = engine.metrics.registry.get_sample_value
    assert value("prefixcache:request_prompt_tokens_sum") == 18
    assert value("prefixcache:request_generation_tokens_sum") == 0
    assert value("prefixcache:generation_tokens_total") == 0


def test_metrics_show_running_and_waiting_requests() -> None:
    engine, _, _ = make_engine(max_num_seqs=1, num_blocks=11)
    engine.add_request(make_request("a", range(8), max_tokens=20))
    engine.add_request(make_request("b", range(8), max_tokens=20))
    engine.step()
    value = engine.metrics.registry.get_sample_value
    assert value("prefixcache:num_requests_running") == 1
    assert value("prefixcache:num_requests_waiting") == 1
    assert value("prefixcache:kv_cache_usage_perc") == pytest.approx(0.2)


def test_a_request_whose_blocks_are_read_waits_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = mock.Mock(wraps=time, sleep=mock.Mock())
    monkeypatch.setattr(loading, "time", clock)
    asking: list[str] = []

    def needs_reads(reads: loading.Reads, request_id: str, hits: int) -> bool:
        asking.append(request_id)
        return bool(reads._num_left) and not request_id.startswith("short")

    monkeypatch.setattr(loading.Reads, "_needs_reads", needs_reads)
    monkeypatch.setattr(loading.Reads, "_num_left", 3)
    engine, _, cache = make_engine()
    engine.add_request(make_request("long"))
    engine.add_request(make_request("given up"))
    assert tokens_of(run_until(engine, make_request("short"))) == answer_alone(PROMPT, 4)
    value = engine.metrics.registry.get_sample_value
    assert value("prefixcache:num_requests_waiting") == 2
    assert not clock.sleep.called
    engine.step()
    assert clock.sleep.called, "a step without rows does not ask again at once"
    assert asking.count("long") == 1
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1
    engine.abort(["given up"])
    assert value("prefixcache:num_requests_waiting") == 1
    monkeypatch.setattr(loading.Reads, "_num_left", 0)
    assert tokens_of(run(engine)["long"]) == answer_alone(PROMPT, 4)
    monkeypatch.setattr(loading.Reads, "_num_left", 3)
    engine.add_request(make_request("forgotten"))
    engine.step()
    engine.forget_all()
    assert value("prefixcache:num_requests_waiting") == 0


def run_until(engine: Engine, request: Request) -> list[RequestOutput]:
    """Until this request has ended, whatever others do."""
    engine.add_request(request)
    outputs: list[RequestOutput] = []
    while not (outputs and outputs[-1].finished):
        outputs += [output for output in engine.step() if output.request_id == request.request_id]
    return outputs
