"""Which tokens of which requests are computed in the next step.

Continuous batching in the manner of vLLM's v1 scheduler: every step takes one token of each
running decode, then chunks of prompts in order, then starts waiting requests, all under one token
budget. When blocks run out, the newest request of the lowest priority is preempted: its blocks go
back to the cache, and on resume it hits those that nobody overwrote.

A step may be planned while the one before is in flight: its tokens are pending then, and stand in
the plan by their places. What depends on which tokens they are waits until they are known: blocks
are published and requests preempted only then.

Nobody starves: the first request in order is never preempted for another one, so it always ends,
and then another is first.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.admission import Admission, AdmissionResult, PrefixHits
from prefixcache.scheduler.budget import Chunk, StepBudget, running_chunks
from prefixcache.scheduler.cache_aware import LongestHits
from prefixcache.scheduler.drafts import Drafter
from prefixcache.scheduler.in_flight import InFlight
from prefixcache.scheduler.jobs import Jobs
from prefixcache.scheduler.limits import Limits
from prefixcache.scheduler.loading import Loads, Reads
from prefixcache.scheduler.null_objects import NoDrafts, NoLoads, NoSharing
from prefixcache.scheduler.publishing import Publisher
from prefixcache.scheduler.queue import WaitingQueue
from prefixcache.scheduler.slots import Slots
from prefixcache.scheduler.state import RequestProgress, RequestState
from prefixcache.scheduler.step_time import StepTimeModel
from prefixcache.text.grammar.answer_matcher import AnswerMatcher
from prefixcache.types.request import Ending, PromptUse, Request
from prefixcache.types.step_plan import (
    NOTHING_SUPPRESSED,
    InFlightStep,
    SamplingInput,
    ScheduledSequence,
    SequenceOutput,
    StepPlan,
    SuppressedTokens,
)


@dataclass(slots=True)
class ScheduledStep:
    """A planned step whose outputs are not completed yet, and the states of its sequences.

    `in_flight` is what the runner gave for it, at the time `since`, or `error` what it raised.
    """

    plan: StepPlan
    states: list[RequestState]
    in_flight: InFlightStep | None = None
    error: Exception | None = None
    since: float = 0.0


class Scheduler:
    """Plans steps over the requests it was given, and keeps their cache blocks.

    Each step is one `schedule`, then `complete` with what the runner returned, or `fail`. One more
    step may be scheduled before its predecessor is completed, if the runner knows the tokens that
    this one samples by their places (see `ScheduledSequence`). `steps_in_flight` are those that are
    scheduled and not completed, the oldest first; `admission` has counters, and `jobs` may be read
    from any thread. Not thread safe: one loop drives it.

    With `step_times`, which learns how long steps take, chunks of prompts are kept so short that a
    step ends within `max_step_ms` milliseconds while answers wait for their next token. `clock`, in
    seconds, times how long requests wait where the policy asks.

    A `drafter` guesses where the step has room after chunks of prompts; nothing is preempted for
    guesses. With `computes_once` no token that counts may be computed again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        *,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        step_times: StepTimeModel | None = None,
        max_step_ms: float = 0,
        drafter: Drafter | None = None,
        computes_once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = config.limits()
        self._max_num_seqs = limits.max_num_seqs
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._max_step_seconds = max_step_ms / 1000
        self._step_times = step_times
        self._computes_once = computes_once
        self._cache = cache
        self.limits = Limits(cache, limits.max_num_batched_tokens, max_model_len=max_model_len)
        self._hits = PrefixHits(cache, enabled=enable_prefix_caching)
        self.jobs = Jobs(limits.max_num_seqs, config.max_running_per_key)
        self._queue = _make_queue(config, self.jobs, self._hits, clock)
        self._reads = Reads(cache, self._queue)
        self.sharing = NoSharing()
        if config.share_in_flight and enable_prefix_caching:
            self.sharing = InFlight(
                cache, self._queue, max_wait_steps=config.max_wait_steps, windows=cache.has_windows
            )
        self.loads = NoLoads()
        if cache.disk is not None:
            self.loads = Loads(cache, cache.disk, chunk=limits.max_num_batched_tokens)
        self.drafter = NoDrafts() if drafter is None else drafter
        self._slots = Slots(
            cache,
            max_chunk=limits.max_num_batched_tokens,
            ends_in_blocks=cache.has_states,
            num_spare=limits.max_num_seqs,
        )
        self.admission = Admission(
            cache, config, self._hits, self.sharing, self._reads, self.loads, self._slots
        )
        self._publisher = Publisher(cache, self.sharing, windows=cache.has_windows)
        self._states: dict[str, RequestState] = {}
        self._running: list[RequestState] = []
        self.steps_in_flight: deque[ScheduledStep] = deque()
        self._rejected: list[tuple[str, Ending, PromptUse]] = []
        self._serials = itertools.count()
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def progress(self, most: int) -> list[RequestProgress]:
        """How far up to `most` of the running requests are. From any thread."""
        return [state.progress() for state in self._running[:most]]

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their start or, preempted, for their return."""
        return len(self._queue) + len(self._reads) + len(self.sharing)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._states)

    def add(
        self,
        request: Request,
        *,
        seed: int,
        end_token_ids: tuple[int, ...] = (),
        suppressed: SuppressedTokens = NOTHING_SUPPRESSED,
        matcher: AnswerMatcher | None = None,
    ) -> None:
        """Lets a request that `limits` allow wait for its start.

        `matcher` keeps its answer to a grammar. Raises `ValueError` when its id is in use.
        """
        if request.request_id in self._states:
            raise ValueError(f"request_id {request.request_id!r} is in use.")
        state = RequestState(
            request,
            seed=seed,
            serial=next(self._serials),
            max_num_tokens=self.limits.max_num_tokens(request),
            end_token_ids=end_token_ids,
            suppressed=suppressed,
            matcher=matcher,
            write_limit=self._hits.write_limit(request.cache),
            computes_once=self._computes_once,
        )
        self._hits.start(request)
        state.turn = self.jobs.add(request)
        self._states[request.request_id] = state
        self._queue.push(state)

    def schedule(self) -> StepPlan:
        """The next step.

        It is empty only when nothing waits or runs, when all was rejected, when nothing can be
        planned until the step in flight is completed, or until `wait_for_masks` has waited.
        """
        self._cache.hints.demote_expired()
        self.sharing.next_step()
        self._reads.requeue()
        for state, upto in self.loads.collect():
            self._resume(state, upto)
        preempted_before = self.num_preemptions
        budget = StepBudget(self._max_num_batched_tokens, self._max_step_seconds, self._step_times)
        chunks = self._allocate(running_chunks(self._running, budget))
        if chunks is None:
            return _plan([])
        if self.num_preemptions == preempted_before:
            self._start_waiting(chunks, budget)
        if not self.steps_in_flight:
            self.drafter.propose(chunks, budget.room, self._slots.allocate_for_drafts)
        self.sharing.foresee()
        self._slots.keep_snapshots(chunks)
        plan = _plan(chunks)
        if chunks:
            self.steps_in_flight.append(ScheduledStep(plan, [chunk.state for chunk in chunks]))
        return plan

    def complete(
        self, plan: StepPlan, outputs: Sequence[SequenceOutput]
    ) -> list[tuple[ScheduledSequence, SequenceOutput]]:
        """Takes note that the KV of the oldest step is there and which tokens were sampled.

        Returns the part of requests that have not ended since it was planned. A sequence with an
        error gets no further: what it computed is not to be trusted.
        """
        rows = self._publisher.complete(plan, self.steps_in_flight.popleft().states, outputs)
        if plan.drafts:
            sampled = (row for row in rows if row[1].token_id is not None)
            self.drafter.observe({s.request_id: len(o.after_drafts) for s, o in sampled})
        return rows

    def fail(self) -> list[str]:
        """Forgets the steps in flight and finishes their requests; returns the ids of these."""
        states = itertools.chain.from_iterable(step.states for step in self.steps_in_flight)
        ids = dict.fromkeys(state.request_id for state in states if not state.has_ended)
        self.steps_in_flight.clear()
        return self.finish(ids)

    def forget_all(self) -> None:
        """Forgets every step and request and frees all blocks, whatever was left half done."""
        self.steps_in_flight.clear()
        self.loads.clear()
        self._reads.clear()
        self._cache.free_all()
        self.sharing.clear()
        self.jobs.clear()
        self._queue.clear()
        self._running.clear()
        self._rejected.clear()
        self._states.clear()
        self.drafter.clear()

    def finish(self, request_ids: Iterable[str], *, ended_well: Collection[str] = ()) -> list[str]:
        """Forgets requests and frees their blocks; returns the ids that were known.

        Those that `ended_well` came to the end of their answers; others failed or were aborted.
        """
        ended = [request_id for request_id in request_ids if request_id in self._states]
        for request_id in ended:
            state = self._states.pop(request_id)
            state.has_ended = True
            self.drafter.end(state)
            waited = self._queue.remove(request_id) or self._reads.forget(request_id)
            waited = waited or self.sharing.leave(request_id)
            self.jobs.remove(state.request, waited=waited)
            if not waited:
                self._stop_running(state)
        if ended:
            self._cache.free(ended, ended_well=ended_well)
        if not self._states:
            self._queue.forget_rounds()
        return ended

    def requeue_running(self) -> None:
        """Takes all blocks back; the requests wait for their return with what they generated.

        Raises `RuntimeError` while a step is in flight.
        """
        if self.steps_in_flight:
            raise RuntimeError("Requests cannot be requeued while a step is in flight.")
        while self._running:
            self._requeue(self._running[-1])

    def restart(self, request_ids: Collection[str]) -> list[str]:
        """Takes back the blocks of these requests, and their answers restart; ids of those begun.

        Raises `RuntimeError` while a step is in flight.
        """
        if self.steps_in_flight:
            raise RuntimeError("Requests cannot be restarted while a step is in flight.")
        chosen = set(request_ids)
        for state in reversed([s for s in self._running if s.request_id in chosen]):
            self._requeue(state)
        states = (self._states[request_id] for request_id in request_ids)
        begun = [state for state in states if state.num_cached_tokens is not None]
        for state in begun:
            self.drafter.forget(state)
            state.restart_answer()
            self._hits.start(state.request)
        return [state.request_id for state in begun]

    def wait_for_masks(self, seconds: float) -> None:
        """Waits for what keeps requests out of steps, at most so long: blocks, then grammars."""
        if self._reads.wait(seconds) or self.loads.wait(seconds):
            return
        held = (state.matcher for state in self._running if state.matcher and state.is_held)
        if (matcher := next(held, None)) is not None:
            matcher.wait(seconds)

    def observe_time(self, plan: StepPlan, seconds: float) -> None:
        """Learns how long a completed step took."""
        self.loads.observe_time(plan, seconds)
        self.drafter.observe_time(plan, seconds)
        if self._step_times is not None:
            self._step_times.observe(plan, seconds)

    def take_rejected(self) -> list[tuple[str, Ending, PromptUse]]:
        """The ids of requests that `schedule` gave up on since the last call, and why."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def state(self, request_id: str) -> RequestState:
        """How far a request is that has not ended."""
        return self._states[request_id]

    def _resume(self, state: RequestState, loaded: int) -> None:
        """The request goes on behind what was loaded, or starts again without the disk."""
        upto = min(loaded, state.write_limit)
        if upto > state.num_published_tokens:
            self._cache.mark_filled([state.request_id], [upto])
            state.num_published_tokens = upto
        if state.skips_disk:
            self._requeue(state)
        else:
            state.num_computed_tokens = loaded
            self.sharing.advance(state)

    def _allocate(self, chunks: list[Chunk]) -> list[Chunk] | None:
        """The chunks that have slots for their tokens, after as many preemptions as it takes.

        None when it would take one now: the step in flight may end requests that hold blocks.
        """
        lacking: Sequence[Chunk] = self._slots.lacking(chunks)
        while lacking and (lacking := self._slots.allocate(lacking)):
            if self.steps_in_flight:
                return None
            self.num_preemptions += 1
            victim = self._requeue(self._running[-1])
            chunks = [chunk for chunk in chunks if chunk.state is not victim]
            lacking = [chunk for chunk in lacking if chunk.state is not victim]
            if not self._running:
                self._grow_or_reject(victim)
        return chunks

    def _grow_or_reject(self, state: RequestState) -> None:
        """Ends a preempted request that ran alone and is too large, unless the pool can grow.

        It could start and lack blocks again and again: not all blocks of states and windows are
        allocated at the start. One that the pool can hold starts again: it held more blocks than
        it needs, and has given them back.
        """
        tokens = state.num_tokens
        if not (self.limits.has_room(tokens) or self.limits.make_room(tokens)):
            self._queue.remove(state.request_id)
            self._reject(state, AdmissionResult.NO_ROOM)

    def _start_waiting(self, chunks: list[Chunk], budget: StepBudget) -> None:
        self._queue.forget_hits()
        while budget.room and len(self._running) < self._max_num_seqs:
            state = self._queue.head()
            if state is None:
                return
            result = self.admission.start(state, budget)
            if result is AdmissionResult.NO_ROOM and self._running:
                return
            if result is AdmissionResult.NO_ROOM and self.limits.make_room(state.num_tokens):
                continue
            self._queue.take(state)
            if result is not AdmissionResult.STARTED:
                self._reject(state, result)
                continue
            self._queue.forget_hits()
            self.jobs.start(state.request, state.turn)
            bisect.insort(self._running, state, key=lambda running: running.order)
            self.sharing.advance(state)
            if state.is_loading:
                continue
            count = budget.take_chunk(state.num_computed_tokens, state.num_remaining)
            # With a damaged file it begins earlier than its slots were allocated for.
            chunk = Chunk(state, min(count, state.num_slots - state.num_computed_tokens))
            if self._slots.can_begin(chunk):
                chunks.append(chunk)

    def _reject(self, state: RequestState, result: AdmissionResult) -> None:
        """Ends a request that may not start; one that waits for blocks is woken once they are."""
        if result is AdmissionResult.WAITS_FOR_BLOCKS:
            return
        ending = _ending(state, result, self.limits)
        self._rejected.append((state.request_id, ending, state.prompt_use()))
        del self._states[state.request_id]
        self.drafter.end(state)
        self.jobs.remove(state.request, waited=True)
        self._cache.free([state.request_id])

    def _requeue(self, state: RequestState) -> RequestState:
        """Gives a running request's blocks back; it waits for its return."""
        self._stop_running(state)
        self._cache.release([state.request_id])
        state.restart()
        self.jobs.put_back(state.request)
        self._queue.push(state)
        return state

    def _stop_running(self, state: RequestState) -> None:
        """Before its blocks go back."""
        self._running.remove(state)
        self.loads.cancel(state)
        self.sharing.leave(state.request_id)


def _make_queue(
    config: SchedulerConfig, jobs: Jobs, hits: PrefixHits, clock: Callable[[], float]
) -> WaitingQueue:
    """Without the prefix cache there are no hits that could go first."""
    is_held = None if config.max_running_per_key is None else jobs.has_most_running
    if config.scheduling_policy != "cache-aware" or not hits.enabled:
        return WaitingQueue(is_held)
    ranking = LongestHits(
        count_hits=hits.count,
        prefix_name=hits.prefix_name,
        max_delay=config.max_queue_delay,
        clock=clock,
    )
    return WaitingQueue(is_held, ranking)


def _ending(state: RequestState, result: AdmissionResult, limits: Limits) -> Ending:
    if result is AdmissionResult.BELOW_THRESHOLD:
        return Ending("cache_threshold")
    error = limits.describe_lack(state.num_tokens)
    return Ending("error", error=error, error_code="insufficient_kv_cache")


def _plan(chunks: Sequence[Chunk]) -> StepPlan:
    """The step of these chunks, decodes first, whose tokens count as computed from here on."""
    decodes = [chunk for chunk in chunks if chunk.is_decode]
    decoded = [token for chunk in decodes for token in (chunk.state.next_token, *chunk.drafts)]
    parts = [chunk.state.next_tokens(chunk.count) for chunk in chunks[len(decodes) :]]
    sequences: list[ScheduledSequence] = []
    drafts: list[tuple[int, Sequence[SamplingInput]]] = []
    num_sampled = 0
    for row, chunk in enumerate(chunks):
        if chunk.drafts:
            drafts.append((row, chunk.state.after_drafts(chunk.drafts)))
        sequences.append(chunk.state.plan(chunk.count, num_sampled, len(chunk.drafts)))
        if sequences[-1].sampling is not None:
            num_sampled += 1
    token_ids = np.concatenate([np.array(decoded, dtype=np.int32), *parts])
    return StepPlan(tuple(sequences), token_ids, len(decodes), drafts)
