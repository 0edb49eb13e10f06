"""Which tokens of which requests are computed in the next step.

Continuous batching in the manner of vLLM's v1 scheduler: every step takes one token of each
running decode, then chunks of prompts in order, then starts waiting requests, all under one token
budget. When blocks run out, the newest request of the lowest priority is preempted: its blocks go
back to the cache, and on resume it hits those that nobody overwrote.

A step may be planned while the one before is in flight: its tokens are pending then, and stand in
the plan by their places. What depends on which tokens they are waits until they are known: blocks
are published and requests preempted only then.

Requests start by priority; clients of the same priority take turns (`queue.py`), and so do the jobs
of a client (`jobs.py`). Among those whose turn it is, long hits may go first (`cache_aware.py`).

Nobody starves: the first request in order is never preempted for another one, so it always ends,
and then another is first.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prefixcache.config.engine_config import SchedulerConfig
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.admission import Admission, Verdict
from prefixcache.scheduler.budget import StepBudget
from prefixcache.scheduler.cache_aware import CacheAwareQueue
from prefixcache.scheduler.drafts import Drafter
from prefixcache.scheduler.in_flight import InFlight
from prefixcache.scheduler.jobs import Jobs
from prefixcache.scheduler.limits import Limits
from prefixcache.scheduler.loading import Loaded, Loads, Reads
from prefixcache.scheduler.queue import WaitingQueue
from prefixcache.scheduler.state import RequestProgress, RequestState
from prefixcache.scheduler.step_time import StepTimeModel
from prefixcache.text.grammar.answer_matcher import AnswerMatcher
from prefixcache.types.request import CacheOptions, Ending, Request
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


@dataclass(slots=True)
class _Chunk:
    state: RequestState
    count: int
    is_decode: bool = False
    drafts: Sequence[int] = ()

    @property
    def end(self) -> int:
        return self.state.num_computed_tokens + self.count + len(self.drafts)


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

    With a `drafter` decodes compute guesses along with their own token, where the step has room
    after chunks of prompts. Nothing is preempted for guesses. With `computes_once` no token that
    counts may be computed again, as it is in its sequence's state.
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
        self._cache = cache
        self.drafter = drafter
        self._computes_once = computes_once
        self._step_times = step_times
        self._max_step_seconds = max_step_ms / 1000
        limits = config.limits()
        self._max_num_seqs = limits.max_num_seqs
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._limits = Limits(cache, limits.max_num_batched_tokens, max_model_len=max_model_len)
        self._publishes = enable_prefix_caching
        shares = config.share_in_flight and enable_prefix_caching
        self._in_flight = InFlight(cache, max_wait_steps=config.max_wait_steps) if shares else None
        self._reads = Reads(cache)
        self.loads = None
        if cache.disk is not None:
            self.loads = Loads(cache, cache.disk, chunk=limits.max_num_batched_tokens)
        self.admission = Admission(
            cache,
            config,
            self._in_flight,
            self.loads,
            self._reads,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._states: dict[str, RequestState] = {}
        self.jobs = Jobs(limits.max_num_seqs)
        self._max_running_per_client = config.max_running_per_key
        self._waiting = self._make_queue(config, clock)
        self._running: list[RequestState] = []
        self.steps_in_flight: deque[ScheduledStep] = deque()
        self._rejected: list[tuple[str, Ending]] = []
        self._serials = itertools.count()
        self.num_preemptions = 0

    def _make_queue(self, config: SchedulerConfig, clock: Callable[[], float]) -> WaitingQueue:
        """Without the prefix cache there are no hits that could go first."""
        is_held = None if config.max_running_per_key is None else self._is_held
        if config.scheduling_policy != "cache-aware" or not self.admission.enabled:
            return WaitingQueue(is_held)
        return CacheAwareQueue(
            is_held,
            count_hits=self.admission.count_hits,
            prefix_name=self._prefix_name,
            max_delay=config.max_queue_delay,
            clock=clock,
        )

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
        in_flight = 0 if self._in_flight is None else len(self._in_flight)
        return len(self._waiting) + len(self._reads) + in_flight

    @property
    def num_in_flight_waits(self) -> int:
        """Requests that waited for blocks another one was computing."""
        return 0 if self._in_flight is None else self._in_flight.num_waits

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._states)

    def check(self, request: Request) -> None:
        """Raises `RequestTooLargeError` when the request could never be served to its end."""
        self._limits.check(request)

    def add(
        self,
        request: Request,
        *,
        seed: int,
        end_token_ids: tuple[int, ...] = (),
        suppressed: SuppressedTokens = NOTHING_SUPPRESSED,
        matcher: AnswerMatcher | None = None,
    ) -> None:
        """Lets the request wait for its start. `matcher` keeps its answer to a grammar.

        Raises `RequestTooLargeError` when it can never fit, `ValueError` when its id is in use.
        """
        if request.request_id in self._states:
            raise ValueError(f"request_id {request.request_id!r} is in use.")
        self.check(request)
        state = RequestState(
            request,
            seed=seed,
            serial=next(self._serials),
            max_num_tokens=self._limits.max_num_tokens(request),
            end_token_ids=end_token_ids,
            suppressed=suppressed,
            matcher=matcher,
            write_limit=self._write_limit(request.cache),
            computes_once=self._computes_once,
        )
        self._start_sequence(request)
        state.turn = self.jobs.add(request)
        self._states[request.request_id] = state
        self._waiting.push(state)

    @property
    def max_num_tokens(self) -> int:
        """Tokens of the longest sequence that can be served now. From any thread."""
        return self._limits.max_num_tokens_now

    def schedule(self) -> StepPlan:
        """The next step.

        It is empty only when nothing waits or runs, when all was rejected, when nothing can be
        planned until the step in flight is completed, or until `wait_for_masks` has waited.
        """
        self._cache.demote_expired()
        if self._in_flight is not None:
            self._wake(self._in_flight.next_step())
        self._wake(self._reads.take_done())
        if self.loads is not None:
            for loaded in self.loads.take_done():
                self._take_loaded(loaded)
        preempted_before = self.num_preemptions
        running, budget = self._running_chunks()
        chunks = self._with_slots(running)
        if chunks is None:
            return self._plan([])
        if self.num_preemptions == preempted_before:
            self._start_waiting(chunks, budget)
        if self.drafter is not None and not self.steps_in_flight:
            self._add_drafts(self.drafter, chunks, budget.room)
        self._keep_for_next()
        if self._cache.has_states:
            self._keep_snapshots(chunks)
        return self._plan(chunks)

    def complete(
        self, plan: StepPlan, outputs: Sequence[SequenceOutput]
    ) -> list[tuple[ScheduledSequence, SequenceOutput]]:
        """Takes note that the KV of the oldest step is there and which tokens were sampled.

        Returns the part of requests that have not ended since it was planned. A sequence with an
        error gets no further: what it computed is not to be trusted.
        """
        rows: list[tuple[ScheduledSequence, SequenceOutput]] = []
        filled: list[tuple[RequestState, int]] = []
        size = self._cache.block_size
        sampled: dict[str, list[int]] = {}
        states = self.steps_in_flight.popleft().states
        drafted = {row: len(inputs) for row, inputs in plan.drafts}
        for row, state in enumerate(states):
            if state.has_ended:
                continue
            scheduled, output = plan.sequences[row], outputs[row]
            rows.append((scheduled, output))
            if output.error is not None:
                continue
            state.take(scheduled, output)
            refused = drafted.get(row, 0) - len(output.after_drafts)
            computed = scheduled.start + scheduled.num_tokens - refused - output.is_late
            if computed // size > scheduled.start // size:
                filled.append((state, computed))
            if output.token_id is not None:
                sampled[state.request_id] = output.token_ids
        self._append_accepted(sampled)
        if filled:
            self._publish(filled)
            self._drop_unneeded(filled)
        if sampled:
            self._cache.append_tokens({name: token_ids[-1] for name, token_ids in sampled.items()})
        return rows

    def _append_accepted(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """Adds all tokens but the last of each: their KV is there, and their blocks need names."""
        if self.drafter is not None:
            self.drafter.observe({name: len(tokens) - 1 for name, tokens in sampled.items()})
        for place in range(max(map(len, sampled.values()), default=1) - 1):
            longer = {name: t[place] for name, t in sampled.items() if len(t) > place + 1}
            self._cache.append_tokens(longer)

    def fail(self) -> list[str]:
        """Forgets the steps in flight and finishes their requests; returns the ids of these."""
        states = itertools.chain.from_iterable(step.states for step in self.steps_in_flight)
        ids = dict.fromkeys(state.request_id for state in states if not state.has_ended)
        self.steps_in_flight.clear()
        return self.finish(ids)

    def forget_all(self) -> None:
        """Forgets every step and request and frees all blocks, whatever was left half done."""
        self.steps_in_flight.clear()
        if self.loads is not None:
            self.loads.clear()
        self._reads.clear()
        self._cache.free_all()
        if self._in_flight is not None:
            self._in_flight.clear()
        self.jobs.clear()
        self._waiting.clear()
        self._running.clear()
        self._rejected.clear()
        self._states.clear()
        if self.drafter is not None:
            self.drafter.clear()

    def finish(self, request_ids: Iterable[str], *, ended_well: Collection[str] = ()) -> list[str]:
        """Forgets requests and frees their blocks; returns the ids that were known.

        Those that `ended_well` came to the end of their answers; others failed or were aborted.
        """
        known = [request_id for request_id in request_ids if request_id in self._states]
        for request_id in known:
            state = self._states.pop(request_id)
            state.has_ended = True
            if self.drafter is not None:
                self.drafter.end(state)
            waited = self._stops_waiting(request_id)
            self.jobs.remove(state.request, waited=waited)
            if not waited:
                self._stop_running(state)
        if known:
            self._cache.free(known, ended_well=ended_well)
        if not self._states:
            self._waiting.forget_rounds()
        return known

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
        for state in reversed([one for one in self._running if one.request_id in chosen]):
            self._requeue(state)
        known = (self._states[request_id] for request_id in request_ids)
        begun = [state for state in known if state.num_cached_tokens is not None]
        for state in begun:
            if self.drafter is not None:
                self.drafter.forget(state)
            state.restart_answer()
            self._start_sequence(state.request)
        return [state.request_id for state in begun]

    def wait_for_masks(self, seconds: float) -> None:
        """Waits for what keeps requests out of steps, at most so long: blocks, then grammars."""
        if self._reads.wait(seconds):
            return
        if self.loads is not None and self.loads.wait(seconds):
            return
        held = (state.matcher for state in self._running if state.matcher and state.is_held)
        if (matcher := next(held, None)) is not None:
            matcher.wait(seconds)

    def observe_time(self, plan: StepPlan, seconds: float) -> None:
        """Learns how long a completed step took."""
        if self.loads is not None:
            self.loads.times.observe(plan, seconds)
        if self.drafter is not None:
            self.drafter.rows.observe(plan, seconds)
        if self._step_times is not None:
            self._step_times.observe(plan, seconds)

    def take_rejected(self) -> list[tuple[str, Ending]]:
        """The ids of requests that `schedule` gave up on since the last call, and why."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def state(self, request_id: str) -> RequestState:
        """How far a request is that has not ended."""
        return self._states[request_id]

    def _write_limit(self, cache: CacheOptions) -> int:
        """Tokens, in full blocks, up to which a request may publish."""
        if not cache.write:
            return 0
        if cache.write_upto is None:
            return sys.maxsize
        return cache.write_upto // self._cache.block_size * self._cache.block_size

    def _start_sequence(self, request: Request) -> None:
        """Hashes are needed only to find blocks and to be found."""
        shares = request.cache.read or request.cache.write
        self._cache.start(request, hashed=self._publishes and shares)

    def _running_chunks(self) -> tuple[list[_Chunk], StepBudget]:
        """Decodes first, then prompts in order, as far as the budget goes; and what is left."""
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        for state in self._running:
            if not (state.is_full or state.is_held or state.is_loading):
                (decodes if state.decodes else prefills).append(state)
        chunks = [
            _Chunk(state, 1, is_decode=True) for state in decodes[: self._max_num_batched_tokens]
        ]
        budget = self._budget(chunks)
        for state in prefills:
            if budget.is_spent:
                break
            count = budget.take_chunk(state.num_computed_tokens, state.num_remaining)
            chunks.append(_Chunk(state, count))
        return chunks, budget

    def _budget(self, decodes: Sequence[_Chunk]) -> StepBudget:
        """What the step may compute in addition to these decodes."""
        budget = StepBudget(self._max_num_batched_tokens, self._max_step_seconds, self._step_times)
        for chunk in decodes:
            budget.add_decode(chunk.state.num_computed_tokens)
        return budget

    def _with_slots(self, chunks: list[_Chunk]) -> list[_Chunk] | None:
        """The chunks that have slots for their tokens, after as many preemptions as it takes.

        None when it would take one now: the step in flight may end requests that hold blocks.
        """
        short = [chunk for chunk in chunks if self._is_short(chunk)]
        while short:
            wanted = [(chunk.state.request_id, self._whole_blocks(chunk.end)) for chunk in short]
            served = self._cache.ensure_slots(wanted)
            for chunk, (_, upto) in zip(short[:served], wanted, strict=False):
                chunk.state.num_slots = upto
            short = short[served:]
            if short and self.steps_in_flight:
                return None
            if short:
                self.num_preemptions += 1
                victim = self._requeue(self._running[-1])
                chunks = [chunk for chunk in chunks if chunk.state is not victim]
                short = [chunk for chunk in short if chunk.state is not victim]
                if not self._running:
                    self._grow_or_reject(victim)
        return chunks

    def _grow_or_reject(self, state: RequestState) -> None:
        """Ends a preempted request that ran alone and is too large, unless the pool can grow.

        It could start and lack blocks again and again: not all blocks of states and windows are
        taken at the start. One that the pool can hold starts again: it held more blocks than it
        needs, and has given them back.
        """
        tokens = state.num_tokens
        if not (self._limits.has_room(tokens) or self._limits.make_room(tokens)):
            self._waiting.remove(state.request_id)
            self._reject(state, Verdict.NO_ROOM)

    def _is_short(self, chunk: _Chunk) -> bool:
        """Whether the chunk needs slots; with states it needs a block where it ends."""
        has_block = chunk.is_decode or not self._cache.has_states
        return chunk.end > chunk.state.num_slots or not has_block

    def _add_drafts(self, drafter: Drafter, chunks: Sequence[_Chunk], room: int) -> None:
        """Lets decodes compute guesses too: what prompts would compute goes before."""
        decodes = [chunk for chunk in chunks if chunk.is_decode]
        num_rows = sum(chunk.count for chunk in chunks)
        states = [chunk.state for chunk in decodes]
        drafts = drafter.propose(states, num_rows, room, self._slots_for_drafts)
        for chunk in decodes:
            chunk.drafts = drafts.get(chunk.state.request_id, ())

    def _slots_for_drafts(self, state: RequestState, wanted: int) -> int:
        """How many of the `wanted` tokens after the next one have slots, or get them.

        What a few blocks are left for is not known yet, so guesses do not take these.
        """
        has_room = self._cache.num_free_blocks > self._max_num_seqs
        size = self._cache.block_size
        # Block by block, since each may be where a state has to be kept.
        most = self._whole_blocks(state.num_tokens + wanted)
        for upto in range(state.num_slots + size, most + 1, size):
            if not (has_room and self._cache.ensure_slots([(state.request_id, upto)])):
                break
            state.num_slots = upto
        return min(wanted, state.num_slots - state.num_tokens)

    def _plan(self, chunks: Sequence[_Chunk]) -> StepPlan:
        """The step of these chunks, decodes first."""
        decodes = [chunk for chunk in chunks if chunk.is_decode]
        decoded = [token for one in decodes for token in (one.state.next_token, *one.drafts)]
        parts = [chunk.state.next_tokens(chunk.count) for chunk in chunks[len(decodes) :]]
        sequences: list[ScheduledSequence] = []
        drafts: list[tuple[int, Sequence[SamplingInput]]] = []
        num_sampled = 0
        for row, chunk in enumerate(chunks):
            if chunk.drafts:
                drafts.append((row, chunk.state.after_drafts(chunk.drafts)))
            sequences.append(chunk.state.plan(chunk.count, num_sampled, len(chunk.drafts)))
            num_sampled += sequences[-1].sampling is not None
        token_ids = np.concatenate([np.array(decoded, dtype=np.int32), *parts])
        plan = StepPlan(tuple(sequences), token_ids, len(decodes), drafts)
        if chunks:
            self.steps_in_flight.append(ScheduledStep(plan, [chunk.state for chunk in chunks]))
        return plan

    def _whole_blocks(self, num_tokens: int) -> int:
        """A block's slots cost nothing more once it is held, so they are taken together."""
        size = self._cache.block_size
        return -(-num_tokens // size) * size

    def _requeue(self, state: RequestState) -> RequestState:
        self._stop_running(state)
        self._cache.release([state.request_id])
        state.restart()
        self.jobs.put_back(state.request)
        self._waiting.push(state)
        return state

    def _start_waiting(self, chunks: list[_Chunk], budget: StepBudget) -> None:
        self._waiting.forget_hits()
        while not budget.is_spent and len(self._running) < self._max_num_seqs:
            state = self._waiting.head()
            if state is None:
                return
            verdict = self.admission.start(state, budget)
            if verdict is Verdict.NO_ROOM and self._running:
                return
            if verdict is Verdict.NO_ROOM and self._limits.make_room(state.num_tokens):
                continue
            self._waiting.take(state)
            if verdict is not Verdict.STARTED:
                self._reject(state, verdict)
                continue
            self._waiting.forget_hits()
            self.jobs.start(state.request, state.turn)
            bisect.insort(self._running, state, key=lambda running: running.order)
            self._announce(state)
            if state.is_loading:
                continue
            count = budget.take_chunk(state.num_computed_tokens, state.num_remaining)
            # With a damaged file it begins earlier than its slots were taken for.
            chunk = _Chunk(state, min(count, state.num_slots - state.num_computed_tokens))
            if self._ends_in_a_block(chunk):
                chunks.append(chunk)

    def _ends_in_a_block(self, chunk: _Chunk) -> bool:
        """Whether a state can be kept where the first chunk ends: admission may have meant another.

        Otherwise the next step computes it, for which requests are preempted.
        """
        if not self._cache.has_states:
            return True
        wanted = (chunk.state.request_id, self._whole_blocks(chunk.end))
        return self._cache.ensure_slots([wanted]) == 1

    def _prefix_name(self, state: RequestState, num_tokens: int) -> bytes | None:
        """What names the request's first tokens, in full blocks and more than none."""
        return self._cache.block_hash(state.request_id, num_tokens // self._cache.block_size - 1)

    def _is_held(self, client: str | None) -> bool:
        """Whether as many requests of a client run as may."""
        most = self._max_running_per_client
        return client is not None and most is not None and self.jobs.running[client] >= most

    def _keep_for_next(self) -> None:
        """Lets running requests keep the windows where the first waiting one parts from them."""
        if self._in_flight is None or not self._cache.has_windows:
            return
        state = self._waiting.head()
        if state is not None and state.request.cache.read:
            self._in_flight.foresee(state)

    def _keep_snapshots(self, chunks: Sequence[_Chunk]) -> None:
        """Lets chunks of prompts keep the states that later requests may begin with."""
        parts = (chunk.state for chunk in chunks if not chunk.is_decode)
        starts = [(state.request_id, state.num_computed_tokens) for state in parts]
        if starts:
            self._cache.keep_snapshots(starts)

    def _reject(self, state: RequestState, verdict: Verdict) -> None:
        """Ends a request that may not start; one that waits for blocks is woken once they are."""
        if verdict is Verdict.WAITS_FOR_BLOCKS:
            return
        self._rejected.append((state.request_id, self._ending(state, verdict)))
        del self._states[state.request_id]
        if self.drafter is not None:
            self.drafter.end(state)
        self.jobs.remove(state.request, waited=True)
        self._cache.free([state.request_id])

    def _ending(self, state: RequestState, verdict: Verdict) -> Ending:
        cached = state.num_cached_tokens or 0
        if verdict is Verdict.BELOW_THRESHOLD:
            missed = state.num_window_missed_tokens
            return Ending("cache_threshold", cached, num_window_missed_tokens=missed)
        error = self._limits.describe_lack(state.num_tokens)
        return Ending("error", cached, error, "insufficient_kv_cache")

    def _stops_waiting(self, request_id: str) -> bool:
        """Takes a request out of where it waits; tells whether it waited."""
        if self._waiting.remove(request_id) or self._reads.forget(request_id):
            return True
        return self._in_flight is not None and self._in_flight.forget(request_id)

    def _announce(self, state: RequestState) -> None:
        """Lets others wait for what the request computes next."""
        if self._in_flight is not None and state.write_limit:
            self._wake(self._in_flight.advance(state))

    def _stop_running(self, state: RequestState) -> None:
        """Before its blocks go back."""
        self._running.remove(state)
        if self.loads is not None:
            self.loads.cancel(state)
        if self._in_flight is not None:
            self._wake(self._in_flight.withdraw(state.request_id))

    def _wake(self, states: Iterable[RequestState]) -> None:
        for state in states:
            self._waiting.push(state)

    def _publish(self, filled: Iterable[tuple[RequestState, int]]) -> None:
        """Registers full blocks of requests whose KV is there now, up to that many tokens."""
        if not self._publishes:
            return
        written = [
            (state, min(upto, state.write_limit)) for state, upto in filled if state.publishes_more
        ]
        if not written:
            return
        duplicates = self._cache.mark_filled(
            [state.request_id for state, _ in written], [upto for _, upto in written]
        )
        for place, (state, upto) in enumerate(written):
            if state.num_resets == self._cache.num_resets:
                state.count_written(upto, duplicates.get(place, 0), self._cache.block_size)
            state.num_published_tokens = upto
            self._announce(state)

    def _take_loaded(self, loaded: Loaded) -> None:
        """The request goes on behind what was loaded, or starts again without the disk."""
        state, upto = loaded.state, min(loaded.upto, loaded.state.write_limit)
        if upto > state.num_published_tokens:
            self._cache.mark_filled([state.request_id], [upto])
            state.num_published_tokens = upto
        if loaded.is_whole or not self._cache.has_windows:
            state.num_computed_tokens = loaded.upto
            self._announce(state)
        else:
            state.skips_disk = True
            self._requeue(state)

    def _drop_unneeded(self, computed: Iterable[tuple[RequestState, int]]) -> None:
        """Gives back what is behind the windows of requests that are computed up to there."""
        if self._cache.has_windows:
            self._cache.drop_unneeded([(state.request_id, upto) for state, upto in computed])
