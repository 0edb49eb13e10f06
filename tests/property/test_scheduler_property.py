"""Random requests through scheduler, cache and engine against the obvious answer.

`FakeRunner` reads its history through the block tables, so any wrong hit, slot or block shows up
as a token that differs from the lone run. When a step is computed, which may be late, its sequences
must still hold every block that it reads, and never more than `most_blocks` promises.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import mmap
import os
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.fake_blocks import KeptBlocks, slow_clock
from fakes.fake_cache import make_cache
from fakes.fake_engine import RandomChunks, make_engine
from fakes.fake_runner import FakeRunner, answer_alone
from fakes.late_runner import LateRunner, LateStep
from fakes.plain_drafts import MOST_DRAFTS, HostileDrafter
from fakes.plain_runner import VOCAB_SIZE
from prefixcache.engine.engine import Engine
from prefixcache.engine.weight_versions import content_name
from prefixcache.exceptions import RequestTooLargeError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.kv_folder import KeptFile
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import GroupKind
from prefixcache.runner.cpu import kv_memory
from prefixcache.scheduler.publishing import Publisher
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.scheduler.state import RequestState
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.retention_range import RetentionRange
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import ScheduledSequence, SequenceOutput, StepPlan
from reference.cache import ReferenceCache
from support.repeatable import bounded

EOS = 3
BLOCK = 4


@dataclass(frozen=True)
class Setup:
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    share_in_flight: bool = True
    merge_twins: bool = True
    ahead: bool = False
    fails_at: tuple[int, ...] = ()
    chunk_seed: int | None = None
    groups: tuple[GroupKind, ...] = ("full",)
    enable_prefix_caching: bool = True
    clears_at: tuple[int, ...] = ()
    new_weights_at: tuple[int, ...] = ()
    in_flight: str = "recompute"
    retention: Retention | None = None
    retention_budget: float = 0.2
    max_queue_delay: float | None = None
    """Steps, of a scheduler that is aware of the cache; None is first come, first served."""
    resizes: tuple[tuple[int, int], ...] = ()
    """At which steps, and to how many blocks a group; from the second one on in many slices."""
    draft_seed: int | None = None
    """Of guesses of all kinds, where steps are not planned ahead; None makes none."""

    @property
    def max_blocks(self) -> int:
        """Blocks that the pool ever has."""
        return max(self.num_blocks, *(1 + size * len(self.groups) for _, size in self.resizes), 0)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    cache: CacheOptions
    prompt_logprobs: int | None
    abort_at: int | None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()


windows = st.tuples(st.just("sliding_window"), st.integers(1, 30))
layouts = st.builds(
    lambda full, windows: (*full, *windows),
    st.sampled_from([("full",), ("full",), ()]),
    st.lists(windows, max_size=3),
).map(lambda groups: groups or ("full",))


retentions = st.just(Retention(interval=None)) | st.builds(
    Retention,
    interval=st.sampled_from([0, 8]),
    pin=st.booleans(),
    pin_max_share=st.sampled_from([0.2, 1.0]),
    pin_min_drop_size=st.integers(0, 3),
    pin_prefix_blocks=st.booleans(),
)


resizes = st.just(()) | st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=5
).map(tuple)


@st.composite
def setups(
    draw: st.DrawFn, resizes: st.SearchStrategy[tuple[tuple[int, int], ...]] = resizes
) -> Setup:
    seqs = draw(st.integers(1, 6))
    groups = draw(layouts)
    return Setup(
        num_blocks=1 + len(groups) * draw(st.integers(3, 24)),
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + draw(st.integers(0, 24)),
        max_model_len=draw(st.sampled_from([16, 40, 64])),
        share_in_flight=draw(st.booleans()),
        merge_twins=draw(st.booleans()),
        ahead=draw(st.booleans()),
        fails_at=draw(st.sampled_from([(), (), (3,), (6, 7)])),
        chunk_seed=draw(st.none() | st.integers(0, 99)),
        groups=groups,
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        clears_at=draw(st.sampled_from([(), (), (4,), (5, 9)])),
        new_weights_at=draw(st.sampled_from([(), (), (4,), (7, 8)])),
        in_flight=draw(st.sampled_from(["recompute", "keep"])),
        retention=draw(retentions),
        retention_budget=draw(st.sampled_from([0.2, 0.5, 1.0])),
        max_queue_delay=draw(st.sampled_from([None, 0, 4, 1e9])),
        resizes=draw(resizes),
        draft_seed=draw(st.none() | st.integers(0, 99)),
    )


# Prompts branch from a few stems, so that requests share prefixes of every length.
STEMS = [tuple(range(40)), tuple(range(50, 90))]
prompts = st.builds(
    lambda stem, length, tail: stem[:length] + tuple(tail),
    st.sampled_from(STEMS),
    st.integers(1, 36),
    st.lists(st.integers(0, 96), max_size=5),
)
# In order and apart, for prompts of any length: what leaves one is cut off.
hints = st.lists(st.integers(0, 40), max_size=4, unique=True).flatmap(
    lambda cuts: st.tuples(
        *(
            st.builds(
                RetentionRange,
                start=st.just(start),
                end=st.just(end),
                priority=st.sampled_from([None, 0, 20, 60, 100]),
                ttl_s=st.sampled_from([None, 1, 5]),
            )
            for start, end in itertools.pairwise(sorted(cuts))
        )
    )
)
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=prompts,
    max_tokens=st.integers(1, 24),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    cache=st.builds(
        CacheOptions,
        salt=st.sampled_from([None, None, "tenant"]),
        read=st.sampled_from([True, True, False]),
        write=st.sampled_from([True, True, False]),
        retention=st.just(()) | hints,
        write_upto=st.sampled_from([None, None, None, 0, 6, 16]),
    ),
    prompt_logprobs=st.sampled_from([None, None, 0]),
    abort_at=st.sampled_from([None, None, None, 5, 9]),
    logprobs=st.sampled_from([None, None, None, 0]),
    stop_token_ids=st.sampled_from([(), (), tuple(range(0, 97, 9))]),
)


def within(arrival: Arrival) -> tuple[RetentionRange, ...]:
    """The hints of a request as far as they lie in its prompt."""
    length = len(arrival.prompt)
    ranges = (replace(r, end=min(r.end or 0, length)) for r in arrival.cache.retention)
    return tuple(r for r in ranges if r.start < length)


class Run:
    """One engine fed with arrivals; looks at every plan."""

    def __init__(self, setup: Setup, folder: Path | None = None) -> None:
        """In a `folder` the cache is what another life left there, and stays for the next one."""
        self.setup = setup
        self.num_steps = 0
        self.answers: dict[str, list[int]] = {}
        blocks = {} if folder is None else {"make_blocks": partial(KeptBlocks, folder=folder)}
        self.engine, self.runner, self.cache = make_engine(
            make_cache=partial(make_cache, weights=content_name("a")),
            num_blocks=setup.num_blocks,
            block_size=BLOCK,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            eos_token_ids=[EOS],
            share_in_flight=setup.share_in_flight,
            merge_twins=setup.merge_twins,
            ahead=setup.ahead,
            step_times=None if setup.chunk_seed is None else RandomChunks(setup.chunk_seed),
            groups=setup.groups,
            retention=setup.retention,
            retention_budget=setup.retention_budget,
            enable_prefix_caching=setup.enable_prefix_caching,
            max_blocks=setup.max_blocks if setup.resizes else None,
            pool_options={"clock": slow_clock()} | blocks,
            rules=self.order_of_starts(),
            clock=lambda: self.num_steps,
            drafter=self.drafter(),
        )
        self.file: KeptFile | None = None
        if folder is not None:
            self.file = self.engine._pool.memory.file
            self.cache.start_tiers(self.file)
            self.file.commit_blocks = 1  # Longer hits wait until their blocks were read.
        self.least_blocks = setup.num_blocks
        self.reference = ReferenceCache(setup.num_blocks, BLOCK, setup.groups)
        self.runner.on_row = self.check_held
        self.wrong: list[AssertionError] = []
        self.watch(self.runner)
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self.accepted: dict[str, Arrival] = {}
        self.computed: Counter[str] = Counter()
        self.decoding: set[str] = set()
        self.num_checked = 0

    def drafter(self) -> HostileDrafter | None:
        seed = self.setup.draft_seed
        if seed is None or self.setup.ahead:
            return None
        return HostileDrafter(seed, self.answers, VOCAB_SIZE)

    def answer(self, arrival: Arrival) -> list[int]:
        ends = [EOS, *arrival.stop_token_ids]
        return answer_alone(arrival.prompt, arrival.max_tokens, ends, groups=self.setup.groups)

    def order_of_starts(self) -> dict[str, object]:
        delay = self.setup.max_queue_delay
        if delay is None:
            return {}
        return {"scheduling_policy": "cache-aware", "max_queue_delay": delay}

    def watch(self, runner: FakeRunner) -> None:
        """The engine survives whatever a step raises; what the runner found wrong must not pass."""
        execute = runner.execute

        def execute_watched(plan: StepPlan) -> list[SequenceOutput]:
            try:
                return execute(plan)
            except AssertionError as error:
                self.wrong.append(error)
                raise

        runner.execute = execute_watched  # type: ignore[method-assign]

    def drive(self, work: list[Arrival]) -> None:
        step = 0
        while step <= max((a.step for a in work), default=0) or self.engine.has_unfinished():
            for number, arrival in enumerate(work):
                if arrival.step == step:
                    self.add(str(number), arrival)
                if arrival.abort_at == step:
                    self.take(self.engine.abort([str(number)]))
            for at, size in self.setup.resizes:
                if at == step:
                    self.resize(1 + size * len(self.setup.groups))
            self.cache.core.set_time(step)
            if step in self.setup.clears_at:
                self.engine.control.reset_prefix_cache()
            if step in self.setup.new_weights_at:
                self.change_weights()
            if step in self.setup.fails_at:
                self.runner.failures.append(RuntimeError("a planted failure"))
            self.step()
            step = self.num_steps = step + 1
            assert step < 2000, "the loop hangs"

    def resize(self, num_blocks: int) -> None:
        """All at once, or slice by slice between the steps that follow."""
        pool = self.engine._pool
        assert pool is not None
        self.least_blocks = min(self.least_blocks, num_blocks)
        if pool.counts.resizes % 2:
            pool.resize(num_blocks)
        else:
            status = self.engine.control.resize(num_blocks=num_blocks)
            assert status.num_blocks == status.target_blocks == num_blocks
            assert status.is_done == (not status.blocks_held_above)
            self.take(self.engine.take_outputs())

    def check_pool(self) -> None:
        """Memory is there for what is in the pool or held, and for nothing else once it is done."""
        pool = self.engine._pool
        if pool is None:
            return
        held = self.cache.held_blocks(self.cache.size.num_blocks)
        assert {*range(self.cache.size.num_blocks), *held} <= pool.memory.usable
        assert pool.status.blocks_held_above in (0, len(set(held)))
        if pool.status.is_done:
            assert pool.memory.usable == set(range(self.cache.size.num_blocks))

    def add(self, name: str, arrival: Arrival) -> None:
        request = Request(
            request_id=name,
            prompt_token_ids=arrival.prompt,
            params=SamplingParams(
                max_tokens=arrival.max_tokens,
                prompt_logprobs=arrival.prompt_logprobs,
                logprobs=arrival.logprobs,
                stop_token_ids=arrival.stop_token_ids,
            ),
            cache=replace(arrival.cache, retention=within(arrival)),
            priority=arrival.priority,
        )
        try:
            self.engine.add_request(request)
        except RequestTooLargeError:
            assert not self.fits(arrival)
        else:
            assert self.fits(arrival)
            self.accepted[name] = arrival
            self.answers[name] = [*arrival.prompt, *self.answer(arrival)]

    def fits(self, arrival: Arrival) -> bool:
        total = len(arrival.prompt) + arrival.max_tokens
        most = self.reference.most_blocks(total - 1, self.setup.max_num_batched_tokens)
        return total <= self.setup.max_model_len and most < self.cache.size.attainable_blocks

    def fits_the_least(self, arrival: Arrival) -> bool:
        """Whether the request fits the smallest pool that there was."""
        total = len(arrival.prompt) + arrival.max_tokens
        most = self.reference.most_blocks(total - 1, self.setup.max_num_batched_tokens)
        return most < self.least_blocks

    def change_weights(self) -> None:
        """Tokens do not depend on them, but nothing that was computed may be found."""
        self.engine.requests.drain()
        self.check_new_plans()
        self.take(self.engine.take_outputs())
        self.cache.versions.renew()
        if self.setup.in_flight == "recompute":
            self.engine.requests.restart_all()
            self.take(self.engine.take_outputs())
            self.decoding = set()
            self.decoding = set()

    def step(self) -> None:
        unfinished = self.engine.has_unfinished()
        ran = self.running()
        self.take(self.engine.step())
        for error in self.wrong:
            raise error
        self.cache.core.validate()
        self.check_pool()
        gone = set(ran) - set(self.running()) - set(self.ends)
        assert gone == set(ran[len(ran) - len(gone) :]), "the last in order are preempted"
        num_new = self.check_new_plans()
        assert num_new <= (2 if self.setup.ahead else unfinished)
        self.check_sizes()
        if not (num_new or self.setup.ahead):
            self.decoding = set()

    def check_new_plans(self) -> int:
        """Looks at what was computed since the last call; returns how many steps."""
        new_plans = self.runner.plans[self.num_checked :]
        self.num_checked += len(new_plans)
        for plan in new_plans:
            self.check_plan(plan)
        return len(new_plans)

    def running(self) -> list[str]:
        """Requests that hold blocks, the first to be served first."""
        return [state.request_id for state in self.engine._scheduler._running]

    def check_held(self, row: int, sequence: ScheduledSequence) -> None:
        """What a step reads is in the block tables of its sequences when it is computed.

        A duplicate that was merged meanwhile stands in the table of the step under its old number.
        """
        if sequence.request_id not in self.engine._scheduler._states:
            return
        held = self.cache._sequences[sequence.request_id]
        for group, tables in enumerate(self.runner.tables):
            pages = tables.indices[tables.indptr[row] : tables.indptr[row + 1]].tolist()
            first = int(tables.first_pages[row])
            own = held.block_table(group)[first : first + len(pages)]
            assert len(own) == len(pages)
            assert 0 not in own, "a block was dropped that a step reads"
            assert own == pages or self.setup.merge_twins

    def check_sizes(self) -> None:
        steps = 2 if self.setup.ahead else 1
        chunk = steps * self.setup.max_num_batched_tokens
        for state in self.engine._scheduler._running:
            sequence = self.cache._sequences[state.request_id]
            tables = [sequence.block_table(group) for group in range(len(self.setup.groups))]
            held = sum(block != 0 for table in tables for block in table)
            ahead = 0 if self.setup.draft_seed is None else MOST_DRAFTS
            most = min(state.num_tokens + ahead, state.max_num_tokens)
            assert held <= self.reference.most_blocks(most, chunk)

    def check_plan(self, plan: StepPlan) -> None:
        assert 1 <= plan.num_tokens <= self.setup.max_num_batched_tokens
        assert len(plan.sequences) <= self.setup.max_num_seqs
        assert all(sequence.num_tokens >= 1 for sequence in plan.sequences)
        kinds = [sequence.request_id in self.decoding for sequence in plan.sequences]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        for sequence in plan.sequences:
            arrival = self.accepted[sequence.request_id]
            longest = len(arrival.prompt) + arrival.max_tokens - 1
            assert sequence.start + sequence.num_tokens <= longest, "nobody needs the rest"
            self.computed[sequence.request_id] += sequence.num_tokens
        sampled = [s.request_id for s in plan.sequences if s.sampling is not None]
        self.decoding = set(sampled)

    def take(self, outputs: list) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, "nothing follows the end"
            if output.restarted:
                self.tokens[output.request_id].clear()
            self.tokens[output.request_id].extend(output.token_ids)
            if output.finished:
                self.ends[output.request_id] = output.finish_reason

    def check_end(self) -> None:
        assert set(self.ends) == set(self.accepted)
        while self.engine.has_work():  # the last slices
            self.take(self.engine.step())
        self.check_pool()
        assert self.engine._pool is None or self.engine._pool.status.is_done
        assert self.cache.core.num_free_blocks == self.cache.size.num_blocks - 1
        retention = self.setup.retention or Retention()
        share = retention.pin_max_share if retention.pin else 0
        most = int(share * self.cache.size.num_usable_blocks)
        assert 0 <= self.cache.core.stats()["pinned_blocks"] <= most
        for name, arrival in self.accepted.items():
            ends = [EOS, *arrival.stop_token_ids]
            alone = self.answer(arrival)
            fails = self.setup.fails_at or not self.fits_the_least(arrival)
            if self.ends[name] == "abort" or (self.ends[name] == "error" and fails):
                assert self.tokens[name] == alone[: len(self.tokens[name])]
            else:
                assert self.tokens[name] == alone
                assert self.ends[name] == ("stop" if alone[-1] in ends else "length")


@settings(max_examples=bounded(usual=200, long=5_000), deadline=None)
@given(setup=setups(), work=st.lists(arrivals, min_size=1, max_size=10))
def test_random_requests_get_their_lone_answers(setup: Setup, work: list[Arrival]) -> None:
    run = Run(setup)
    run.drive(work)
    run.check_end()


def live(setup: Setup, work: list[Arrival], folder: Path) -> int:
    """A life of a cache in a folder, whose file has small parts; the blocks that it began with."""
    gc.freeze()  # What all tests have loaded: looking through it took most of the time.
    with mock.patch.object(kv_memory, "_FILL_BYTES", 4 * mmap.PAGESIZE):
        run = Run(setup, folder)
        run.drive(work)
        run.check_end()
    file = run.file
    assert file is not None
    del run
    gc.collect()  # The cache ends with the last reference, and all that it publishes is kept.
    gc.unfreeze()
    file.close()
    return file.num_restored


@settings(max_examples=bounded(usual=40, long=1_500), deadline=None)
@given(setup=setups(resizes.filter(bool)), work=st.lists(arrivals, min_size=1, max_size=10))
def test_kept_blocks_are_right_in_each_life(setup: Setup, work: list[Arrival]) -> None:
    """Pools of several parts in a file change their size, and the next life takes what is there."""
    with TemporaryDirectory() as folder:
        for _ in range(2):
            live(setup, work, Path(folder))


def test_a_life_begins_with_what_was_kept(tmp_path: Path) -> None:
    resizes = ((4, 9), (9, 20))
    setup = Setup(33, 4, 24, 64, resizes=resizes)
    work = [Arrival(i, STEMS[i % 2][: 36 - i], 9, 0, CacheOptions(), None, None) for i in range(6)]
    assert [live(setup, work, tmp_path) > 8 for _ in range(2)] == [False, True]


@settings(max_examples=bounded(usual=50, long=1_000), deadline=None)
@given(
    lengths=st.lists(st.integers(8, 20), min_size=3, max_size=5),
    budget=st.integers(6, 40),
    ahead=st.booleans(),
    chunk_seed=st.none() | st.integers(0, 99),
)
def test_tiny_pools_preempt_and_still_answer(lengths, budget, ahead, chunk_seed):
    """Growing answers that together need twice the pool: preemption cannot be avoided."""
    setup = Setup(
        num_blocks=11,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        max_model_len=40,
        ahead=ahead,
        chunk_seed=chunk_seed,
    )
    run = Run(setup)
    work = [Arrival(0, tuple(range(n, n + 16)), 24, 0, CacheOptions(), None, None) for n in lengths]
    run.drive([a for a in work if len(answer_alone(a.prompt, 24, [EOS])) > 8])
    run.check_end()


def test_preemption_resume_and_hits_really_happen() -> None:
    """The runs above would prove nothing if no block were ever shared or taken away."""
    run = Run(Setup(num_blocks=13, max_num_seqs=6, max_num_batched_tokens=16, max_model_len=40))
    work = [Arrival(i, (*range(12), 90 + i), 20, 0, CacheOptions(), None, None) for i in range(6)]
    run.drive(work)
    run.check_end()
    assert preemptions(run.engine) >= 2
    assert run.engine.control.stats()["hits"] >= 12
    assert any(len(plan.sequences) > 1 for plan in run.runner.plans)
    recomputed = sum(run.computed.values()) - sum(len(a.prompt) for a in work)
    assert recomputed != sum(len(tokens) - 1 for tokens in run.tokens.values())


def test_guesses_are_really_right_and_wrong() -> None:
    setup = Setup(num_blocks=65, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40)
    plain, drafted = Run(setup), Run(replace(setup, draft_seed=1))
    work = [Arrival(i, (*range(12), 90 + i), 20, 0, CacheOptions(), None, None) for i in range(4)]
    for run in (plain, drafted):
        run.drive(work)
        run.check_end()
    drafter = drafted.engine._scheduler.drafter
    assert drafter is not None
    counts = drafter.counts()
    assert 10 < counts.accepted["prompt"] < counts.drafted["prompt"] - 10
    assert drafted.num_steps < plain.num_steps - 5
    cached = [run.engine.control.stats()["cached_blocks"] for run in (plain, drafted)]
    assert cached[0] == cached[1], "what was refused is not published"


def test_waits_and_merges_really_happen() -> None:
    """A crowd of equal prompts waits for one; equal answers then fill equal blocks."""
    run = Run(Setup(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40))
    run.drive([Arrival(0, tuple(range(12)), 20, 0, CacheOptions(), None, None) for _ in range(4)])
    run.check_end()
    assert counter(run.engine, "in_flight_waits") == 3
    assert run.cache.num_merged_blocks >= 3


CROWD = Setup(
    num_blocks=13, max_num_seqs=6, max_num_batched_tokens=16, max_model_len=40, ahead=True
)

FAILING_CROWD = replace(CROWD, fails_at=(6, 7))


def crowd(setup: Setup = CROWD, max_tokens: int = 20) -> Run:
    """Requests that share, stop early, are preempted, aborted, and sampled on the host at times."""
    run = Run(setup)
    work = [
        Arrival(
            step=2 * i,
            prompt=(*range(12), 60 + i),
            max_tokens=max_tokens,
            priority=0,
            cache=CacheOptions(),
            prompt_logprobs=None,
            abort_at=9 if i == 2 else None,
            logprobs=0 if i == 7 else None,
            stop_token_ids=tuple(range(0, 97, 9)) if i % 2 else (),
        )
        for i in range(8)
    ]
    run.drive(work)
    run.check_end()
    return run


def test_steps_are_really_planned_ahead() -> None:
    run = crowd()
    assert run.runner.num_ahead > len(run.runner.plans) / 2
    assert preemptions(run.engine) >= 2
    assert run.engine.control.stats()["hits"] >= 12
    assert "stop" in run.ends.values()
    assert "abort" in run.ends.values()


def test_a_crowd_survives_steps_that_fail() -> None:
    ends = crowd(FAILING_CROWD).ends
    assert list(ends.values()).count("error") >= 2
    assert set(ends.values()) > {"error"}


def _publish_pending_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    _go_by_what_is_planned(monkeypatch, "publish")


def _go_by_what_is_planned(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Gives a method of the publisher what is planned of each request, not what is computed."""
    method = getattr(Publisher, name)
    monkeypatch.setattr(
        Publisher,
        name,
        lambda self, computed: method(
            self, [(state, state.num_computed_tokens) for state, _ in computed]
        ),
    )


def _keep_what_follows_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = property(lambda state: False, lambda state, ended: None)
    monkeypatch.setattr(RequestState, "has_ended", alive)


def _name_the_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RequestState.plan
    monkeypatch.setattr(
        RequestState, "plan", lambda self, count, row, drafts: plan(self, count, 0, drafts)
    )


def _sample_past_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestState, "is_full", False)


def _plan_on_unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if whatever the host samples were known on the device."""
    submit = LateRunner.submit

    def submit_unknown(runner: LateRunner, plan: StepPlan) -> LateStep:
        step = submit(runner, plan)
        step.is_known = False
        return step

    monkeypatch.setattr(LateRunner, "submit", submit_unknown)


def _go_on_after_failed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the requests of a failed step had been computed."""

    def forget_steps(scheduler: Scheduler) -> list[str]:
        scheduler.steps_in_flight.clear()
        return []

    monkeypatch.setattr(Scheduler, "fail", forget_steps)


@pytest.mark.parametrize(
    "break_it",
    [
        _go_on_after_failed_steps,
        _publish_pending_tokens,
        _keep_what_follows_the_end,
        _name_the_wrong_row,
        _sample_past_max_tokens,
        _plan_on_unknown_tokens,
    ],
)
def test_runs_ahead_notice_what_they_are_for(monkeypatch, break_it):
    break_it(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):  # noqa: PT012 - one of the two
        crowd()
        crowd(FAILING_CROWD)


HYBRID: tuple[GroupKind, ...] = ("full", ("sliding_window", 6), ("sliding_window", 6))
ALL_WINDOWS: tuple[GroupKind, ...] = (("sliding_window", 18),)


def crowd_behind_windows(groups: tuple[GroupKind, ...], *, ahead: bool) -> Run:
    """Answers many windows long in a pool that does not hold all of them."""
    setup = replace(
        CROWD,
        num_blocks=1 + 10 * len(groups),
        max_num_batched_tokens=8,
        max_model_len=64,
        groups=groups,
        retention=Retention(interval=None),  # it holds no block below the window
        ahead=ahead,
    )
    return crowd(setup, max_tokens=48)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("groups", [HYBRID, ALL_WINDOWS])
def test_crowds_behind_windows_share_and_are_preempted(groups, ahead):
    run = crowd_behind_windows(groups, ahead=ahead)
    assert preemptions(run.engine) >= 1
    assert run.engine.control.stats()["hits"] >= 12
    assert "abort" in run.ends.values()


def _drop_while_a_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    _go_by_what_is_planned(monkeypatch, "drop_unneeded")


def _drop_one_block_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = CacheManager.drop_unneeded
    monkeypatch.setattr(
        CacheManager,
        "drop_unneeded",
        lambda self, computed: drop(
            self, [(request_id, upto + BLOCK) for request_id, upto in computed]
        ),
    )


def _never_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "drop_unneeded", lambda self, computed: None)


@pytest.mark.parametrize("groups", [HYBRID, ALL_WINDOWS])
@pytest.mark.parametrize(
    "break_it", [_drop_while_a_step_is_in_flight, _drop_one_block_too_many, _never_drop]
)
def test_crowds_behind_windows_notice_what_they_are_for(monkeypatch, break_it, groups):
    break_it(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):  # noqa: PT012 - one of the two
        crowd_behind_windows(groups, ahead=True)
        crowd_behind_windows(groups, ahead=False)


PLANS = Path(__file__).parents[1] / "snapshots/plans.json"
BUSY = Setup(33, 6, 70, 64)
SNAPSHOT_SETUPS = {
    "plain": BUSY,
    "chunks": replace(BUSY, max_num_batched_tokens=14, chunk_seed=5),
    "ahead": replace(BUSY, ahead=True, num_blocks=17),
    "drafts": replace(BUSY, draft_seed=3),
    "hits first": replace(BUSY, max_queue_delay=4),
    "new weights": replace(BUSY, new_weights_at=(6,), clears_at=(9,), fails_at=(12,)),
    "no sharing": replace(BUSY, share_in_flight=False, enable_prefix_caching=False),
    "windows": replace(BUSY, num_blocks=49, groups=HYBRID, max_num_batched_tokens=20),
    "resizes": replace(BUSY, resizes=((4, 9), (9, 30))),
}


def recorded_work() -> list[Arrival]:
    """Always the same random requests, most of which share a prefix and come together."""
    draw = random.Random(7)
    return [
        Arrival(
            step=draw.choice([0, 0, 0, 3, draw.randrange(20)]),
            prompt=(*STEMS[number // 18][: draw.randint(9, 36)], draw.randrange(97)),
            max_tokens=draw.randint(1, 24),
            priority=draw.choice([0, 0, 0, 1, -1]),
            cache=CacheOptions(read=draw.random() < 0.9, write_upto=draw.choice([None, None, 16])),
            prompt_logprobs=draw.choice([None, None, None, 0]),
            abort_at=draw.choice([None, None, None, 9]),
        )
        for number in range(24)
    ]


def digest_of_plans(run: Run) -> str:
    plans = [
        (
            [(s.request_id, s.start, s.num_tokens, s.sampling is None) for s in plan.sequences],
            plan.token_ids.tolist(),
            [(row, len(inputs)) for row, inputs in plan.drafts],
        )
        for plan in run.runner.plans
    ]
    return hashlib.sha256(repr(plans).encode()).hexdigest()


def test_plans_are_those_of_the_snapshot() -> None:
    """A change that is to change no decision of the scheduler changes no plan.

    Where it is to, run this with PREFIXCACHE_WRITE_SNAPSHOTS=1.
    """
    runs = {name: Run(setup) for name, setup in SNAPSHOT_SETUPS.items()}
    for run in runs.values():
        run.drive(recorded_work())
        run.check_end()
    assert all(preemptions(runs[name].engine) for name in ("plain", "ahead", "drafts", "windows"))
    assert counter(runs["plain"].engine, "in_flight_waits") >= 3
    plans = {name: digest_of_plans(run) for name, run in runs.items()}
    if os.environ.get("PREFIXCACHE_WRITE_SNAPSHOTS"):
        PLANS.write_text(json.dumps(plans, indent=2) + "\n")
    assert plans == json.loads(PLANS.read_text())


def preemptions(engine: Engine) -> float:
    return counter(engine, "num_preemptions")


def counter(engine: Engine, name: str) -> float:
    return engine.metrics.registry.get_sample_value(f"prefixcache:{name}_total") or 0
