"""Steps on their way through the runner, and what becomes of requests between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from prefixcache.config.logs import SHOWS_ERROR
from prefixcache.engine.change_log import ChangeLog
from prefixcache.engine.output import Answers, failed
from prefixcache.engine.weight_versions import WeightVersions
from prefixcache.exceptions import EngineDeadError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.elastic import ElasticPool
from prefixcache.metrics import Metrics
from prefixcache.runner.base import StepRunner
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.modes import InFlightMode
from prefixcache.types.request import Ending, RequestOutput
from prefixcache.types.step_plan import ScheduledSequence, SequenceOutput, StepPlan

logger = logging.getLogger(__name__)


class Steps:
    """Submits planned steps and reads them. One thread makes all calls.

    A step that fails ends its requests. `clock` tells seconds, by which the scheduler learns how
    long steps take; `last_read` is when it was asked last.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CacheManager,
        runner: StepRunner[Any],
        answers: Answers,
        versions: WeightVersions,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._answers = answers
        self._versions = versions
        self._metrics = metrics
        self._clock = clock
        self._steps = scheduler.steps_in_flight
        self._host_since = 0.0
        self.last_read = clock()

    def begin(self) -> None:
        """What the host does from here on counts as time of the next step that is read."""
        self._host_since = time.perf_counter()

    def submit(self, plan: StepPlan) -> None:
        """Submits the step that was scheduled last."""
        self._answers.begin(plan, self._versions)
        step = self._steps[-1]
        step.since = self._clock()
        try:
            self._cache.fill(plan, self._runner.block_tables)
            with self._in_runner():
                step.in_flight = self._runner.submit(plan)
        except Exception as error:  # noqa: BLE001 - the steps before are read first
            step.error = error

    def read_all(self) -> list[RequestOutput]:
        """What came of all steps in flight."""
        outputs: list[RequestOutput] = []
        while self._steps:
            outputs += self._read_oldest()
        return outputs

    def read_due(self) -> list[RequestOutput]:
        """What came of all steps but one that may stay in flight until the next is submitted."""
        outputs: list[RequestOutput] = []
        while self._steps and not self._may_stay():
            outputs += self._read_oldest()
        return outputs

    def _may_stay(self) -> bool:
        """Whether the oldest step may stay in flight: with guesses none may."""
        is_last = len(self._steps) == 1 and self._scheduler.has_unfinished()
        if not (is_last and self._scheduler.drafter.allows_ahead):
            return False
        step = self._steps[0].in_flight
        return step is not None and not step.is_known

    def _read_oldest(self) -> list[RequestOutput]:
        """What came of a step; when it fails, those submitted after it do too."""
        step = self._steps[0]
        plan = step.plan
        try:
            if step.error is not None:
                raise step.error
            with self._in_runner():
                results = self._runner.results(step.in_flight).outputs
        except Exception as error:  # whatever the model raised, the others can be served
            logger.exception("A step failed; its requests end.", extra=SHOWS_ERROR)
            return self._fail_all(error)
        self._observe_time(plan, step.since)
        outputs = self._outputs(plan, results)
        self._metrics.iteration_tokens.observe(plan.num_tokens)
        before, self._host_since = self._host_since, time.perf_counter()
        self._metrics.step_overhead.observe(self._host_since - before)
        return outputs

    @contextmanager
    def _in_runner(self) -> Generator[None, None, None]:
        """What is done meanwhile is no time of the host."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._host_since += time.perf_counter() - begun

    def _observe_time(self, plan: StepPlan, since: float) -> None:
        """A step submitted ahead begins when the one before it ends."""
        begun, self.last_read = max(since, self.last_read), self._clock()
        self._scheduler.observe_time(plan, self.last_read - begun)

    def _outputs(self, plan: StepPlan, results: Sequence[SequenceOutput]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        kept = list(results)
        for row, drafts in plan.drafts:
            of_row, kept[row] = self._within_end(plan.sequences[row], len(drafts), results[row])
            outputs += of_row
        drafted = {plan.sequences[row].request_id for row, _ in plan.drafts}
        for scheduled, result in self._scheduler.complete(plan, kept):
            if scheduled.request_id not in drafted:
                output = self._output(scheduled, result)
                if output is not None:
                    outputs.append(output)
        ended = [output.request_id for output in outputs if output.finished]
        well = [output.request_id for output in outputs if output.ended_well]
        self._answers.deliver(outputs)
        self._scheduler.finish(ended, ended_well=well)
        return outputs

    def _within_end(
        self, scheduled: ScheduledSequence, num_drafts: int, result: SequenceOutput
    ) -> tuple[list[RequestOutput], SequenceOutput]:
        """What the caller gets of several tokens, one output each, and the result up to its end.

        What would follow the end of the answer is dropped before it is published.
        """
        answer = self._answers[scheduled.request_id]
        answer.count_drafts(refused=num_drafts - len(result.after_drafts))
        outputs: list[RequestOutput] = []
        for place, token in enumerate((result, *result.after_drafts)):
            answer.count_drafts(accepted=place > 0)
            output = self._output(scheduled, token)
            if output is None:
                break
            outputs.append(output)
            if output.finished:
                return outputs, replace(result, after_drafts=result.after_drafts[:place])
        return outputs, result

    def _output(self, scheduled: ScheduledSequence, result: SequenceOutput) -> RequestOutput | None:
        """What the caller gets, if anything; a failure here is this request's alone."""
        answer = self._answers[scheduled.request_id]
        try:
            if result.prompt_logprobs:
                assert scheduled.prompt_logprobs is not None
                first = scheduled.prompt_logprobs.first
                answer.add_prompt_logprobs(first, result.prompt_logprobs)
            if result.token_id is None and result.error is None:
                return None
            state = self._scheduler.state(scheduled.request_id)
            return answer.push(result, state, self._versions.shown)
        except Exception as error:
            logger.exception("Request %s failed.", scheduled.request_id)
            return answer.end(failed(error))

    def _fail_all(self, error: Exception) -> list[RequestOutput]:
        """Ends the requests of all steps in flight; the device must then compute an empty step.

        Which request the step failed on is not known, so a failure alone says nothing about the
        device: requests that no step survives may come one after another.
        """
        request_ids = self._scheduler.fail()
        try:
            self._runner.run_empty_step()
        except Exception as empty_error:
            raise EngineDeadError(
                f"A step failed with {error!r}, and so did an empty one after it: {empty_error!r}."
            ) from empty_error
        if self._runner.runs_ahead:
            # Steps before it were published in the order of the device's work, which has failed.
            self._cache.versions.reset()
        return [self._answers.end(request_id, failed(error)) for request_id in request_ids]


class InFlightRequests:
    """The requests of an engine; what happens to them by commands comes from `take_outputs`.

    `cache_usage` is the share of blocks that they hold.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CacheManager,
        pool: ElasticPool | None,
        steps: Steps,
        answers: Answers,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._pool = pool
        self._steps = steps
        self._answers = answers
        self._changes = ChangeLog(cache)
        self._outbox: list[RequestOutput] = []
        self.cache_usage = 0.0

    def drain(self) -> None:
        """Waits until no step is in flight."""
        self._steps.begin()
        self._outbox += self._steps.read_all()
        self.note_usage()

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests and frees their blocks; unknown ids are passed over."""
        ended = self._scheduler.finish(request_ids)
        self.note_usage()
        return [self._answers.end(request_id, Ending("abort")) for request_id in ended]

    def interrupt(self, mode: InFlightMode) -> None:
        """They keep their blocks, give them back but not what they generated, or end."""
        if mode == "abort":
            self._outbox += self.abort([*self._answers])
        elif mode == "recompute":
            self._scheduler.requeue_running()
            self.note_usage()

    def change_weights(self, mode: InFlightMode) -> None:
        """New weights are there: each request does what it says itself, or else `mode`."""
        by_mode: dict[InFlightMode, list[str]] = {"recompute": [], "abort": [], "keep": []}
        for request_id in self._answers:
            own = self._answers[request_id].request.cache.on_weight_update
            by_mode[own or mode].append(request_id)
        self._outbox += self.abort(by_mode["abort"])
        self._restart(by_mode["recompute"])

    def restart_all(self) -> None:
        """Takes the blocks of all requests back and restarts their answers."""
        self._restart([*self._answers])

    def _restart(self, request_ids: Sequence[str]) -> None:
        begun = self._scheduler.restart(request_ids)
        outputs = self._answers.restart(request_ids, begun)
        self._scheduler.finish([output.request_id for output in outputs if output.finished])
        self._outbox += outputs
        self.note_usage()

    def take_outputs(self) -> list[RequestOutput]:
        """What happened to requests between steps since the last call."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def forget_all(self) -> None:
        """Forgets every request and step and frees all blocks, whatever was left half done."""
        self._scheduler.forget_all()
        self._answers.forget_all()
        self._outbox.clear()
        self.note_usage()

    def note_usage(self) -> None:
        """After requests may have taken blocks or given them back."""
        self.cache_usage = self._cache.size.usage
        self._changes.write()
        if self._cache.disk is not None:
            self._cache.disk.nudge()
        if self._pool is not None:
            self._pool.note_release()
