"""One request computes a shared prefix, the others wait for its blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import GroupKind
from prefixcache.scheduler.in_flight import InFlight
from prefixcache.types.request import CacheOptions, RequestOutput
from support.repeatable import bounded
from support.scheduler_bench import Bench, counts, prompt_of

Groups = Sequence[GroupKind]

SHARED = prompt_of(32)
HYBRIDS: list[Groups] = [("full", *[("sliding_window", window)] * 2) for window in (1, 5, 9, 40)]


@pytest.fixture(params=[("full",), *HYBRIDS], ids=lambda groups: str(groups[-1]))
def groups(request: pytest.FixtureRequest) -> Groups:
    return request.param


def own(name: int) -> list[int]:
    return [*SHARED, *prompt_of(5, 50 + name)]


def crowd(bench: Bench, size: int) -> list[str]:
    names = [f"r{i}" for i in range(size)]
    for i, name in enumerate(names):
        bench.add(name, own(i))
    return names


def run_counting(bench: Bench) -> int:
    computed = 0
    while bench.scheduler.has_unfinished():
        computed += bench.step().num_tokens
    return computed


@pytest.mark.parametrize("budget", [8, 64, 256])
def test_a_crowd_computes_its_prefix_once(groups: Groups, budget: int) -> None:
    bench = Bench(
        groups=groups,
        num_blocks=129,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        share_in_flight=True,
    )
    names = crowd(bench, 8)
    assert run_counting(bench) == 32 + 8 * 5 + 8 * 3
    assert budget == 8 or bench.scheduler.sharing.num_waits == 7
    for i, name in enumerate(names):
        assert bench.answers[name] == answer_alone(own(i), 4)


def test_without_sharing_the_crowd_computes_it_many_times(groups: Groups) -> None:
    bench = Bench(groups=groups, num_blocks=513, max_num_seqs=8, max_num_batched_tokens=512)
    crowd(bench, 8)
    assert run_counting(bench) == 8 * (32 + 5 + 3)


def test_tokens_got_from_another_count_as_cached(groups: Groups) -> None:
    bench = Bench(groups=groups, share_in_flight=True)
    crowd(bench, 2)
    bench.step()
    bench.step()
    assert bench.scheduler.state("r0").num_cached_tokens == 0
    assert bench.scheduler.state("r1").num_cached_tokens == 32


def test_a_waiter_follows_chunk_by_chunk(groups: Groups) -> None:
    bench = Bench(groups=groups, max_num_batched_tokens=16, share_in_flight=True)
    bench.add("long", prompt_of(64), max_tokens=1)
    bench.add("short", [*prompt_of(24), 89, 88], max_tokens=1)
    plans = [counts(bench.step()) for _ in range(2)]
    assert plans == [{"long": 16}, {"long": 16}]
    assert counts(bench.step()) == {"long": 16}
    bench.run()
    assert bench.answers["short"] == answer_alone([*prompt_of(24), 89, 88], 1)
    assert bench.scheduler.admission.counter.hit_tokens == 24


@pytest.mark.parametrize("size", [2, 5])
def test_an_aborted_owner_wakes_its_waiters(groups: Groups, size: int) -> None:
    bench = Bench(groups=groups, max_num_batched_tokens=8, share_in_flight=True)
    names = crowd(bench, size)
    bench.step()
    bench.scheduler.finish(["r0"])
    assert set(counts(bench.step())) == {"r1"}
    bench.run()
    for i, name in enumerate(names[1:], start=1):
        assert bench.answers[name] == answer_alone(own(i), 4)


def test_a_waiter_can_be_aborted(groups: Groups) -> None:
    bench = Bench(groups=groups, max_num_batched_tokens=8, share_in_flight=True)
    crowd(bench, 3)
    bench.step()
    assert bench.scheduler.num_waiting == 2
    assert bench.scheduler.finish(["r1"]) == ["r1"]
    assert bench.scheduler.num_waiting == 1
    bench.run()
    assert bench.answers["r1"] == []
    assert bench.answers["r2"] == answer_alone(own(2), 4)


def test_nobody_waits_past_the_limit(groups: Groups) -> None:
    bench = Bench(groups=groups, share_in_flight=True, max_wait_steps=3)
    bench.scheduler._publisher.publish = lambda computed: None
    crowd(bench, 2)
    planned = [set(counts(bench.step())) for _ in range(4)]
    assert planned == [{"r0"}] * 3 + [{"r0", "r1"}]
    bench.run()
    assert bench.answers["r1"] == answer_alone(own(1), 4)


def test_a_preempted_owner_wakes_its_waiters(groups: Groups) -> None:
    bench = Bench(groups=groups, num_blocks=129, share_in_flight=True)
    names = crowd(bench, 3)
    publisher = bench.scheduler._publisher
    publish, publisher.publish = publisher.publish, lambda computed: None
    bench.step()
    assert len(bench.scheduler.sharing) == 2
    bench.scheduler.requeue_running()
    assert len(bench.scheduler.sharing) == 0
    publisher.publish = publish
    bench.run()
    for i, name in enumerate(names):
        assert bench.answers[name] == answer_alone(own(i), 4)


def test_who_waits_for_one_that_is_preempted_is_served() -> None:
    bench = Bench(num_blocks=14, max_num_batched_tokens=8, share_in_flight=True)
    bench.add("old", prompt_of(4, 3), max_tokens=20)
    bench.step()
    bench.add("owner", own(0), max_tokens=4)
    bench.add("waiter", own(1), max_tokens=4)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for name, prompt in (("owner", own(0)), ("waiter", own(1))):
        assert bench.answers[name] == answer_alone(prompt, 4)


@pytest.mark.parametrize(
    "options",
    [CacheOptions(salt="other"), CacheOptions(read=False)],
    ids=["another salt", "no reading"],
)
def test_who_cannot_read_the_blocks_does_not_wait(groups: Groups, options: CacheOptions) -> None:
    bench = Bench(groups=groups, share_in_flight=True)
    bench.add("a", own(0))
    bench.add("b", own(1), cache=options)
    assert set(counts(bench.step())) == {"a", "b"}
    assert bench.scheduler.sharing.num_waits == 0


def test_nobody_waits_for_blocks_that_are_not_published(groups: Groups) -> None:
    bench = Bench(groups=groups, share_in_flight=True)
    bench.add("a", own(0), cache=CacheOptions(write=False))
    bench.add("b", own(1))
    assert set(counts(bench.step())) == {"a", "b"}


def test_nobody_waits_for_blocks_past_what_a_request_may_write(groups: Groups) -> None:
    bench = Bench(groups=groups, max_num_batched_tokens=32, share_in_flight=True)
    bench.add("a", own(0), cache=CacheOptions(write_upto=18))
    bench.add("b", own(1))
    assert [set(counts(bench.step())) for _ in range(2)] == [{"a"}, {"a", "b"}]
    assert bench.scheduler.admission.counter.hit_tokens == 16


def test_the_next_fork_is_shared_too(groups: Groups) -> None:
    bench = Bench(
        groups=groups,
        num_blocks=129,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        share_in_flight=True,
    )
    fork = [*SHARED, *prompt_of(8, 40)]
    for name in "abc":
        bench.add(name, [*fork, ord(name) % 90, 1, 2], max_tokens=1)
    bench.add("d", [*SHARED, 89, 88, 87], max_tokens=1)
    assert run_counting(bench) == 40 + 4 * 3


@dataclass(frozen=True)
class Crowd:
    """Requests with one prefix: after how many steps each comes, and what is its own."""

    arrivals: Sequence[int]
    prefix: int = 52
    suffix: int = 60

    def prompt(self, number: int) -> list[int]:
        return [*prompt_of(self.prefix), 96 - number, *prompt_of(self.suffix - 1, 30)]

    def run(
        self, groups: Groups, budget: int, *, num_blocks: int = 1200, **rules: Any
    ) -> tuple[int, Bench]:
        """How many tokens of prompts were computed."""
        bench = Bench(
            groups=groups,
            num_blocks=num_blocks,
            max_model_len=256,
            max_num_batched_tokens=budget,
            share_in_flight=True,
            **rules,
        )
        computed = step = 0
        while step <= max(self.arrivals) or bench.scheduler.has_unfinished():
            for number, arrival in enumerate(self.arrivals):
                if arrival == step:
                    bench.add(f"r{number}", self.prompt(number), max_tokens=1)
            computed += bench.step().num_tokens
            step += 1
        for number in range(len(self.arrivals)):
            assert bench.answers[f"r{number}"] == answer_alone(self.prompt(number), 1)
        return computed, bench

    def cost(self, times: int) -> int:
        """Tokens to compute where the prefix is computed so often."""
        return times * self.prefix + len(self.arrivals) * self.suffix


@pytest.mark.parametrize("budget", [8, 13, 64, 256])
def test_a_crowd_computes_its_prefix_once_however_far_its_owner_gets(groups, budget):
    """The windows of the owner are far behind the prefix when the others may start."""
    crowd = Crowd([0] * 8)
    computed, bench = crowd.run(groups, budget)
    assert computed == crowd.cost(times=1)
    assert bench.scheduler.admission.num_window_missed_tokens == 0


@pytest.mark.parametrize("groups", HYBRIDS[1:3], ids=lambda groups: str(groups[-1]))
@pytest.mark.parametrize("budget", [8, 64, 256])
def test_followers_find_windows_that_the_owner_has_left(groups: Groups, budget: int) -> None:
    crowd = Crowd([0, *[15] * 7])
    computed, bench = crowd.run(groups, budget)
    assert computed == crowd.cost(times=1)
    assert bench.scheduler.admission.num_window_missed_tokens == 0


def test_where_no_room_is_for_old_windows_one_follower_computes_for_all() -> None:
    crowd = Crowd([0, *[15] * 7])
    computed, bench = crowd.run(HYBRIDS[2], 8, num_blocks=60)
    assert computed == crowd.cost(times=2)
    assert bench.scheduler.admission.num_window_missed_tokens == crowd.prefix


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [8, 16, 256])
@pytest.mark.parametrize("stagger", [0, 10])
def test_steps_that_are_planned_ahead_share_as_well(ahead: bool, budget: int, stagger: int) -> None:
    crowd = Crowd([0] * 8)
    engine, runner, _ = make_engine(
        num_blocks=1200,
        max_num_batched_tokens=budget,
        max_model_len=256,
        share_in_flight=True,
        ahead=ahead,
        groups=HYBRIDS[2],
    )
    answers: dict[str, list[int]] = defaultdict(list)
    for number in range(8):
        engine.add_request(make_request(str(number), crowd.prompt(number), max_tokens=1))
        for _ in range(stagger):
            collect(engine.step(), answers)
    while engine.has_unfinished():
        collect(engine.step(), answers)
    assert sum(plan.num_tokens for plan in runner.plans) == crowd.cost(times=1)
    for number in range(8):
        assert answers[str(number)] == answer_alone(crowd.prompt(number), 1)


def collect(outputs: Iterable[RequestOutput], answers: dict[str, list[int]]) -> None:
    for output in outputs:
        answers[output.request_id].extend(output.token_ids)


@settings(max_examples=bounded(usual=100, long=2_000), deadline=None)
@given(
    windows=st.lists(st.integers(1, 130), min_size=1, max_size=3),
    arrivals=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    prefix=st.integers(1, 20).map(lambda blocks: 4 * blocks),
    suffix=st.integers(1, 60),
    budget=st.integers(8, 200),
    interval=st.sampled_from([0, 0, None, 7, 16]),
    pin=st.booleans(),
)
def test_a_prefix_is_computed_at_most_twice(
    windows, arrivals, prefix, suffix, budget, interval, pin
):
    """Whatever the windows, and whenever the others come."""
    crowd = Crowd(arrivals, prefix, suffix)
    retention = Retention(interval=interval, pin=pin and interval is not None)
    groups: Groups = ("full", *(("sliding_window", window) for window in windows))
    computed, _ = crowd.run(groups, budget, retention=retention)
    assert computed <= crowd.cost(times=2)


@pytest.mark.parametrize(
    ("owner", "method", "crowd", "times"),
    [
        (CacheManager, "keep_for", Crowd([0] * 8), 1),
        (InFlight, "foresee", Crowd([0] * 8), 1),
        (CacheManager, "add_junction", Crowd([0, 30, 60]), 2),
    ],
)
def test_each_anchor_is_needed(monkeypatch, owner, method, crowd, times):
    """Where there is no room for what is behind windows."""
    assert crowd.run(HYBRIDS[2], 16, num_blocks=56)[0] == crowd.cost(times)
    monkeypatch.setattr(owner, method, lambda *_: 0)
    assert crowd.run(HYBRIDS[2], 16, num_blocks=56)[0] > crowd.cost(times)
