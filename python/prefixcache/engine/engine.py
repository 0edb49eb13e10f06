"""The step loop: scheduler, cache and runner joined. One thread drives it."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefixcache.config.logs import SHOWS_ERROR
from prefixcache.diagnostics.evictions import EvictionReader
from prefixcache.diagnostics.room import CacheDiagnostics
from prefixcache.engine.commands import EngineState, RunBetweenSteps
from prefixcache.engine.control import Control, at_once
from prefixcache.engine.output import Answer
from prefixcache.engine.residency import BlockResidency
from prefixcache.engine.sizing.elastic import SelfSizing
from prefixcache.engine.weight_versions import WeightVersions
from prefixcache.exceptions import EngineDeadError, InvalidRequestError
from prefixcache.kv.cache_manager import CacheManager, PrefixLocation
from prefixcache.kv.elastic import ElasticPool
from prefixcache.metrics import Gauges, Metrics, block_counts
from prefixcache.runner.base import ModelMemory, StepRunner
from prefixcache.scheduler.jobs import Jobs
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.text.grammar.answer_matcher import AnswerMatcher, Grammar
from prefixcache.text.grammar.grammars import Grammars
from prefixcache.text.grammar.sandbox import Sandbox
from prefixcache.text.tokenization.detokenizer import IncrementalDetokenizer
from prefixcache.types.modes import InFlightMode
from prefixcache.types.request import Ending, Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import (
    NOTHING_SUPPRESSED,
    ScheduledSequence,
    SequenceOutput,
    StepPlan,
    SuppressedTokens,
)
from prefixcache.types.structured_output import StructuredOutput
from prefixcache.types.token_ids import TokenIds

if TYPE_CHECKING:
    from prefixcache.kv.request_records import RequestRecords

logger = logging.getLogger(__name__)

# While nothing can be computed before a mask is known: commands wait no longer for it.
_LONGEST_IDLE = 5e-3


KnownIds = set[tuple[int, ...]]
"""Options of one job whose token ids were checked: the objects that hold them, by identity."""


class Engine:
    """Serves requests step by step, while `control` does not hold it back.

    Only `check`, `metrics`, and what says so may be used from a thread other than the loop's:
    `control` is for that one, and `control_for` makes one for others.
    A request that fails ends with `finish_reason` "error"; a step that fails ends its requests so,
    and `EngineDeadError` is raised when the device cannot compute an empty step either. What
    a command does to requests comes from `take_outputs`.

    Where the runner keeps a step's tokens on the device, the next step is submitted before they are
    read. A token past the end of an answer may be computed then; nobody gets it.

    `engine.build` makes one from an `EngineConfig`. Without `pool` the cache keeps its size, and
    without `self_sizing` it does unless it is asked. With `residency` metrics have times of blocks;
    `evictions` then feeds it. `records` takes requests and answers down. `clock` tells seconds, by
    which the scheduler learns how long steps take.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: CacheManager,
        runner: StepRunner[Any],
        make_detokenizer: Callable[[SamplingParams], IncrementalDetokenizer],
        vocab_size: int,
        eos_token_ids: Collection[int],
        suppressed: SuppressedTokens = NOTHING_SUPPRESSED,
        seed: int = 0,
        memory: ModelMemory | None = None,
        pool: ElasticPool | None = None,
        self_sizing: SelfSizing | None = None,
        grammars: Grammars | None = None,
        residency: BlockResidency | None = None,
        evictions: EvictionReader | None = None,
        records: RequestRecords | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._make_detokenizer = make_detokenizer
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._eos_token_ids = frozenset(eos_token_ids)
        self._suppressed = suppressed
        self._seeds = random.Random(seed)
        self._answers: dict[str, Answer] = {}
        self._steps = scheduler.steps_in_flight
        self._clock = clock
        self._last_read = clock()
        self._host_time = _HostTime()
        self._cache_usage = 0.0
        self._outbox: list[RequestOutput] = []
        self._pool = pool
        self.self_sizing = self_sizing
        self.state = EngineState(WeightVersions(cache), memory)
        self.control = self.control_for(at_once)
        self.metrics = Metrics(self._gauges)
        self._evictions = evictions or EvictionReader(cache)
        self._records = records
        if records is not None:
            self._close_records = weakref.finalize(self, records.close)
        if residency is not None:
            self.metrics.more.append(residency.families)
        if pool is not None:
            pool.observe = self.metrics.resize_slice.observe

    def control_for(self, run_between_steps: RunBetweenSteps) -> Control:
        """The commands for any thread, which `run_between_steps` takes to the loop's."""
        parts = (self, self._scheduler, self._cache, self.state, self._pool)
        return Control(*parts, run_between_steps)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_unfinished()

    def has_work(self) -> bool:
        """Whether `step` has something to do, and may do it."""
        if self._pool is not None and self._pool.has_work and not self.state.is_sleeping:
            return True
        return self._scheduler.has_unfinished() and not self.state.is_halted

    @property
    def idle_seconds(self) -> float:
        """How long there has been no request; 0 while there is one. From any thread."""
        return 0.0 if self.has_unfinished() else self._clock() - self._last_read

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and answer, with the cache's size of now."""
        return self._scheduler.max_num_tokens

    @property
    def jobs(self) -> Jobs:
        """The jobs that wait or run. To be read, from any thread."""
        return self._scheduler.jobs

    def check(self, request: Request, known: KnownIds | None = None) -> None:
        """Raises `InvalidRequestError` when the request cannot be served. From any thread.

        Token ids of options that are `known` are not looked at again, those that are looked at
        become so. Raises `EngineHaltedError` while the engine sleeps.
        """
        self.state.raise_if_sleeping()
        _check_token_ids(request.prompt_token_ids, self._vocab_size)
        if request.prediction is not None:
            self._check_in_vocabulary("prediction", request.prediction.tolist())
        ids = _identity_of_ids(request.params)
        if known is None or ids not in known:
            self._check_chosen_ids(request.params)
            if known is not None:
                known.add(ids)
        if request.params.structured_output is not None:
            self.compile(request.params.structured_output)
        self._scheduler.check(request)

    def find_grammar(self, output: StructuredOutput) -> Grammar | None:
        """The grammar of such answers, if it is compiled already. From any thread."""
        return None if self._grammars is None else self._grammars.find(output)

    def compile(
        self,
        output: StructuredOutput,
        sandbox: Sandbox | None = None,
        cancelled: threading.Event | None = None,
    ) -> Grammar:
        """The grammar of such answers, which takes a while when it is new. From any thread.

        As long as it is held, `check` need not wait for it. Raises what `Grammars.compile` does.
        """
        if self._grammars is None:
            raise InvalidRequestError(
                "This engine cannot keep answers to grammars.", param="structured_output"
            )
        return self._grammars.compile(output, sandbox, cancelled)

    def probe(self, request: Request) -> int:
        """Tokens of the prompt in leading full blocks that are cached now. From any thread.

        Changes nothing. A request sent next takes them all, but for its last token, which is always
        computed: of a prompt that is cached to its end the last block is not taken. With sliding
        windows that block is not counted either. Raises what `check` does.
        """
        self.check(request)
        if not (self._scheduler.admission.enabled and request.cache.read):
            return 0
        return self._cache.probe(request)

    def locate_prefix(self, token_ids: TokenIds, salt: str | None = None) -> PrefixLocation:
        """Where the prefix of a prompt lies, in memory and on a disk. From any thread."""
        return self._cache.locate_prefix(self._cache.new_sequence(token_ids, salt))

    def diagnose(self, max_bytes: int, *, keeps_text: bool = True) -> CacheDiagnostics:
        """Diagnostics of the cache in up to `max_bytes`, whose reasons `metrics` count."""
        diagnostics = CacheDiagnostics(
            self._cache,
            self._evictions,
            max_bytes,
            caches_prefixes=self._scheduler.admission.enabled,
            keeps_text=keeps_text,
        )
        self.metrics.miss_counts = diagnostics.miss_counts
        return diagnostics

    def adopt_loop(self) -> None:
        """Makes the calling thread the loop's; the one before it must have stopped."""
        self._cache.adopt_writer()

    def add_request(self, request: Request, known: KnownIds | None = None) -> None:
        """Lets the request wait for its turn. Raises what `check` does.

        Whatever it raises, nothing of the request stays behind.
        """
        self.check(request, known)
        if request.request_id in self._answers:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is in use.", param="request_id"
            )
        answer = self._new_answer(request)
        seed = request.params.seed
        seed = self._seeds.getrandbits(64) if seed is None else seed
        self._scheduler.add(
            request,
            seed=seed,
            end_token_ids=self._end_token_ids(request.params),
            suppressed=self._suppressed,
            matcher=self._answer_matcher(request.params),
        )
        self._answers[request.request_id] = answer
        if self._records is not None:
            self._records.add(request, seed)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests and frees their blocks; unknown ids are passed over."""
        known = self._scheduler.finish(request_ids)
        self._note_usage()
        return [self._end(request_id, Ending("abort")) for request_id in known]

    def abort_all(self) -> None:
        """Ends all requests."""
        self._outbox += self.abort(list(self._answers))

    def requeue_all(self) -> None:
        """Takes the blocks of all requests back; what they generated stays."""
        self._scheduler.requeue_running()
        self._note_usage()

    def change_weights(self, mode: InFlightMode) -> None:
        """New weights are there: each request does what it says itself, or else `mode`."""
        by_mode: dict[InFlightMode, list[str]] = {"recompute": [], "abort": [], "keep": []}
        for request_id, answer in self._answers.items():
            by_mode[answer.request.cache.on_weight_update or mode].append(request_id)
        self._outbox += self.abort(by_mode["abort"])
        self._restart_those(by_mode["recompute"])

    def restart_all(self) -> None:
        """Takes the blocks of all requests back and restarts their answers."""
        self._restart_those(list(self._answers))

    def _restart_those(self, request_ids: Sequence[str]) -> None:
        begun = self._scheduler.restart(request_ids)
        if self._records is not None:
            self._records.restart(request_ids)
        outputs = map(self._restart, begun)
        self._outbox += [output for output in outputs if output is not None]
        self._note_usage()

    def take_outputs(self) -> list[RequestOutput]:
        """What happened to requests between steps since the last call."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def step(self) -> list[RequestOutput]:
        """Submits the next step and returns what the last one added to each request.

        They are the same step, unless the runner lets the host plan ahead. Raises `EngineDeadError`
        when nothing can be served any more. Whatever it raises, all requests are forgotten then.
        """
        try:
            return self._step()
        except BaseException:
            self.forget_all()
            raise

    def forget_all(self) -> None:
        """Forgets every request and step and frees all blocks, whatever was left half done."""
        self._scheduler.forget_all()
        self._answers.clear()
        self._outbox.clear()
        if self._records is not None:
            self._records.forget_all()
        self._note_usage()

    def _step(self) -> list[RequestOutput]:
        self._host_time.begin()
        outputs = [] if self._pool is None else self._adjust_pool(self._pool)
        if self.state.is_halted:
            return outputs
        plan = self._scheduler.schedule()
        outputs += [self._end(*rejected) for rejected in self._scheduler.take_rejected()]
        if plan.sequences:
            self._note_begun(plan)
            self._submit(plan)
        elif not self._steps:
            self._scheduler.wait_for_masks(_LONGEST_IDLE)
        while self._steps and not (plan.sequences and self._is_ahead()):
            outputs += self._read_oldest()
        self._note_usage()
        return outputs

    def close(self, *, waits: bool = True) -> None:
        """Ends what ran along with the steps, of which there are no more. From any thread.

        It `waits` for a disk tier a few seconds at most.
        """
        try:
            self._cache.close(waits=waits)
        finally:
            if self._records is not None:
                self._close_records()

    def drain(self) -> None:
        """Waits until no step is in flight."""
        self._host_time.begin()
        while self._steps:
            self._outbox += self._read_oldest()
        self._note_usage()

    def _adjust_pool(self, pool: ElasticPool) -> list[RequestOutput]:
        """Does a slice of a resize, or takes memory for requests; what steps in flight gave."""
        if pool.can_grow and self._scheduler.has_unfinished():
            pool.grow()
        if not pool.has_work:
            return []
        outputs: list[RequestOutput] = []
        while self._steps:
            outputs += self._read_oldest()
        try:
            pool.advance()
        except Exception:  # the requests can be served
            logger.exception("A resize of the KV cache is given up.", extra=SHOWS_ERROR)
        return outputs

    def _note_usage(self) -> None:
        """After requests may have taken blocks or given them back."""
        self._cache_usage = self._cache.usage
        self._cache.log_changes()
        if self._cache.disk is not None:
            self._cache.disk.nudge()
        if self._pool is not None:
            self._pool.note_release()

    def _is_ahead(self) -> bool:
        """Whether the step in flight may stay so until the next one is submitted.

        Guesses follow known tokens: with a drafter none may.
        """
        is_one = len(self._steps) == 1 and self._scheduler.has_unfinished()
        if not is_one or self._scheduler.drafter is not None:
            return False
        step = self._steps[0].in_flight
        return step is not None and not step.is_known

    def _note_begun(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for sequence in plan.sequences:
            self._answers[sequence.request_id].begin(now)
        if self._records is not None:
            ids = (sequence.request_id for sequence in plan.sequences)
            self._records.compute(ids, self._cache.weight_version, self._cache.weights_name)

    def _submit(self, plan: StepPlan) -> None:
        step = self._steps[-1]
        step.since = self._clock()
        try:
            self._cache.fill(plan, self._runner.block_tables)
            with self._host_time.paused():
                step.in_flight = self._runner.submit(plan)
        except Exception as error:  # noqa: BLE001 - the steps before are read first
            step.error = error

    def _read_oldest(self) -> list[RequestOutput]:
        """What came of a step; when it fails, those submitted after it do too."""
        step = self._steps[0]
        plan = step.plan
        try:
            if step.error is not None:
                raise step.error
            with self._host_time.paused():
                results = self._runner.results(step.in_flight).outputs
        except Exception as error:  # whatever the model raised, the others can be served
            logger.exception("A step failed; its requests end.", extra=SHOWS_ERROR)
            return self._fail_steps(error)
        self._observe_time(plan, step.since)
        outputs = self._take(plan, results)
        self.metrics.iteration_tokens.observe(plan.num_tokens)
        self.metrics.step_overhead.observe(self._host_time.lap())
        return outputs

    def _observe_time(self, plan: StepPlan, since: float) -> None:
        """A step submitted ahead begins when the one before it ends."""
        begun, self._last_read = max(since, self._last_read), self._clock()
        self._scheduler.observe_time(plan, self._last_read - begun)

    def _take(self, plan: StepPlan, results: Sequence[SequenceOutput]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        kept = list(results)
        for row, drafts in plan.drafts:
            of_row, kept[row] = self._within_end(plan.sequences[row], len(drafts), results[row])
            outputs += of_row
        drafted = {plan.sequences[row].request_id for row, _ in plan.drafts}
        for scheduled, result in self._scheduler.complete(plan, kept):
            if scheduled.request_id not in drafted:
                output = self._output(scheduled, result)
                outputs += () if output is None else (output,)
        now = time.monotonic()
        for output in outputs:
            self._observe(self._answers[output.request_id], output, now)
        ended = [output.request_id for output in outputs if output.finished]
        well = [output.request_id for output in outputs if output.ended_well]
        self._scheduler.finish(ended, ended_well=well)
        for request_id in ended:
            del self._answers[request_id]
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
        for place, one in enumerate((result, *result.after_drafts)):
            answer.count_drafts(accepted=place > 0)
            output = self._output(scheduled, one)
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
            return answer.push(result, state, self.state.versions.shown)
        except Exception as error:
            logger.exception("Request %s failed.", scheduled.request_id)
            return answer.end(_failed(error))

    def _fail_steps(self, error: Exception) -> list[RequestOutput]:
        """Ends the requests of all steps in flight; the device must then compute an empty step.

        Which request the step failed on is not known, so a failure alone says nothing about the
        device: requests that no step survives may come one after another.
        """
        failed = self._scheduler.fail()
        self._prove_device_alive(error)
        if self._runner.runs_ahead:
            # Steps before it were published in the order of the device's work, which has failed.
            self._cache.reset()
        return [self._end(request_id, _failed(error)) for request_id in failed]

    def _prove_device_alive(self, cause: Exception) -> None:
        try:
            self._runner.run_empty_step()
        except Exception as error:
            raise EngineDeadError(
                f"A step failed with {cause!r}, and so did an empty one after it: {error!r}."
            ) from error

    def _restart(self, request_id: str) -> RequestOutput | None:
        """Restarts an answer; what its caller gets, if anything."""
        answer = self._answers[request_id]
        try:
            return answer.restart(self._make_detokenizer(answer.request.params))
        except Exception as error:
            logger.exception("Request %s failed.", request_id)
            self._scheduler.finish([request_id])
            return self._end(request_id, _failed(error))

    def _end(self, request_id: str, ending: Ending) -> RequestOutput:
        answer = self._answers.pop(request_id)
        try:
            output = answer.end(ending)
        except Exception as failure:
            logger.exception("Request %s failed.", request_id)
            output = answer.end(_failed(failure))
        self._observe(answer, output, time.monotonic())
        return output

    def _observe(self, answer: Answer, output: RequestOutput, now: float) -> None:
        answer.observe(output, now, self.metrics)
        if self._records is not None:
            self._records.push(output)

    def _new_answer(self, request: Request) -> Answer:
        room = self.max_model_len - len(request.prompt_token_ids)
        return Answer(
            request,
            self._make_detokenizer(request.params),
            eos_token_ids=self._eos_token_ids,
            max_tokens=room if request.params.max_tokens is None else request.params.max_tokens,
        )

    def _check_chosen_ids(self, params: SamplingParams) -> None:
        words = itertools.chain.from_iterable(params.bad_words_token_ids)
        self._check_in_vocabulary("logit_bias", params.logit_bias)
        self._check_in_vocabulary("bad_words", words)
        if params.bad_words and not params.bad_words_token_ids:
            raise InvalidRequestError("bad_words need their token ids.", param="bad_words")
        if params.allowed_token_ids is not None:
            self._check_in_vocabulary("allowed_token_ids", params.allowed_token_ids)
            if {*params.allowed_token_ids} <= {*self._suppressed.first}:
                raise InvalidRequestError(
                    "allowed_token_ids must hold a token that the model's suppress_tokens lack.",
                    param="allowed_token_ids",
                )
            if params.min_tokens and {*params.allowed_token_ids} <= {*self._end_token_ids(params)}:
                raise InvalidRequestError(
                    "allowed_token_ids must hold a token that does not end the answer, since "
                    "min_tokens is given.",
                    param="allowed_token_ids",
                )

    def _check_in_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        wrong = next((i for i in token_ids if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"{name} holds the token id {wrong}; ids are from 0 to {self._vocab_size - 1}.",
                param=name,
            )

    def _answer_matcher(self, params: SamplingParams) -> AnswerMatcher | None:
        if params.structured_output is None:
            return None
        return self.compile(params.structured_output).for_answer(ignore_eos=params.ignore_eos)

    def _end_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ids = self._eos_token_ids.union(params.stop_token_ids)
        return tuple(sorted(token_id for token_id in ids if 0 <= token_id < self._vocab_size))

    def _gauges(self) -> Gauges:
        scheduler, core = self._scheduler, self._cache.stats()
        return Gauges(
            pool=None if self._pool is None else self._pool.gauges(core["blocks_in_use"]),
            file=self._cache.file_counts,
            disk=None if self._cache.disk is None else self._cache.disk.counts(),
            loads=None if scheduler.loads is None else scheduler.loads.counts(),
            drafts=None if scheduler.drafter is None else scheduler.drafter.counts(),
            weights=self.state.weights_info,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            cache_usage=self._cache_usage,
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=scheduler.admission.counter.queried_tokens,
            num_hit_tokens=scheduler.admission.counter.hit_tokens,
            num_in_flight_waits=scheduler.num_in_flight_waits,
            num_window_missed_tokens=scheduler.admission.num_window_missed_tokens,
            num_below_threshold=dict(scheduler.admission.num_below_threshold),
            num_stale_tokens=dict(scheduler.admission.num_stale_tokens),
            **block_counts(core),
        )


class _HostTime:
    """What steps take apart from the runner's own work, in seconds."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Starts from zero."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Leaves out what is done meanwhile."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begun

    def lap(self) -> float:
        """The time since `begin` or the last lap."""
        last, self._since = self._since, time.perf_counter()
        return self._since - last


def _check_token_ids(token_ids: TokenIds, vocab_size: int) -> None:
    if not len(token_ids):
        raise InvalidRequestError("The prompt must hold at least one token.", param="prompt")
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidRequestError(
            f"The prompt holds the token id {low if low < 0 else high}; ids are from 0 to "
            f"{vocab_size - 1}.",
            param="prompt",
        )


def _identity_of_ids(params: SamplingParams) -> tuple[int, ...]:
    """The same for all choices of a job; it means nothing once the job is gone."""
    named = (params.logit_bias, params.allowed_token_ids, params.bad_words_token_ids)
    return (*map(id, (*named, params.stop_token_ids)), params.min_tokens > 0)


def _failed(error: Exception) -> Ending:
    """Names the error alone: its text may quote another request of the step."""
    return Ending("error", error=f"{type(error).__name__}, of which the log says more")
