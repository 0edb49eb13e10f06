"""A scheduler that tests drive step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fakes.fake_runner import FakeRunner
from prefixcache.config.engine_config import SchedulerConfig
from prefixcache.kv.cache_manager import CacheManager, GroupKind
from prefixcache.kv.retention import Retention
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import StepPlan


class Bench:
    """A scheduler with its cache and runner, stepped by hand."""

    make_runner: Callable[..., Any] = FakeRunner

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        enable_prefix_caching: bool = True,
        groups: Sequence[GroupKind] = ("full",),
        retention: Retention | None = None,
        retention_budget: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
        **rules: Any,
    ) -> None:
        self.cache = CacheManager(
            num_blocks,
            block_size,
            groups=groups,
            retention=retention,
            retention_budget=retention_budget,
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            **{"share_in_flight": False, **rules},
        )
        self.scheduler = Scheduler(
            config,
            self.cache,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            clock=clock,
        )
        self.runner = self.make_runner(
            num_blocks,
            block_size,
            max_tokens=max_num_batched_tokens,
            max_seqs=max_num_seqs,
            max_pages=-(-max_model_len // block_size),
            **({} if groups == ("full",) else {"groups": groups}),
        )
        self.answers: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4, **options: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, **options.pop("params", {}))
        request = Request(request_id=request_id, prompt_token_ids=prompt, params=params, **options)
        self.scheduler.add(request, seed=0)
        self.answers[request_id] = []
        self.limits[request_id] = max_tokens

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.cache.validate()
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
        self.cache.validate()
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
