"""Requests whose next blocks are on a disk: they wait for these while others run.

A kept file's blocks that nobody has read since the start are compared with their checksums first,
on a thread of the core. A request that needs many of them holds nothing meanwhile (`Reads`).

One whose blocks come from a disk tier holds them, all of its prompt, and is in no step. A thread of
the disk tier fills the blocks; between two steps the scheduler publishes them, and the request goes
on behind them. A load is begun only where it is predicted to be over sooner than computing would
be, and ended with what is there when it takes longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.tiers.disk_tier import DiskTier, Load
from prefixcache.metrics import LoadCounts
from prefixcache.scheduler.queue import WaitingQueue
from prefixcache.scheduler.state import RequestState
from prefixcache.scheduler.step_time import StepTimeModel
from prefixcache.types.step_plan import StepPlan

_LEAST_SECONDS = 0.05
"""What any load may take: shorter times are the clock's and the threads'."""
_READ_SECONDS = 0.001
"""Between two looks at what was read, where no step is to be computed."""
_MOST_SECONDS = 30.0
"""What a load may take before it is known how long computing would."""


class Reads:
    """Requests that wait until the blocks of a kept file that they hit were read."""

    def __init__(self, cache: CacheManager, queue: WaitingQueue) -> None:
        self._cache = cache
        self._queue = queue
        self._waiting: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def must_wait(self, state: RequestState, hits: int) -> bool:
        """Lets the request wait if its hits need more blocks read than a commit may; whether."""
        must = self._needs_reads(state.request_id, hits)
        if must:
            self._waiting[state.request_id] = state
        return must

    def _needs_reads(self, request_id: str, hits: int) -> bool:
        file, sequence = self._cache.file, self._cache.sequence(request_id)
        if file is None:
            return False
        return self._cache.core.reads_first(sequence, hits, file.commit_blocks)

    @property
    def _num_left(self) -> int:
        return 0 if self._cache.file is None else self._cache.file.core.num_asked

    def requeue(self) -> None:
        """Lets the requests start once all that was to be read was."""
        if self._waiting and not self._num_left:
            for state in self._waiting.values():
                self._queue.push(state)
            self._waiting.clear()

    def forget(self, request_id: str) -> bool:
        """Takes a waiting request out; tells whether it waited."""
        return self._waiting.pop(request_id, None) is not None

    def clear(self) -> None:
        """Forgets who waits."""
        self._waiting.clear()

    def wait(self, seconds: float) -> bool:
        """Waits a moment, at most so long; false where no request waits."""
        if self._waiting:
            time.sleep(min(seconds, _READ_SECONDS))
        return bool(self._waiting)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A hit of `upto` tokens needs blocks of the disk, which takes `computing` seconds without.

    0 seconds where that is not known. `is_sooner` says whether the load is predicted to be.
    """

    loads: Loads
    upto: int
    computing: float
    is_sooner: bool


@dataclass(frozen=True, slots=True)
class _Loading:
    state: RequestState
    load: Load
    upto: int
    places: list[int]
    begun: float
    deadline: float
    counts: bool
    """As hits: a request that returns had its hits before."""


class Loads:
    """The loads of one scheduler; `times` learns how long computing takes."""

    def __init__(
        self,
        cache: CacheManager,
        disk: DiskTier,
        *,
        chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._disk = disk
        self._chunk = chunk
        self._clock = clock
        self._parts_are_hits = not cache.has_windows
        self._loading: dict[str, _Loading] = {}
        self.times = StepTimeModel()
        self.num_tokens = 0
        self._num_started = self._num_refused = self._num_late = 0

    def observe_time(self, plan: StepPlan, seconds: float) -> None:
        """Learns how long a completed step took."""
        self.times.observe(plan, seconds)

    def count(self, request_id: str, max_tokens: int) -> tuple[int, int]:
        """The longest hit up to `max_tokens`, the disk's blocks counted; how many of them it needs.

        (0, 0) where the disk has nothing.
        """
        if not self._disk.staging.num_stored:
            return 0, 0
        sequence = self._cache.sequence(request_id)
        return self._cache.core.count_tiered_hits(sequence, self._disk.staging, max_tokens)

    def plan(self, state: RequestState, hits: int, most: int) -> LoadPlan | None:
        """What the disk adds to `hits`, up to `most` tokens; None where that is nothing."""
        if state.skips_disk or hits >= most:
            return None
        upto, num_blocks = self.count(state.request_id, most)
        if upto <= hits:
            return None
        computing = self.times.seconds(hits, upto - hits, self._chunk)
        is_sooner = computing == 0 or computing > self._disk.seconds(num_blocks)
        return LoadPlan(self, upto, computing, is_sooner)

    def note_refused(self) -> None:
        """A request computes what would have been loaded too late."""
        self._disk.speed.note_refused()
        self._num_refused += 1

    def begin(self, state: RequestState, plan: LoadPlan, num_tokens: int, chunk: int) -> bool:
        """Starts the request as the plan says and loads what it lacks; false if blocks are lacking.

        It gets slots for `num_tokens` after its hit, `chunk` of which are computed at once.
        """
        missing = self._cache.commit_missing(state.request_id, plan.upto, num_tokens, chunk)
        if missing is None:
            return False
        load = self._disk.load(missing.blocks, missing.keys)
        now, most = self._clock(), _MOST_SECONDS
        if plan.computing:
            most = max(_LEAST_SECONDS, plan.computing)
        self._loading[state.request_id] = _Loading(
            state=state,
            load=load,
            upto=plan.upto,
            places=missing.places,
            begun=now,
            deadline=now + most,
            counts=state.num_cached_tokens is None,
        )
        self._num_started += 1
        state.is_loading = True
        return True

    def collect(self) -> list[tuple[RequestState, int]]:
        """The requests that need wait no longer, and up to which token their blocks are there.

        A request that needs others too, for its windows, is to start again: it `skips_disk`.
        """
        now = self._clock()
        late = [loading for loading in self._loading.values() if now > loading.deadline]
        for loading in late:
            loading.load.cancel()
            self._disk.speed.note_late(len(loading.load.blocks), now - loading.begun)
        self._num_late += len(late)
        done = [loading for loading in self._loading.values() if loading.load.is_done]
        return [self._finish(loading) for loading in done]

    def _finish(self, loading: _Loading) -> tuple[RequestState, int]:
        state, upto = loading.state, loading.upto
        self._forget(state)
        is_complete = loading.load.num_loaded == len(loading.places)
        if not is_complete:
            upto = loading.places[loading.load.num_loaded] * self._cache.block_size
        state.skips_disk = not (is_complete or self._parts_are_hits)
        if not state.skips_disk:
            tokens = upto - state.num_computed_tokens
            self.num_tokens += tokens
            if loading.counts:
                state.num_disk_tokens = tokens
                state.num_cached_tokens = (state.num_cached_tokens or 0) + tokens
        return state, upto

    def cancel(self, state: RequestState) -> None:
        """Nothing writes to the request's blocks any more."""
        if (loading := self._loading.get(state.request_id)) is not None:
            loading.load.cancel()
            self._forget(state)

    def _forget(self, state: RequestState) -> None:
        del self._loading[state.request_id]
        state.is_loading = False

    def clear(self) -> None:
        """Ends all loads."""
        for loading in list(self._loading.values()):
            self.cancel(loading.state)

    def wait(self, seconds: float) -> bool:
        """Waits until a load is done, at most so long; false where there is none."""
        loads = [loading.load for loading in self._loading.values()]
        if loads:
            self._disk.wait(loads, seconds)
        return bool(loads)

    def counts(self) -> LoadCounts:
        """What became of loads. From any thread."""
        return LoadCounts(
            started=self._num_started,
            refused=self._num_refused,
            late=self._num_late,
            tokens=self.num_tokens,
        )
