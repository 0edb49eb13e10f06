"""A request whose share of cached tokens is too small goes back to its caller, uncomputed."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest

from fake_engine import make_engine, make_request
from prefixcache.config import SchedulerConfig
from prefixcache.exceptions import ConfigError, InvalidRequestError
from prefixcache.request import CacheOptions
from scheduler_bench import Bench, prompt_of


def refused(bench: Bench, name: str, prompt: list[int], threshold: float | None) -> bool:
    """Whether the request ends below the threshold; otherwise it runs to its end."""
    bench.add(name, prompt, cache=CacheOptions(hit_threshold=threshold))
    before = bench.cache.stats()
    bench.run()
    refusals = bench.scheduler.take_refused()
    if not refusals:
        return False
    ((refusal),) = refusals
    assert (refusal.request_id, refusal.finish_reason) == (name, "cache_threshold")
    assert bench.answers[name] == []
    assert bench.cache.num_free_blocks == bench.cache.num_blocks
    assert bench.cache.stats()["allocations"] == before["allocations"]
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
        (17, 1.0, True),
        (17, 16 / 17, False),
        (20, 0.8, False),
        (20, 0.81, True),
        (40, 0.4, False),
        (40, 0.41, True),
        (40, 0.0, False),
    ],
)
def test_the_ratio_counts_matched_full_blocks_of_all_tokens(
    length: int, threshold: float, expected: bool
) -> None:
    assert refused(warmed(16), "a", prompt_of(length), threshold) is expected


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
    assert bench.scheduler.num_below_threshold == {"global": 1, "request": 1}


def test_without_reading_the_ratio_is_zero() -> None:
    bench = warmed(16)
    bench.add("a", prompt_of(16), cache=CacheOptions(read=False, hit_threshold=0.1))
    bench.run()
    assert [r.finish_reason for r in bench.scheduler.take_refused()] == ["cache_threshold"]
    off = Bench(enable_prefix_caching=False)
    assert refused(off, "a", prompt_of(16), 0.1)


def test_a_waiter_is_judged_when_its_wait_ends() -> None:
    bench = Bench(share_in_flight=True)
    bench.add("a", prompt_of(32))
    bench.add("b", [*prompt_of(32), 1, 2], cache=CacheOptions(hit_threshold=0.9))
    bench.run()
    assert bench.scheduler.num_in_flight_waits == 1
    assert len(bench.answers["b"]) == 4


def test_a_preempted_request_returns_to_its_caller_instead_of_being_recomputed() -> None:
    bench = Bench(num_blocks=10, max_model_len=36)
    bench.add("first", prompt_of(8), max_tokens=24)
    bench.add("second", prompt_of(8, 3), max_tokens=24, cache=CacheOptions(hit_threshold=0.0))
    bench.step()
    bench.step()
    streamed = list(bench.answers["second"])
    assert streamed
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert len(bench.answers["second"]) == 24

    bench = Bench(num_blocks=10, max_model_len=36)
    bench.add("first", prompt_of(8), max_tokens=24)
    bench.add("second", prompt_of(8, 3), max_tokens=24)
    state = bench.scheduler._states["second"]
    bench.step()
    object.__setattr__(state.request.cache, "hit_threshold", 1.0)
    bench.run()
    assert [r.finish_reason for r in bench.scheduler.take_refused()] == ["cache_threshold"]
    assert bench.answers["second"][: len(streamed)] == streamed
    assert 0 < len(bench.answers["second"]) < 24


def test_the_log_says_ratio_threshold_and_source(caplog: pytest.LogCaptureFixture) -> None:
    bench = warmed(16)
    with caplog.at_level(logging.INFO):
        assert refused(bench, "a", prompt_of(40), 0.5)
    assert "Request a ends: cache hit ratio 0.4000 is below the request threshold of 0.5000." in (
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
