"""Long hits first: the order next to an obvious one, and what nobody can do to others by hits."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.scheduler import cache_aware
from prefixcache.scheduler.cache_aware import LongestHits
from prefixcache.scheduler.queue import WaitingQueue
from prefixcache.scheduler.state import RequestState
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams
from support.repeatable import bounded
from support.scheduler_bench import Bench, prompt_of

MAX_DELAY = 5
SMALL_WINDOW = 4
Key = tuple[int, str | None]


def key_of(state: RequestState) -> Key:
    return (state.request.priority, state.request.client)


@dataclass
class Both:
    """A queue, and next to it the same rules applied each time to everything that waits."""

    cached: dict[int, int] = field(default_factory=lambda: {1: 8, 2: 8, 3: 0})
    now: float = 0.0
    waiting: list[RequestState] = field(default_factory=list)
    away: list[RequestState] = field(default_factory=list)
    since: dict[str, float] = field(default_factory=dict)
    round_of: dict[str, int] = field(default_factory=dict)
    line_rounds: dict[Key, int] = field(default_factory=dict)
    rounds: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    last: tuple[int, int] | None = None
    ranking: list[tuple[int, RequestState]] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        ranking = LongestHits(
            count_hits=self.hits,
            prefix_name=lambda state, hits: repr((self.stem(state), hits)).encode(),
            max_delay=MAX_DELAY,
            clock=lambda: self.now,
        )
        self.queue = WaitingQueue(ranking=ranking)

    def stem(self, state: RequestState) -> int:
        return int(state.request.prompt_token_ids[0])

    def hits(self, state: RequestState) -> int:
        return min(self.cached.get(self.stem(state), 0), len(state.tokens) - 1)

    def arrive(self, stem: int, length: int, client: str | None, priority: int, turn: int) -> None:
        self.serial += 1
        request = Request(
            request_id=str(self.serial),
            prompt_token_ids=[stem] * length,
            params=SamplingParams(),
            priority=priority,
            client=client,
        )
        state = RequestState(request, seed=0, serial=self.serial, max_num_tokens=99)
        state.turn = turn
        self.since[state.request_id] = self.now
        self.push(state)

    def push(self, state: RequestState) -> None:
        self.line_rounds.setdefault(key_of(state), 1 + self.rounds[state.request.priority])
        self.ranking = []
        self.waiting.append(state)
        self.queue.push(state)

    def forget(self, state: RequestState) -> None:
        self.waiting.remove(state)
        if key_of(state) not in map(key_of, self.waiting):
            del self.line_rounds[key_of(state)]

    def start(self, *, parks: bool) -> None:
        """Lets the next one start, or find out that it must wait for another one's blocks."""
        self.ranking = self.ranking or self.obvious()
        found = self.queue.head()
        if found is None or not self.ranking:
            assert not self.ranking
            return
        hits, expected = self.ranking.pop(0)
        assert found is expected
        self.queue.take(found)
        self.last = (self.stem(found), hits) if hits else self.last
        self.note_round(found)
        self.forget(found)
        self.away.append(found)
        if not parks:
            found.num_cached_tokens = 0
            self.hits_changed()

    def hits_changed(self) -> None:
        self.ranking = []
        self.queue.forget_hits()

    def remove(self, state: RequestState) -> None:
        self.ranking = []
        self.forget(state)
        assert self.queue.remove(state.request_id)

    def note_round(self, state: RequestState) -> None:
        priority, _ = key = key_of(state)
        if state.request_id not in self.round_of:
            begun = max(self.line_rounds[key], self.rounds[priority])
            self.round_of[state.request_id] = begun
            others = {key_of(s) for s in self.waiting if s.request.priority == priority} - {key}
            self.line_rounds[key] = begun + bool(others)
        self.rounds[priority] = max(self.rounds[priority], self.round_of[state.request_id])

    def obvious(self) -> list[tuple[int, RequestState]]:
        """Who may start now, the first one first: lines by turn, a window, up to who is passed by
        nobody. With the hits, where they were counted."""
        lines: defaultdict[Key, list[RequestState]] = defaultdict(list)
        for state in sorted(self.waiting, key=self.place):
            lines[key_of(state)].append(state)
        turns = {
            key: (key[0], min(self.line_rounds[key], self.ran_in(line[0])))
            for key, line in lines.items()
        }
        at_turn = [line for key, line in lines.items() if turns[key] == min(turns.values())]
        at_turn.sort(key=lambda line: int(line[0].request_id))
        share = max(1, SMALL_WINDOW // max(1, len(at_turn)))
        window = [state for line in at_turn[:SMALL_WINDOW] for state in line[:share]]
        ends = [i for i, state in enumerate(window) if self.is_passed_by_nobody(state)]
        window = window[: ends[0] + 1] if ends else window
        if len(window) == 1 or any(map(self.has_run, window)):
            return [(0, state) for state in window[-1:]]
        longest = max(map(self.hits, window), default=0)

        def goes_on(state: RequestState) -> bool:
            return self.last == (self.stem(state), longest) and longest > 0

        window.sort(key=lambda s: (-self.hits(s), self.hits(s) < longest or not goes_on(s)))
        return [(self.hits(state), state) for state in window]

    def place(self, state: RequestState) -> tuple[int, int, int]:
        return (self.ran_in(state), state.turn, int(state.request_id))

    def ran_in(self, state: RequestState) -> int:
        """The round of one that ran before."""
        return self.round_of[state.request_id] if self.has_run(state) else sys.maxsize

    def has_run(self, state: RequestState) -> bool:
        return state.num_cached_tokens is not None

    def is_passed_by_nobody(self, state: RequestState) -> bool:
        return self.has_run(state) or self.now - self.since[state.request_id] >= MAX_DELAY


ARRIVAL = st.tuples(
    st.just("arrive"),
    st.integers(1, 4),
    st.sampled_from([4, 12]),
    st.sampled_from([None, None, None, None, "a", "b"]),
    st.sampled_from([0, 0, 0, 0, 1]),
    st.sampled_from([1, 1, 1, 2]),
)
OPERATIONS = st.one_of(
    ARRIVAL,
    st.tuples(st.just("start"), st.booleans()),
    st.tuples(st.just("start"), st.booleans()),
    st.tuples(st.just("back"), st.integers(0, 9)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("time"), st.integers(1, 4)),
    st.tuples(st.just("cache"), st.integers(1, 3), st.sampled_from([0, 8, 20])),
)


@settings(max_examples=bounded(usual=80, long=10_000), deadline=None)
@given(st.lists(ARRIVAL, min_size=6, max_size=12), st.lists(OPERATIONS, min_size=12, max_size=40))
def test_the_order_is_the_obvious_one(
    arrivals: list[tuple[Any, ...]], operations: list[tuple[Any, ...]]
) -> None:
    both = Both()
    for _, *given_ in arrivals:
        both.arrive(*given_)
    with mock.patch.object(cache_aware, "WINDOW", SMALL_WINDOW):
        for name, *given_ in operations:
            _apply(both, name, given_)
            assert len(both.queue) == len(both.waiting)
        while both.waiting:
            both.start(parks=False)


def _apply(both: Both, name: str, given_: list[Any]) -> None:
    if name == "arrive":
        both.arrive(*given_)
    elif name == "start":
        both.start(parks=given_[0])
    elif name == "back" and both.away:
        both.push(both.away.pop(given_[0] % len(both.away)))
    elif name == "abort" and both.waiting:
        both.remove(both.waiting[given_[0] % len(both.waiting)])
    elif name == "time":
        both.now += given_[0]
    elif name == "cache":
        both.cached[given_[0]] = given_[1]
    if name in ("time", "cache"):
        both.hits_changed()


class Steps:
    """A clock that counts steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_bench(**rules: Any) -> tuple[Bench, Steps]:
    clock = Steps()
    rules = {"max_num_seqs": 1, "max_queue_delay": 1e9, **rules}
    return Bench(clock=clock, scheduling_policy="cache-aware", **rules), clock


def starts(bench: Bench) -> list[str]:
    """Ids in the order of their first steps, to the end of all."""
    order: dict[str, None] = {}
    while bench.scheduler.has_unfinished():
        order.update(dict.fromkeys(s.request_id for s in bench.step().sequences))
    return list(order)


def cache_prompts(bench: Bench, *prompts: list[int]) -> None:
    for number, prompt in enumerate(prompts):
        bench.add(f"cached {number}", prompt, max_tokens=1)
    bench.run()


def test_long_hits_go_first_and_then_those_who_came_first() -> None:
    bench, _ = make_bench()
    cache_prompts(bench, prompt_of(32, 1))
    bench.add("miss", prompt_of(30, 50))
    bench.add("short", [*prompt_of(8, 1), *prompt_of(20, 60)])
    bench.add("long", [*prompt_of(32, 1), 5])
    bench.add("another miss", prompt_of(30, 40))
    assert starts(bench) == ["long", "short", "miss", "another miss"]


def test_of_equal_hits_those_with_one_prefix_follow_each_other() -> None:
    bench, _ = make_bench()
    stems = [prompt_of(16, 1), prompt_of(16, 2)]
    cache_prompts(bench, *stems)
    for number in range(6):
        bench.add(f"{'ab'[number % 2]}{number}", [*stems[number % 2], 50 + number])
    assert starts(bench) == ["a0", "a2", "a4", "b1", "b3", "b5"]


def test_hits_are_counted_again_for_each_start() -> None:
    """What the first one publishes lets the last one go before those between."""
    bench, _ = make_bench()
    bench.add("first", prompt_of(32, 1), max_tokens=1)
    bench.add("other", prompt_of(32, 50), max_tokens=1)
    bench.add("follower", [*prompt_of(32, 1), 5], max_tokens=1)
    assert starts(bench) == ["first", "follower", "other"]


def test_priority_stands_above_hits_and_reading_nothing_is_no_hit() -> None:
    bench, _ = make_bench()
    cache_prompts(bench, prompt_of(32, 1))
    bench.add("blind", [*prompt_of(32, 1), 7], cache=CacheOptions(read=False))
    bench.add("hit", [*prompt_of(32, 1), 5])
    bench.add("urgent", prompt_of(30, 50), priority=-1)
    assert starts(bench) == ["urgent", "hit", "blind"]


def test_who_is_below_its_threshold_ends_and_delays_nobody() -> None:
    bench, _ = make_bench()
    cache_prompts(bench, prompt_of(32, 1))
    bench.add("picky", prompt_of(30, 50), cache=CacheOptions(hit_threshold=0.5))
    bench.add("hit", [*prompt_of(32, 1), 5], cache=CacheOptions(hit_threshold=0.5))
    assert starts(bench) == ["hit"]
    assert [request_id for request_id, *_ in bench.scheduler.take_rejected()] == ["picky"]


def siege(max_queue_delay: float, *, steps: int = 60) -> list[str]:
    """Who starts when a request that hits nothing waits and two that hit come with each step."""
    bench, clock = make_bench(max_queue_delay=max_queue_delay)
    cache_prompts(bench, prompt_of(32, 1))
    bench.add("early", [*prompt_of(32, 1), 4], max_tokens=1)
    bench.add("victim", prompt_of(30, 50), max_tokens=1)
    started: list[str] = []
    for step in range(steps):
        for number in range(2):
            bench.add(f"hit {step}.{number}", [*prompt_of(32, 1), step, number], max_tokens=1)
        started += [sequence.request_id for sequence in bench.step().sequences]
        clock.now += 1
    return started


def test_hits_without_end_delay_nobody_beyond_the_limit() -> None:
    started = siege(10)
    assert len(started) == 60
    assert started.index("victim") == 10


def test_without_the_limit_hits_without_end_keep_others_from_starting() -> None:
    """The siege is one: else the test above could not fail."""
    assert "victim" not in siege(1e9, steps=200)


@dataclass(frozen=True)
class Coming:
    step: int
    stem: int
    length: int
    max_tokens: int
    gone_at: int | None


COMING = st.builds(
    Coming,
    step=st.integers(0, 25),
    stem=st.sampled_from([1, 1, 1, 2, 50]),
    length=st.sampled_from([3, 16, 24]),
    max_tokens=st.integers(1, 12),
    gone_at=st.sampled_from([None, None, None, 9, 20]),
)


@settings(max_examples=bounded(usual=40, long=5_000), deadline=None)
@given(
    work=st.lists(COMING, min_size=5, max_size=40),
    max_num_seqs=st.integers(1, 3),
    num_blocks=st.sampled_from([14, 40]),
    delay=st.integers(0, 12),
    shares=st.booleans(),
)
def test_who_waited_long_enough_is_passed_by_no_later_arrival(
    work: list[Coming], max_num_seqs: int, num_blocks: int, delay: int, shares: bool
) -> None:
    """Whatever comes, leaves, is preempted or waits for blocks that another one computes."""
    bench, clock = make_bench(
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        max_model_len=48,
        max_queue_delay=delay,
        share_in_flight=shares,
    )
    arrived: dict[int, float] = {}
    started: set[int] = set()
    while clock.now <= 25 or bench.scheduler.has_unfinished():
        for number, coming in enumerate(work):
            if coming.step == clock.now:
                prompt = [*prompt_of(coming.length, coming.stem), number % 90]
                bench.add(str(number), prompt, max_tokens=coming.max_tokens)
                arrived[number] = len(arrived)
            elif coming.gone_at == clock.now:
                bench.scheduler.finish([str(number)])
        for number in _new(bench, started):
            passed = _overdue(bench, started, clock.now - delay, work)
            assert not [n for n in passed if arrived[n] < arrived[number]]
            started.add(number)
        clock.now += 1
        assert clock.now < 1000, "the loop hangs"


def _new(bench: Bench, started: set[int]) -> Iterator[int]:
    """Those who start with the next step, in the order in which they do."""
    ran = {s.request_id for s in bench.scheduler._running}
    returning = [s for s in bench.scheduler._states.values() if _waits_again(s, ran)]
    ids = [int(sequence.request_id) for sequence in bench.step().sequences]
    new = [number for number in ids if number not in started]
    still = {s.request_id for s in returning} & {
        r for r, s in bench.scheduler._states.items() if r not in map(str, ids)
    }
    assert not (new and still & _queued(bench)), "a preempted request keeps its place"
    yield from new


def _waits_again(state: RequestState, running: set[str]) -> bool:
    return state.num_cached_tokens is not None and state.request_id not in running


def _queued(bench: Bench) -> set[str]:
    return set(bench.scheduler._queue._places)


def _overdue(bench: Bench, started: set[int], since: float, work: list[Coming]) -> list[int]:
    """Who has waited that long, never started, and did not have to wait for another's blocks."""
    states = bench.scheduler._states
    waiting = [n for n in range(len(work)) if n not in started and str(n) in states]
    return [n for n in waiting if work[n].step <= since and states[str(n)].first_wait_step is None]


def test_who_is_woken_goes_back_behind_one_that_nobody_may_pass() -> None:
    """It was chosen while it might pass, waited for blocks, and did not start."""
    bench, clock = make_bench(
        max_num_seqs=3, num_blocks=13, max_model_len=48, max_queue_delay=1, share_in_flight=True
    )
    cache_prompts(bench, prompt_of(8, 1))
    bench.add("owner", prompt_of(32, 1), max_tokens=4)
    bench.add("large", prompt_of(24, 50), max_tokens=1)  # no room next to the owner
    bench.add("waiter", [*prompt_of(32, 1), 5], max_tokens=1)
    bench.step()
    assert bench.scheduler.sharing.num_waits == 1
    clock.now += 1
    assert starts(bench) == ["owner", "large", "waiter"]


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    bench, _ = make_bench(max_num_seqs=8, num_blocks=129, share_in_flight=True)
    for number in range(8):
        bench.add(str(number), [*prompt_of(32, 1), 50 + number], max_tokens=1)
    bench.step()
    assert bench.scheduler.sharing.num_waits == 7
    bench.run()
    assert bench.scheduler.admission.counter.hit_tokens == 7 * 32
