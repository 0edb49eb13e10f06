"""The step loop: scheduler, cache and runner joined. One thread drives it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prefixcache.config.logs import SHOWS_ERROR
from prefixcache.diagnostics.evictions import EvictionReader
from prefixcache.diagnostics.room import CacheDiagnostics
from prefixcache.engine.commands import EngineState, RunBetweenSteps
from prefixcache.engine.control import Control, at_once
from prefixcache.engine.output import Answers, MakeDetokenizer
from prefixcache.engine.request_rules import CheckedParts, CheckedRequest, RequestRules
from prefixcache.engine.sizing.elastic import SelfSizing
from prefixcache.engine.steps import InFlightRequests, Steps
from prefixcache.engine.weight_versions import WeightVersions
from prefixcache.exceptions import InvalidRequestError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_reader import PrefixLocation
from prefixcache.kv.elastic import ElasticPool
from prefixcache.metrics import Gauges, Metrics, block_counts
from prefixcache.runner.base import ModelMemory, StepRunner
from prefixcache.scheduler.jobs import Jobs
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.request import Request, RequestOutput
from prefixcache.types.token_ids import TokenIds

if TYPE_CHECKING:
    from prefixcache.kv.recordings.request_records import RequestRecords

logger = logging.getLogger(__name__)

# While nothing can be computed before a mask is known: commands wait no longer for it.
_LONGEST_IDLE = 5e-3


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
    without `self_sizing` it does unless a command changes it. `records` takes requests and answers
    down. `clock` tells seconds, by which the scheduler learns how long steps take.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: CacheManager,
        runner: StepRunner[Any],
        rules: RequestRules,
        make_detokenizer: MakeDetokenizer,
        memory: ModelMemory | None = None,
        pool: ElasticPool | None = None,
        self_sizing: SelfSizing | None = None,
        records: RequestRecords | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._pool = pool
        self._clock = clock
        self.rules = rules
        self.self_sizing = self_sizing
        self.evictions = EvictionReader(cache)
        self.metrics = Metrics(self._gauges, *(() if pool is None else (pool.slice_seconds,)))
        versions = WeightVersions(cache)
        self.state = EngineState(versions, memory)
        self._answers = Answers(make_detokenizer, rules.eos_token_ids, self.metrics, records)
        self._steps = Steps(scheduler, cache, runner, self._answers, versions, self.metrics, clock)
        self.requests = InFlightRequests(scheduler, cache, pool, self._steps, self._answers)
        self.abort, self.take_outputs = self.requests.abort, self.requests.take_outputs
        self.control = self.control_for(at_once)
        self._close_records = None if records is None else weakref.finalize(self, records.close)

    def control_for(self, run_between_steps: RunBetweenSteps) -> Control:
        """The commands for any thread, which `run_between_steps` takes to the loop's."""
        parts = (self.requests, self._scheduler, self._cache, self.state, self._pool)
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
        return 0.0 if self.has_unfinished() else self._clock() - self._steps.last_read

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and answer, with the cache's size of now."""
        return self._scheduler.limits.max_num_tokens_now

    @property
    def jobs(self) -> Jobs:
        """The jobs that wait or run. To be read, from any thread."""
        return self._scheduler.jobs

    def check(self, request: Request, parts: CheckedParts | None = None) -> CheckedRequest:
        """Raises `InvalidRequestError` when the request cannot be served. From any thread.

        `parts` are those of `RequestRules.check`. Raises `EngineHaltedError` while the engine
        sleeps.
        """
        self.state.raise_if_sleeping()
        checked = self.rules.check(request, {} if parts is None else parts)
        self._scheduler.limits.check(request)
        return checked

    def probe(self, request: Request) -> int:
        """Tokens of the prompt in leading full blocks that are cached now. From any thread.

        Changes nothing. A request sent next takes them all, but for its last token, which is always
        computed: of a prompt that is cached to its end the last block is not taken. With sliding
        windows that block is not counted either. Raises what `check` does.
        """
        self.check(request)
        if not (self._scheduler.admission.enabled and request.cache.read):
            return 0
        return self._cache.reader.probe(request)

    def locate_prefix(self, token_ids: TokenIds, salt: str | None = None) -> PrefixLocation:
        """Where the prefix of a prompt lies, in memory and on a disk. From any thread."""
        return self._cache.reader.locate_prefix(token_ids, salt)

    def diagnose(self, max_bytes: int, *, keeps_text: bool = True) -> CacheDiagnostics:
        """Diagnostics of the cache in up to `max_bytes`, whose reasons `metrics` count."""
        diagnostics = CacheDiagnostics(
            self._cache,
            self.evictions,
            max_bytes,
            caches_prefixes=self._scheduler.admission.enabled,
            keeps_text=keeps_text,
        )
        self.metrics.more.append(diagnostics.families)
        return diagnostics

    def adopt_loop(self) -> None:
        """Makes the calling thread the loop's; the one before it must have stopped."""
        self._cache.core.adopt_writer()

    def add_request(self, request: Request) -> None:
        """Checks the request and lets it wait for its turn, as `add`."""
        self.add(self.check(request))

    def add(self, checked: CheckedRequest) -> None:
        """Lets the request wait for its turn. Raises what `check` does.

        Only what changes while the engine serves is looked at again: whether it sleeps, and how
        large its cache is. Whatever it raises, nothing of the request stays behind.
        """
        self.state.raise_if_sleeping()
        request, grammar = checked
        self._scheduler.limits.check(request)
        if request.request_id in self._answers:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is in use.", param="request_id"
            )
        params, rules = request.params, self.rules
        answer = self._answers.make(request, self.max_model_len)
        matcher = None
        if grammar is not None:
            matcher = grammar.for_answer(ignore_eos=request.params.ignore_eos)
        seed = rules.seed(params)
        self._scheduler.add(
            request,
            seed=seed,
            end_token_ids=rules.end_token_ids(params),
            suppressed=rules.suppressed,
            matcher=matcher,
        )
        self._answers.add(answer, seed)

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
        self.requests.forget_all()

    def _step(self) -> list[RequestOutput]:
        self._steps.begin()
        outputs = [] if self._pool is None else self._adjust_pool(self._pool)
        if self.state.is_halted:
            return outputs
        plan = self._scheduler.schedule()
        outputs += [self._answers.end(*rejected) for rejected in self._scheduler.take_rejected()]
        if plan.sequences:
            self._steps.submit(plan)
            outputs += self._steps.read_due()
        else:
            if not self._scheduler.steps_in_flight:
                self._scheduler.wait_for_masks(_LONGEST_IDLE)
            outputs += self._steps.read_all()
        self.requests.note_usage()
        return outputs

    def close(self, *, waits: bool = True) -> None:
        """Ends what ran along with the steps, of which there are no more. From any thread.

        It `waits` for a disk tier a few seconds at most.
        """
        try:
            self._cache.close(waits=waits)
        finally:
            if self._close_records is not None:
                self._close_records()

    def _adjust_pool(self, pool: ElasticPool) -> list[RequestOutput]:
        """Does a slice of a resize, or takes memory for requests; what steps in flight gave."""
        if pool.can_grow and self._scheduler.has_unfinished():
            pool.grow()
        if not pool.has_work:
            return []
        outputs = self._steps.read_all()
        try:
            pool.advance()
        except Exception:  # the requests can be served
            logger.exception("A resize of the KV cache is given up.", extra=SHOWS_ERROR)
        return outputs

    def _gauges(self) -> Gauges:
        scheduler, cache = self._scheduler, self._cache
        core = cache.core.stats()
        return Gauges(
            pool=None if self._pool is None else self._pool.gauges(core["blocks_in_use"]),
            file=None if cache.file is None else cache.file.counts(),
            disk=None if cache.disk is None else cache.disk.counts(),
            loads=scheduler.loads.counts(),
            drafts=scheduler.drafter.counts(),
            weights=self.state.weights_info,
            sleep_state=self.state.sleep_state,
            cache_config={
                "block_size": str(self._cache.block_size),
                "num_gpu_blocks": str(self._cache.size.num_blocks),
                "enable_prefix_caching": str(scheduler.admission.enabled),
            },
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            cache_usage=self.requests.cache_usage,
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=scheduler.admission.counter.queried_tokens,
            num_hit_tokens=scheduler.admission.counter.hit_tokens,
            num_in_flight_waits=scheduler.sharing.num_waits,
            num_window_missed_tokens=scheduler.admission.num_window_missed_tokens,
            num_below_threshold=dict(scheduler.admission.num_below_threshold),
            num_stale_tokens=dict(scheduler.admission.num_stale_tokens),
            **block_counts(core),
        )
