"""A scheduler that tests drive step by step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fakes.fake_engine import make_engine
from fakes.fake_runner import FakeRunner
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import StepPlan


class Bench:
    """A scheduler with its cache and runner, stepped by hand."""

    make_runner: Callable[..., Any] = FakeRunner

    def __init__(self, **options: Any) -> None:
        """Options are those of `make_engine`, and fields of `SchedulerConfig`."""
        names = options.keys() & inspect.signature(make_engine).parameters
        parts = {name: options.pop(name) for name in names}
        engine, self.runner, self.cache = make_engine(
            make_runner=self.make_runner, rules=options, **parts
        )
        self.scheduler = engine._scheduler
        self.answers: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4, **options: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, **options.pop("params", {}))
        request = Request(request_id=request_id, prompt_token_ids=prompt, params=params, **options)
        self.scheduler.limits.check(request)
        self.scheduler.add(request, seed=0)
        self.answers[request_id] = []
        self.limits[request_id] = max_tokens

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.cache.core.validate()
        if not plan.sequences:
            return plan
        self.cache.fill(plan, self.runner.block_tables)
        outputs = self.runner.results(self.runner.submit(plan)).outputs
        self.scheduler.complete(plan, outputs)
        for sequence, output in zip(plan.sequences, outputs, strict=True):
            if output.token_id is not None:
                self.answers[sequence.request_id].append(output.token_id)
        full = [i for i, answer in self.answers.items() if len(answer) == self.limits[i]]
        self.scheduler.finish(full, ended_well=full)
        self.cache.core.validate()
        return plan

    def run(self, limit: int = 1000) -> None:
        steps = 0
        while self.scheduler.has_unfinished():
            self.step()
            steps += 1
            assert steps < limit, "the loop hangs"


def counts(plan: StepPlan) -> dict[str, int]:
    return {sequence.request_id: sequence.num_tokens for sequence in plan.sequences}


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 90 for i in range(length)]
