"""A runner that computes each step as late as a device may."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from fakes.fake_runner import FakeRunner
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.types.step_plan import SamplingInput, SequenceOutput, StepPlan, StepResult


class LateRunner(FakeRunner):
    """Computes a step when its outputs, or those of a later one, are asked for.

    What the host changes until then must not matter, so the block tables are taken along and
    spoiled. Tokens below zero are those of the step before, unless it said that its are known.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runs_ahead = True
        self.num_ahead = 0
        self._queue: deque[LateStep] = deque()
        self._sampled: list[int] = []

    def submit(self, plan: StepPlan) -> LateStep:
        assert len(self._queue) < 2, "at most two steps are in flight"
        self.num_ahead += len(self._queue)
        step = LateStep(plan, copy.deepcopy(self.block_tables), is_known=not _stays(plan))
        self._queue.append(step)
        for tables in self.block_tables:
            tables.slot_mapping.fill(-(2**40))
            tables.indices.fill(-(2**20))
        if step.is_known:
            self.compute_until(step)
        return step

    def results(self, step: LateStep) -> StepResult:
        self.compute_until(step)
        assert step.values is not None
        return StepResult(step.values)

    def finish(self) -> None:
        """Computes what was submitted, whether or not anybody reads it."""
        if self._queue:
            self.compute_until(self._queue[-1])

    def compute_until(self, step: LateStep) -> None:
        while step.values is None and step.error is None:
            current = self._queue.popleft()
            try:
                current.values = self._compute(current)
            except KeyboardInterrupt:  # of whoever waits: the device goes on
                self._queue.appendleft(current)
                raise
            except Exception as error:  # noqa: BLE001 - whoever reads the steps gets it
                for failed in (current, *self._queue):  # nothing more is computed
                    failed.error = error
                self._queue.clear()
        if step.error is not None:
            raise step.error

    def _compute(self, step: LateStep) -> list[SequenceOutput]:
        own, self.tables = self.tables, step.tables
        try:
            outputs = self.execute(self._resolved(step.plan))
        finally:
            self.tables = own
        self._sampled = [o.token_id or 0 for o in outputs if o.token_id is not None or o.error]
        return outputs

    def _resolved(self, plan: StepPlan) -> StepPlan:
        tokens = [t if t >= 0 else self._sampled[-1 - t] for t in plan.token_ids.tolist()]
        return dataclasses.replace(plan, token_ids=np.array(tokens, dtype=np.int32))


@dataclass(eq=False)
class LateStep:
    plan: StepPlan
    tables: tuple[BlockTableBuffers, ...]
    is_known: bool
    values: list[SequenceOutput] | None = None
    error: Exception | None = None


def _stays(plan: StepPlan) -> bool:
    """Whether all tokens of a step are chosen on the device; those of others need the past."""
    sampled = [(s, s.sampling) for s in plan.sequences if s.sampling is not None]
    for sequence, sampling in sampled:
        known = len(sampling.tokens)
        assert _on_device(sampling) or known == sequence.start + sequence.num_tokens
    prompt_logprobs = any(s.prompt_logprobs is not None for s in plan.sequences)
    return (bool(sampled) or prompt_logprobs) and all(_on_device(s) for _, s in sampled)


def _on_device(sampling: SamplingInput) -> bool:
    return sampling.params.logprobs is None and not sampling.banned_token_ids
