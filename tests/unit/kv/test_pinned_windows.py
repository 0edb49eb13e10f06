"""Pinned windows through the scheduler: what vLLM's pull request #40676 promised, point by point.

Windows are released on the way, a request that finds no other free block takes pinned ones where
it starts and where it grows, whole prompts are admitted at once, a tier full of pins stops nobody;
and the four ways in which its counts of holders and pins went wrong.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import GroupKind
from prefixcache.types.request import CacheOptions
from support.repeatable import bounded
from support.scheduler_bench import Bench

GROUPS: tuple[GroupKind, ...] = ("full", ("sliding_window", 9), ("sliding_window", 9))
CHUNK = 16
FULL_BLOCKS = 13


class Pins(Bench):
    """Blocks of 4 tokens, of which any number may be pinned, whatever lies between."""

    def __init__(
        self, num_blocks: int = 401, share: float = 1.0, interval: int = 0, **rules: Any
    ) -> None:
        retention = Retention(interval=interval, pin=True, pin_max_share=share, pin_min_drop_size=0)
        super().__init__(
            num_blocks=num_blocks,
            max_num_batched_tokens=CHUNK,
            max_model_len=512,
            groups=GROUPS,
            retention=retention,
            **rules,
        )
        self._names = map(str, itertools.count())

    def stat(self, name: str) -> int:
        return self.cache.core.stats()[name]

    def begin(self, prompt: list[int], max_tokens: int = 1, **options: Any) -> str:
        """Adds a request and computes its first chunk."""
        name = next(self._names)
        self.add(name, prompt, max_tokens, **options)
        self.step()
        return name

    def serve(self, prompt: list[int], max_tokens: int = 1) -> int:
        """Serves a request alone to its end; its hits."""
        before = self.scheduler.admission.counter.hit_tokens
        name = self.begin(prompt, max_tokens)
        self.run()
        assert self.answers[name] == answer_alone(prompt, max_tokens)
        return self.scheduler.admission.counter.hit_tokens - before

    def abort(self, *names: str) -> None:
        assert self.scheduler.finish(names) == list(names)
        self.cache.core.validate()

    def push_out(self) -> None:
        """Gives every block that is not pinned other content, and pins none of it."""
        for number in range(self.cache.size.num_usable_blocks // 10):
            name = self.begin(prompt(1000 + number, 4 * 10 + 1), max_tokens=9)
            self.run_until_answered(name)
            self.abort(name)

    def run_until_answered(self, name: str) -> None:
        while not self.answers[name]:
            self.step()

    def assert_counts(self) -> None:
        """As the pool itself counts them, block by block."""
        self.cache.core.validate()
        stats = self.cache.core.stats()
        assert min(stats.values()) >= 0
        usable = self.cache.size.num_usable_blocks
        assert stats["pinned_free_blocks"] <= stats["pinned_blocks"] <= usable
        assert stats["free_blocks"] + stats["blocks_in_use"] == usable

    def held(self) -> int:
        return self.stat("blocks_in_use")

    def assert_at_rest(self) -> None:
        assert self.held() == self.cache.size.usage == 0
        assert self.stat("free_blocks") == self.cache.size.num_usable_blocks
        assert self.stat("pinned_blocks") == self.stat("pinned_free_blocks")


def prompt(number: int, length: int = 4 * FULL_BLOCKS + 1) -> list[int]:
    """The last full block ends before the last token: where the prompt ends is one anchor."""
    return [number % 97, number // 97, *[(number + 7 * i) % 97 for i in range(length - 2)]]


# What a request of `FULL_BLOCKS` pins: all under full attention, and in both groups the two blocks
# of the window and one below them.
PINNED = FULL_BLOCKS + 2 * 3


def full_of_pins(**rules: Any) -> Pins:
    """Every free block but a few is pinned, and the regular tier is empty but for them."""
    pins = Pins(num_blocks=5 * PINNED + 12, **rules)
    for number in range(5):
        assert pins.serve(prompt(number)) == 0
    assert pins.stat("pinned_free_blocks") == pins.stat("free_blocks") - 11 == 5 * PINNED
    return pins


def test_windows_are_released_while_the_prompt_is_computed() -> None:
    pins = Pins()
    name = pins.begin(prompt(0, 301), max_tokens=40)
    most = 0
    while pins.scheduler.has_unfinished():
        most = max(most, pins.held())
        pins.step()
    assert pins.answers[name] == answer_alone(prompt(0, 301), 40)
    assert most <= pins.cache.core.most_blocks(301 + 40, CHUNK) <= 86 + 2 * 9
    pins.assert_at_rest()


def test_a_preemption_keeps_the_share() -> None:
    """Pins that a running request uses cannot end, and are free when it is preempted."""
    pins = Pins(num_blocks=101, share=0.1)
    pins.begin(prompt(0), max_tokens=60)
    for _ in range(6):
        pins.step()
    same = pins.begin(prompt(0))
    pins.run_until_answered(same)
    assert pins.stat("pinned_blocks") > 10 > pins.stat("pinned_free_blocks")
    pins.scheduler.requeue_running()
    assert pins.stat("pinned_free_blocks") == pins.stat("pinned_blocks") <= 10


def test_a_request_that_starts_takes_the_oldest_pins() -> None:
    pins = full_of_pins()
    pins.begin(prompt(9), max_tokens=9)
    evicted = pins.stat("pinned_evictions")
    assert 0 < evicted <= PINNED
    pins.run()
    assert pins.scheduler.num_preemptions == 0
    assert [pins.serve(prompt(number)) for number in (4, 3)] == [4 * FULL_BLOCKS] * 2
    assert pins.serve(prompt(0)) == 0


def test_a_request_that_grows_takes_the_oldest_pins() -> None:
    """Chunks of windows on the way, and blocks of the answer."""
    pins = full_of_pins()
    name = pins.begin(prompt(9, 4), max_tokens=100)
    assert pins.stat("pinned_evictions") == 0
    pins.run()
    assert pins.answers[name] == answer_alone(prompt(9, 4), 100)
    assert pins.stat("pinned_evictions") > 0
    assert pins.scheduler.num_preemptions == 0
    assert pins.serve(prompt(4)) == 4 * FULL_BLOCKS
    assert pins.serve(prompt(0)) == 0


def test_what_does_not_fit_takes_no_pin() -> None:
    """All or nothing: the pinned blocks that were there did not suffice."""
    pins = full_of_pins()
    pins.begin(prompt(8, 201), max_tokens=1)
    before = pins.cache.core.stats()
    pins.add("waits", prompt(9, 201), max_tokens=1)
    pins.step()
    assert pins.scheduler.num_waiting == 1
    after = pins.cache.core.stats()
    grown = after["allocations"] - before["allocations"]
    assert after["pinned_evictions"] - before["pinned_evictions"] <= grown <= 2 * CHUNK // 4
    pins.run()
    assert pins.answers["waits"] == answer_alone(prompt(9, 201), 1)
    assert pins.scheduler.num_preemptions == 0
    pins.assert_at_rest()


def test_long_prompts_that_come_together_are_admitted_whole() -> None:
    """None holds half of the pool, and nobody is preempted on the way."""
    pins = full_of_pins()
    names = [f"long {number}" for number in range(4)]
    for number, name in enumerate(names):
        pins.add(name, prompt(10 + number, 181), max_tokens=1)
    pins.run()
    assert pins.scheduler.num_preemptions == 0
    for number, name in enumerate(names):
        assert pins.answers[name] == answer_alone(prompt(10 + number, 181), 1)
    pins.assert_at_rest()


def test_a_request_that_needs_the_whole_pool_starts_on_a_pool_full_of_pins() -> None:
    pins = full_of_pins()
    usable = pins.cache.size.num_usable_blocks
    longest = max(n for n in range(1, 500) if pins.cache.core.most_blocks(n, CHUNK) <= usable)
    assert longest > 4 * 0.75 * usable
    name = pins.begin(prompt(9, longest - 8), max_tokens=9)
    assert pins.scheduler.num_running == 1
    pins.run()
    assert pins.answers[name] == answer_alone(prompt(9, longest - 8), 9)
    assert pins.scheduler.num_preemptions == 0
    pins.assert_at_rest()


@pytest.mark.parametrize("end", ["stop", "length", "abort", "failed request", "failed step"])
def test_the_engine_pins_what_ended_well(end: str) -> None:
    retention = Retention(pin=True, pin_min_drop_size=0)
    engine, runner, cache = make_engine(groups=GROUPS, retention=retention)
    answer = answer_alone(prompt(0), 8)
    stops = {"stop_token_ids": (answer[7],)} if end == "stop" else {}
    engine.add_request(make_request("a", prompt(0), max_tokens=8, **stops))
    engine.step()
    before = cache.core.stats()["pins"]
    if end == "abort":
        engine.abort(["a"])
    if end == "failed request":
        runner.broken_tokens.add(answer[0])
    if end == "failed step":
        runner.failures.append(RuntimeError("a planted failure"))
    while engine.has_unfinished():
        engine.step()
    assert (cache.core.stats()["pins"] > before) is (end in ("stop", "length"))
    assert cache.size.usage == 0


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_long_prompt_pins_no_more_than_the_share_while_it_runs(share: float) -> None:
    pins = Pins(share=share, interval=2 * CHUNK)
    most = 0
    name = pins.begin(prompt(0, 500))
    while not pins.answers[name]:
        pins.step()
        most = max(most, pins.stat("pinned_blocks"))
    assert most <= share * 400
    assert pins.stat("demotions") > 2 * share * 400


# The four loopholes.


def test_a_pin_of_a_hit_that_is_shared_lasts_when_one_holder_drops_it() -> None:
    pins = Pins(max_num_seqs=4)
    pins.serve(prompt(0))
    first = pins.begin([*prompt(0), *prompt(1)], max_tokens=30)
    second = pins.begin([*prompt(0), *prompt(2)], max_tokens=60)
    while len(pins.answers[first]) < 30:
        pins.step()  # both windows move on, and the first one ends
    held = set(pins.cache._sequences[second].block_table(0)) - {0}
    assert not held & set(pins.cache.core.free_order()), "what the second one holds is not free"
    pins.abort(second)
    pins.assert_at_rest()
    pins.push_out()
    assert pins.serve([*prompt(0), 5]) == 4 * FULL_BLOCKS


def test_what_lost_its_pin_is_hit_and_dropped_as_any_other_block() -> None:
    pins = Pins(share=0.0)
    pins.serve(prompt(0))
    assert pins.stat("pins") == pins.stat("demotions") == PINNED
    name = pins.begin([*prompt(0), *prompt(1)], max_tokens=9)
    assert pins.scheduler.state(name).num_cached_tokens == 4 * FULL_BLOCKS
    pins.abort(name)
    assert pins.stat("pinned_blocks") == pins.stat("pinned_hits") == 0
    pins.assert_at_rest()
    pins.push_out()
    assert pins.serve(prompt(0)) == 0


def test_a_pin_is_kept_by_a_hit_and_the_drop_after_it() -> None:
    pins = Pins()
    pins.serve(prompt(0))
    for number in range(1, 4):
        name = pins.begin([*prompt(0), *prompt(number)], max_tokens=9)
        pins.run_until_answered(name)
        pins.abort(name)
        assert pins.stat("pinned_blocks") == PINNED
        pins.push_out()
    assert pins.stat("pinned_hits") == 3 * (FULL_BLOCKS + 2 * 2)
    assert pins.serve([*prompt(0), 5]) == 4 * FULL_BLOCKS


def test_a_pin_is_kept_by_who_computed_the_same_and_drops_it() -> None:
    """Duplicates are merged: the window that moves on was not hit, but is the pinned one."""
    pins = Pins()
    pins.cache._merge_twins = True
    pins.serve(prompt(0))
    name = pins.begin([*prompt(0), *prompt(1)], max_tokens=9, cache=CacheOptions(read=False))
    pins.run_until_answered(name)
    pins.abort(name)
    assert pins.cache.num_merged_blocks >= FULL_BLOCKS
    assert pins.stat("pinned_blocks") == PINNED
    pins.push_out()
    assert pins.serve([*prompt(0), 5]) == 4 * FULL_BLOCKS


actions = st.lists(
    st.tuples(
        st.sampled_from(["serve", "begin", "step", "abort", "preempt", "reset", "demote"]),
        st.integers(0, 3),
        st.integers(1, 120),
    ),
    max_size=30,
)


@settings(max_examples=bounded(usual=60, long=2_000), deadline=None)
@given(actions=actions, share=st.sampled_from([0.0, 0.2, 1.0]), num_blocks=st.integers(60, 160))
def test_no_count_is_ever_negative(
    actions: list[tuple[str, int, int]], share: float, num_blocks: int
) -> None:
    pins = Pins(num_blocks, share, share_in_flight=True)
    for action, number, length in actions:
        text = prompt(number, 4 + length)
        if action in ("serve", "begin"):
            pins.begin(text, max_tokens=1 + length // 10)
        if action in ("serve", "step"):
            pins.step()
        if action == "abort":
            pins.scheduler.finish([str(number)])
        if action == "preempt":
            pins.scheduler.requeue_running()
        if action == "reset":
            pins.cache.versions.reset()
        if action == "demote":
            pins.cache.core.demote(length)
        pins.assert_counts()
    pins.run()
    pins.assert_counts()
    pins.assert_at_rest()
