"""Retention hints through the scheduler: what outlives other traffic, for how long, at whose cost.

The pool is tiny and its time is given, so that every run has the same outcome.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fakes.fake_runner import answer_alone
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import GroupKind
from prefixcache.types.request import CacheOptions
from prefixcache.types.retention_range import RetentionRange
from support.scheduler_bench import Bench

BLOCK = 4
USABLE = 40
PREFIX = list(range(24))


class Hints(Bench):
    """A pool of 40 blocks, of which an owner's hints may raise a fifth. Its time is set by hand."""

    def __init__(self, groups: tuple[GroupKind, ...] = ("full",), **rules: Any) -> None:
        super().__init__(
            num_blocks=USABLE + 1, block_size=BLOCK, groups=groups, max_model_len=256, **rules
        )
        self._groups = groups
        self._names = map(str, itertools.count())
        self.at(0)

    def at(self, seconds: float) -> None:
        self.cache.core.set_time(seconds)

    def serve(self, prompt: list[int], *ranges: RetentionRange, salt: str | None = None) -> int:
        """Serves one prompt to its end, whose answer must be the lone one; its hits in tokens."""
        name, before = next(self._names), self.scheduler.admission.counter.hit_tokens
        self.add(name, prompt, 2, cache=CacheOptions(salt=salt, retention=ranges))
        self.run()
        assert self.answers[name] == answer_alone(prompt, 2, groups=self._groups)
        return self.scheduler.admission.counter.hit_tokens - before

    def traffic(self, pools: float = 10) -> None:
        """Prompts of their own, about as many blocks as that many pools have."""
        for number in range(int(pools * USABLE) // 10):
            name = next(self._names)
            salt = CacheOptions(salt=f"traffic {name}")
            self.add(name, [number % 90] * 10 * BLOCK, 1, cache=salt)
            self.run()

    def stat(self, name: str) -> int:
        return self.cache.core.stats()[name]


HINT = RetentionRange(0, len(PREFIX), priority=80)
HYBRID: tuple[GroupKind, ...] = ("full", ("sliding_window", 9))
WINDOWS: tuple[GroupKind, ...] = (("sliding_window", 9),)


@pytest.mark.parametrize("groups", [("full",), HYBRID, WINDOWS])
def test_a_hinted_prefix_outlives_ten_pools_of_traffic(groups: tuple[GroupKind, ...]) -> None:
    hinted, plain = Hints(groups, retention_budget=0.5), Hints(groups)
    hinted.serve([*PREFIX, 90, 91], HINT)
    plain.serve([*PREFIX, 90, 91])
    for bench in (hinted, plain):
        bench.traffic()
    assert hinted.serve([*PREFIX, 92, 93, 94]) == len(PREFIX)
    assert plain.serve([*PREFIX, 92, 93, 94]) == 0


def test_a_hint_ends_with_its_ttl_which_hits_start_again() -> None:
    bench = Hints()
    bench.serve([*PREFIX, 90], RetentionRange(0, len(PREFIX), ttl_s=60))
    for now in (59, 118):
        bench.at(now)
        bench.traffic(2)
        assert bench.serve([*PREFIX, 91]) == len(PREFIX)
    assert bench.stat("hinted_blocks") == len(PREFIX) // BLOCK
    bench.at(118 + 61)
    bench.traffic(2)
    assert bench.serve([*PREFIX, 92]) == 0
    assert bench.stat("hints_expired") == len(PREFIX) // BLOCK
    assert bench.stat("hinted_blocks") == 0


def test_pins_of_what_a_hint_keeps_longer_are_no_part_of_their_share() -> None:
    """They would leave no room in it to others; once the hint ends they have to find it."""
    pins = Retention(pin=True, pin_min_drop_size=0, pin_max_share=0.25)
    bench = Hints(HYBRID, retention=pins, retention_budget=1.0)
    bench.serve([*PREFIX, 90], RetentionRange(priority=100, ttl_s=60))
    assert (bench.stat("hinted_blocks"), bench.stat("pinned_blocks")) == (9, 0)
    bench.serve(list(range(50, 66)))
    assert bench.stat("pinned_blocks") == 8
    bench.at(61)
    bench.cache.hints.demote_expired()
    assert (bench.stat("hinted_blocks"), bench.stat("pinned_blocks")) == (0, 10)


def test_salts_over_their_budget_do_not_touch_a_third() -> None:
    bench = Hints()
    bench.serve([*PREFIX, 90], HINT, salt="third")
    for number in range(20):
        for salt in ("first", "second"):
            prompt = [number, *PREFIX[1:], 90]
            bench.serve(prompt, RetentionRange(priority=100), salt=salt)
    assert bench.stat("hints_demoted") > 20
    assert bench.stat("hinted_blocks") <= 3 * USABLE // 5
    assert bench.serve([*PREFIX, 91], salt="third") == len(PREFIX)
    assert bench.serve([19, *PREFIX[1:], 91], salt="first") == len(PREFIX), "the newest stays"
    assert bench.serve([0, *PREFIX[1:], 91], salt="first") == 0


def test_a_pool_full_of_the_dearest_serves_a_request_that_needs_all_of_it() -> None:
    bench = Hints(retention_budget=1.0)
    for number in range(5):
        bench.serve([number] * 8 * BLOCK, RetentionRange(priority=100))
    assert bench.stat("hinted_blocks") == USABLE - 1  # one went for the last answer
    assert bench.serve(list(range(90)) + [1] * (USABLE * BLOCK - 92)) == 0
    assert all(bench.serve([number] * 8 * BLOCK) == 0 for number in range(5))


def test_lower_priorities_go_before_what_nobody_hinted() -> None:
    bench = Hints()
    bench.serve([*PREFIX, 90])
    bench.serve([7] * 25, RetentionRange(priority=0))
    bench.traffic(pools=0.8)
    assert bench.serve([*PREFIX, 91]) == len(PREFIX)
    assert bench.serve([7] * 25) < 24


def test_a_pool_without_prefix_caching_takes_hints_and_does_nothing() -> None:
    bench = Hints(enable_prefix_caching=False)
    assert bench.serve([*PREFIX, 90], HINT) == bench.serve([*PREFIX, 90], HINT) == 0
    assert bench.stat("hinted_blocks") == 0


def test_what_is_gone_is_not_counted() -> None:
    hints = Hints()
    hints.serve(PREFIX, HINT)
    assert hints.stat("hinted_blocks") == len(PREFIX) // BLOCK
    hints.cache.core.release_cached(USABLE)
    assert hints.stat("hinted_blocks") == 0
    hints.serve(PREFIX, HINT)
    hints.cache.versions.reset()
    assert hints.stat("hinted_blocks") == 0


def test_what_ends_after_a_pause_keeps_its_prompts_in_order() -> None:
    hints = Hints()
    head = RetentionRange(0, BLOCK, priority=95, ttl_s=60)
    rest = RetentionRange(BLOCK, len(PREFIX), priority=65, ttl_s=3600)
    hints.serve(PREFIX, head, rest)
    hints.at(4000)
    hints.cache.hints.demote_expired()
    hints.cache.core.release_cached(1)
    assert hints.serve([*PREFIX, 77]) == len(PREFIX) - BLOCK
