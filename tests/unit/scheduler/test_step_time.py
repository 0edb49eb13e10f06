"""Chunks of prompts sized by time: no answer waits long for its next token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from fakes.plain_runner import KnownStep
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import ConfigError
from prefixcache.scheduler.budget import MIN_CHUNK, TIMES_LONGER_ALONE, StepBudget
from prefixcache.scheduler.step_time import StepLoad, StepTimeModel
from prefixcache.types.step_plan import ScheduledSequence, StepPlan
from support.plans import plan_of

LIMIT = 0.25


class Machine:
    """A clock that steps move on: as many seconds as they take on a machine of that speed."""

    def __init__(self, fixed: float, per_token: float, per_pair: float, noise: float = 0.0) -> None:
        self.costs = (fixed, per_token, per_pair)
        self.slowness = 1.0
        self.now = 0.0
        self.steps: list[tuple[StepPlan, float]] = []
        self._noise = noise
        self._random = random.Random(0)

    def clock(self) -> float:
        return self.now

    def compute(self, plan: StepPlan) -> None:
        load = StepLoad()
        for sequence in plan.sequences:
            load = load.plus(sequence.start, sequence.num_tokens)
        fixed, per_token, per_pair = self.costs
        mean = fixed + per_token * load.tokens + per_pair * load.pairs
        seconds = mean * self.slowness * self._random.lognormvariate(0, self._noise)
        self.now += seconds
        self.steps.append((plan, seconds))


# 3.4 ms a token at the start of a prompt, 6.4 after 6,000 tokens: the default model on two cores.
TWO_CORES = (0.025, 0.0034, 5e-7)
FAST = (0.002, 1e-4, 1e-8)


def engine_on(machine: Machine, *, max_model_len: int = 8192, **options: Any) -> Engine:
    usual: dict[str, Any] = {
        "num_blocks": 4000,
        "max_num_batched_tokens": 2048,
        "max_step_ms": 250,
        "step_times": StepTimeModel(),
    }
    engine, runner, _ = make_engine(
        max_model_len=max_model_len, clock=machine.clock, **(usual | options)
    )
    submit = runner.submit

    def timed(plan: StepPlan) -> KnownStep:
        machine.compute(plan)
        return submit(plan)

    runner.submit = timed  # type: ignore[method-assign]
    return engine


def run(engine: Engine, request_id: str, prompt: list[int]) -> None:
    """Until the request has its one token."""
    engine.add_request(make_request(request_id, prompt, max_tokens=1))
    for _ in range(5000):
        if any(o.request_id == request_id and o.finished for o in engine.step()):
            return
    raise AssertionError("the loop hangs")


def gaps(machine: Machine, waiting: str) -> list[float]:
    """Seconds between two tokens of a request."""
    return [
        seconds
        for plan, seconds in machine.steps
        if any(s.request_id == waiting and s.num_tokens == 1 for s in plan.sequences)
    ]


def chunks(machine: Machine, name: str) -> list[int]:
    return [
        s.num_tokens for plan, _ in machine.steps for s in plan.sequences if s.request_id == name
    ]


def long_prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i * i) % 97 for i in range(length)]


def streaming(engine: Engine) -> None:
    """A request whose answer is in flight."""
    engine.add_request(make_request("stream", [1, 2, 3], max_tokens=3000))
    for _ in range(20):
        engine.step()


@pytest.mark.parametrize("costs", [TWO_CORES, FAST, (0.1, 0.001, 1e-7), (0.0, 0.01, 0.0)])
def test_no_answer_waits_longer_than_the_limit(costs: tuple[float, float, float]) -> None:
    machine = Machine(*costs)
    engine = engine_on(machine)
    streaming(engine)
    run(engine, "long", long_prompt(4000))
    assert max(gaps(machine, "stream")) <= LIMIT * 1.0001
    taken = chunks(machine, "long")
    assert sum(taken) == 4000
    assert len(taken) < 1.3 * sum(gaps(machine, "stream")[-len(taken) :]) / LIMIT + 10


def test_without_a_limit_the_same_prompt_freezes_the_others() -> None:
    machine = Machine(*TWO_CORES)
    engine = engine_on(machine, step_times=None)
    streaming(engine)
    run(engine, "long", long_prompt(4000))
    assert max(gaps(machine, "stream")) > 6


def test_chunks_get_shorter_deeper_in_a_prompt() -> None:
    machine = Machine(*TWO_CORES)
    engine = engine_on(machine)
    streaming(engine)
    run(engine, "long", long_prompt(6000))
    taken = chunks(machine, "long")
    assert taken[0] == MIN_CHUNK, "nothing is known of chunks at first"
    assert max(taken) > 55
    assert taken[-2] < 40


def test_a_hit_deep_in_a_prompt_is_approached_with_care() -> None:
    machine = Machine(*TWO_CORES)
    engine = engine_on(machine)
    run(engine, "warm", long_prompt(5000))
    for name in ("x", "y"):  # what is remembered of chunks is short ones at the start
        run(engine, name, long_prompt(40, ord(name)))
    streaming(engine)
    machine.steps.clear()
    prompt = [*long_prompt(5000), *long_prompt(400, 7)]
    run(engine, "hit", prompt)
    assert sum(chunks(machine, "hit")) == 400
    assert max(gaps(machine, "stream")) <= LIMIT * 1.0001


def test_a_machine_that_becomes_slower_is_followed() -> None:
    machine = Machine(*TWO_CORES)
    engine = engine_on(machine)
    streaming(engine)
    run(engine, "first", long_prompt(1000))
    machine.slowness = 3.0
    machine.steps.clear()
    run(engine, "second", long_prompt(1000, 5))
    waited = gaps(machine, "stream")
    assert waited[0] > LIMIT
    assert max(waited[12:]) <= LIMIT * 1.05


def test_noise_makes_chunks_shorter_rather_than_answers_late() -> None:
    def measured(noise: float) -> tuple[float, float]:
        """The share of late steps, and a chunk's mean length."""
        machine = Machine(*TWO_CORES, noise)
        engine = engine_on(machine)
        streaming(engine)
        run(engine, "long", long_prompt(4000))
        taken = chunks(machine, "long")
        waited = gaps(machine, "stream")[-len(taken) :]
        return sum(gap > LIMIT for gap in waited) / len(waited), sum(taken) / len(taken)

    late, length = measured(noise=0.2)
    assert late < 0.25
    assert length < measured(noise=0.0)[1]


def test_a_prompt_alone_takes_longer_steps() -> None:
    machine = Machine(*TWO_CORES)
    engine = engine_on(machine)
    run(engine, "short", long_prompt(100))
    run(engine, "long", long_prompt(6000, 3))
    seconds = [s for _, s in machine.steps[1:]]
    assert len(seconds) < 20
    assert max(seconds[1:]) <= LIMIT * TIMES_LONGER_ALONE * 1.0001


def test_decodes_that_take_all_the_time_let_prompts_go_on() -> None:
    machine = Machine(0.5, 0.001, 0.0)
    engine = engine_on(machine)
    streaming(engine)
    engine.add_request(make_request("long", long_prompt(100), max_tokens=1))
    run(engine, "next", long_prompt(30, 5))
    assert set(chunks(machine, "long")[:-1]) == {MIN_CHUNK}
    assert sum(chunks(machine, "next")) == 30


def test_answers_are_those_of_lone_requests() -> None:
    machine = Machine(*TWO_CORES, noise=0.3)
    engine = engine_on(machine)
    prompts = {str(n): long_prompt(300 + 100 * n, n) for n in range(4)}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(make_request(name, prompt, max_tokens=30))
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert tokens == {name: answer_alone(prompt, 30) for name, prompt in prompts.items()}


def test_an_in_flight_step_counts_from_the_end_of_the_one_before() -> None:
    seen: list[float] = []

    class Recorder(StepTimeModel):
        def observe(self, plan: StepPlan, seconds: float) -> None:
            seen.append(seconds)

    now = 0.0
    engine, runner, _ = make_engine(ahead=True, step_times=Recorder(), clock=lambda: now)
    compute: Any = runner._compute

    def slow(step: Any) -> Any:
        nonlocal now
        now += 1.0
        return compute(step)

    runner._compute = slow  # type: ignore[attr-defined]
    engine.add_request(make_request(max_tokens=6))
    while engine.has_unfinished():
        engine.step()
        now += 0.25  # the host is at something else, while the device computes
    assert runner.num_ahead > 2
    assert all(seconds <= 1.25 for seconds in seen)


def scheduled(start: int, count: int) -> ScheduledSequence:
    return ScheduledSequence(request_id="a", start=start, num_tokens=count, sampling=None)


def learned(*steps: tuple[Sequence[tuple[int, int]], float]) -> StepTimeModel:
    model = StepTimeModel()
    for parts, seconds in steps:
        model.observe(plan_of([scheduled(*part) for part in parts]), seconds)
    return model


def test_pairs_are_tokens_times_what_they_attend_to() -> None:
    assert StepLoad().plus(0, 3) == StepLoad(3, 1 + 2 + 3)
    assert StepLoad(2, 5).plus(10, 2) == StepLoad(4, 5 + 11 + 12)


def test_nothing_known_fits_nothing_nearby_and_anything_alone() -> None:
    model = StepTimeModel()
    assert model.most_tokens(StepLoad(), 0, 100, LIMIT, stays_near=True) == 0
    assert model.most_tokens(StepLoad(), 0, 100, LIMIT, stays_near=False) == 100


def test_a_time_of_zero_is_no_division_by_zero() -> None:
    model = learned(([(0, 8)], 0.0), ([(0, 8)], 0.0))
    assert model.most_tokens(StepLoad(), 0, 100, LIMIT, stays_near=True) == 16


def test_equal_steps_alone_do_not_tell_token_from_pair() -> None:
    """Some split of the time is taken, and none is negative."""
    model = learned(*[([(0, 100)], 1.0)] * 8)
    most = model.most_tokens(StepLoad(), 0, 400, 1.0, stays_near=False)
    assert 95 <= most <= 105


def test_thousands_of_decodes_do_not_wash_out_what_prompts_taught() -> None:
    prefills = [([(start, 50)], 0.02 + 0.05 * 50 / 10) for start in range(0, 500, 50)]
    model = learned(*prefills, *[([(600, 1)], 0.02)] * 5000)
    assert model.most_tokens(StepLoad(), 0, 100, 0.27, stays_near=True) in range(45, 51)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True])
def test_a_wrong_limit_is_named(value: float) -> None:
    with pytest.raises(ConfigError, match="max_step_ms"):
        SchedulerConfig(max_step_ms=value)


def test_the_budget_of_tokens_holds_too() -> None:
    budget = StepBudget(20, LIMIT, learned(([(0, 100)], 0.001)))
    budget.add_decode(5)
    assert budget.take_chunk(0, 12) == 12
    assert budget.take_chunk(0, 12) == 7
    assert not budget.room
