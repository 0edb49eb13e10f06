"""A request whose share of cached tokens is too small goes back to its caller, uncomputed."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest
import torch

from fakes.fake_engine import make_engine, make_request
from fakes.fake_memory import NAMES, make_versioned_engine
from fakes.fake_runner import FakeRunner, answer_alone
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import ConfigError, InvalidRequestError
from prefixcache.types.request import CacheOptions
from support.scheduler_bench import Bench, prompt_of


def refused(bench: Bench, name: str, prompt: list[int], threshold: float | None) -> bool:
    """Whether the request ends below the threshold; otherwise it runs to its end."""
    bench.add(name, prompt, cache=CacheOptions(hit_threshold=threshold))
    before = bench.cache.core.stats()
    bench.run()
    rejected = bench.scheduler.take_rejected()
    if not rejected:
        return False
    ((request_id, ending, _),) = rejected
    assert (request_id, ending.finish_reason) == (name, "cache_threshold")
    assert bench.answers[name] == []
    assert bench.cache.core.num_free_blocks == bench.cache.size.num_blocks - 1
    assert bench.cache.core.stats()["allocations"] == before["allocations"]
    return True


def warmed(cached: int, **rules: float) -> Bench:
    """A bench of blocks of 4 tokens where `cached` tokens of `prompt_of` are cached."""
    bench = Bench(**rules)
    bench.add("warm", prompt_of(cached), max_tokens=1, cache=CacheOptions(hit_threshold=0.0))
    bench.run()
    return bench


@pytest.mark.parametrize(
    ("length", "threshold", "expected"),
    [
        (16, 1.0, False),
        (17, 1.0, False),
        (20, 1.0, False),
        (21, 0.8, False),
        (21, 0.81, True),
        (40, 16 / 36, False),
        (40, 0.45, True),
        (40, 0.0, False),
    ],
)
def test_the_ratio_is_of_the_full_blocks_that_could_be_hits(length, threshold, expected):
    assert refused(warmed(16), "a", prompt_of(length), threshold) is expected


@pytest.mark.parametrize("length", [1, 4, 5, 16, 17, 20])
@pytest.mark.parametrize("groups", [("full",), ("full", ("sliding_window", 8))])
def test_all_that_could_be_a_hit_is_enough_for_each_kind_of_model(groups, length):
    """Of 1 to 4 tokens nothing can be, so a caller that wants all of it cached gets nothing."""
    bench = Bench(groups=groups)
    bench.add("warm", prompt_of(length), max_tokens=1)
    bench.run()
    assert refused(bench, "a", prompt_of(length), 1.0) == (length < 5)


def test_a_refusal_says_how_many_tokens_were_cached() -> None:
    bench = warmed(16)
    bench.add("a", prompt_of(40), cache=CacheOptions(hit_threshold=0.45))
    bench.run()
    assert [prompt.num_cached_tokens for *_, prompt in bench.scheduler.take_rejected()] == [16]


@pytest.mark.parametrize("length", [1, 3, 4])
def test_short_prompts(length: int) -> None:
    assert refused(Bench(), "a", prompt_of(length), 0.001)
    assert not refused(Bench(), "a", prompt_of(length), 0.0)


def test_the_requests_threshold_wins_also_when_it_is_zero() -> None:
    bench = warmed(16, global_cache_hit_threshold=0.8)
    assert refused(bench, "a", prompt_of(40), None)
    assert not refused(bench, "b", prompt_of(40), 0.0)
    assert not refused(bench, "c", prompt_of(40, 1), 0.0)
    assert refused(bench, "d", prompt_of(40, 2), 0.1)
    assert bench.scheduler.admission.num_below_threshold == {"global": 1, "request": 1}


@pytest.mark.parametrize("own", [None, 1.0])
def test_no_threshold_ends_a_prompt_alone(own: float | None) -> None:
    bench = Bench(global_cache_hit_threshold=0.8)
    bench.add("a", prompt_of(40), max_tokens=0, cache=CacheOptions(hit_threshold=own))
    bench.step()
    assert bench.scheduler.take_rejected() == []
    assert bench.cache.core.stats()["cached_blocks"] == 10


def test_without_reading_the_ratio_is_zero() -> None:
    bench = warmed(16)
    bench.add("a", prompt_of(16), cache=CacheOptions(read=False, hit_threshold=0.1))
    bench.run()
    assert [end.finish_reason for _, end, _ in bench.scheduler.take_rejected()] == [
        "cache_threshold"
    ]
    off = Bench(enable_prefix_caching=False)
    assert refused(off, "a", prompt_of(16), 0.1)


def test_a_prompt_that_is_computed_for_its_log_probabilities_has_no_hits() -> None:
    bench = warmed(16)
    cache = CacheOptions(hit_threshold=0.5)
    bench.add("a", prompt_of(20), cache=cache, params={"prompt_logprobs": 1})
    bench.run()
    assert [end.finish_reason for _, end, _ in bench.scheduler.take_rejected()] == [
        "cache_threshold"
    ]
    assert not refused(bench, "b", prompt_of(20), 0.5)


def test_a_waiter_is_judged_when_its_wait_ends() -> None:
    bench = Bench(share_in_flight=True)
    bench.add("a", prompt_of(32))
    bench.add("b", [*prompt_of(32), 1, 2], cache=CacheOptions(hit_threshold=0.9))
    bench.run()
    assert bench.scheduler.sharing.num_waits == 1
    assert len(bench.answers["b"]) == 4


PROMPT = prompt_of(8, 3)


def preempted(first_max_tokens: int, threshold: float) -> Bench:
    """A pool of 36 tokens in which "second", all of whose prompt is cached, makes way for "first".

    "second" has left 16 tokens in full blocks then. "first" recycles most of them where its answer
    is long.
    """
    bench = Bench(num_blocks=10, max_model_len=36)
    bench.add("warm", PROMPT, max_tokens=1)
    bench.run()
    bench.add("first", prompt_of(8), max_tokens=first_max_tokens)
    cache = CacheOptions(hit_threshold=threshold)
    bench.add("second", PROMPT, max_tokens=24, cache=cache)
    bench.run()
    assert bench.scheduler.num_preemptions == 1
    assert len(bench.answers["first"]) == first_max_tokens
    return bench


@pytest.mark.parametrize("threshold", [0.3, 1.0])
def test_a_preempted_request_whose_blocks_were_recycled_is_not_recomputed(threshold):
    bench = preempted(24, threshold)
    assert [end.finish_reason for _, end, _ in bench.scheduler.take_rejected()] == [
        "cache_threshold"
    ]
    sent = bench.answers["second"]
    assert len(sent) == 9
    assert sent == answer_alone(PROMPT, 9)
    assert bench.cache.core.num_free_blocks == bench.cache.size.num_blocks - 1


@pytest.mark.parametrize(
    ("max_tokens", "threshold"),
    [
        (12, 0.3),
        (12, 1.0),
        (24, 0.0),
        (24, 0.25),  # one of its four blocks is left
    ],
)
def test_a_preempted_request_goes_on_with_the_blocks_or_threshold_that_it_has(
    max_tokens: int, threshold: float
) -> None:
    bench = preempted(max_tokens, threshold)
    assert not bench.scheduler.take_rejected()
    assert bench.answers["second"] == answer_alone(PROMPT, 24)


def in_flight(max_tokens: int = 20, **options: Any) -> tuple[Engine, FakeRunner, list[int]]:
    """An engine that serves "a", whose prompt was cached and which asks for all of it."""
    engine, runner, _ = make_versioned_engine(**options)
    tokens: list[int] = []
    for threshold, limit in ((0.0, 1), (1.0, max_tokens)):
        request = dataclasses.replace(
            make_request("a", PROMPT, max_tokens=limit),
            cache=CacheOptions(hit_threshold=threshold),
        )
        engine.add_request(request)
        for _ in range(3 if threshold else 1):
            (output,) = engine.step()
            tokens += output.token_ids
    return engine, runner, tokens[1:]


def rest(engine: Engine) -> tuple[list[int], str | None]:
    """What still comes of "a", and how it ends."""
    tokens: list[int] = []
    reason = None
    for _ in range(100):
        for output in [*engine.take_outputs(), *engine.step()]:
            tokens += output.token_ids
            reason = output.finish_reason
        if not engine.has_unfinished():
            return tokens, reason
    raise AssertionError("the loop hangs")


def test_after_a_sleep_nothing_is_recomputed_that_asked_not_to_be() -> None:
    engine, runner, sent = in_flight()
    assert len(sent) == 3
    engine.control.sleep()
    engine.control.wake_up()
    steps = len(runner.plans)
    assert rest(engine) == ([], "cache_threshold")
    assert len(runner.plans) == steps


def test_after_a_weight_update_nothing_is_recomputed_that_asked_not_to_be() -> None:
    engine, runner, _ = in_flight()
    steps = len(runner.plans)
    engine.control.load_state_dict({name: torch.tensor(1) for name in NAMES}, "recompute")
    (output,) = engine.take_outputs()
    assert output.restarted, "what was sent is void"
    assert rest(engine) == ([], "cache_threshold")
    assert len(runner.plans) == steps


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("pauses", [True, False])
def test_a_reset_and_a_pause_together_end_a_request_and_each_alone_does_not(resets, pauses):
    engine, _, sent = in_flight()
    if resets:
        engine.control.reset_prefix_cache()
    if pauses:
        engine.control.pause("recompute")
        engine.control.resume()
    tokens, reason = rest(engine)
    if resets and pauses:
        assert (tokens, reason) == ([], "cache_threshold")
    else:
        assert (len(sent + tokens), reason) == (20, "length")


def test_the_log_says_ratio_threshold_and_source(caplog: pytest.LogCaptureFixture) -> None:
    bench = warmed(16)
    with caplog.at_level(logging.INFO):
        assert refused(bench, "a", prompt_of(40), 0.5)
    assert "Request a ends: cache hit ratio 0.4444 is below the request threshold of 0.5000." in (
        caplog.text
    )


def test_the_caller_gets_an_answer_without_tokens_and_a_count() -> None:
    engine, runner, _ = make_engine()
    request = dataclasses.replace(make_request("a"), cache=CacheOptions(hit_threshold=0.5))
    engine.add_request(request)
    (output,) = engine.step()
    assert (output.finish_reason, output.token_ids, output.text) == ("cache_threshold", (), "")
    assert not runner.plans
    assert not engine.has_unfinished()
    registry = engine.metrics.registry
    name = "prefixcache:cache_threshold_refusals_total"
    assert registry.get_sample_value(name, {"source": "request"}) == 1


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, True, "0.5"])
def test_wrong_thresholds_are_named(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="cache_hit_threshold") as caught:
        CacheOptions(hit_threshold=value)  # type: ignore[arg-type]
    assert caught.value.param == "cache_hit_threshold"
    with pytest.raises(ConfigError, match="global_cache_hit_threshold"):
        SchedulerConfig(global_cache_hit_threshold=value)  # type: ignore[arg-type]
