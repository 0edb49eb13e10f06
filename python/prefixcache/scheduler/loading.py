"""Requests whose next blocks are on a disk: they wait for these while others run.

Such a request holds its blocks, all of its prompt, and is in no step. A thread of the disk tier
fills the blocks; between two steps the scheduler publishes them, and the request goes on behind
them. A load is begun only where it is predicted to be over sooner than computing would be, and
ended with what is there when it takes longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.tiers.disk_tier import DiskTier, Load
from prefixcache.metrics import LoadCounts
from prefixcache.scheduler.state import RequestState
from prefixcache.scheduler.step_time import StepTimeModel

_LEAST_SECONDS = 0.05
"""What any load may take: shorter times are the clock's and the threads'."""
_MOST_SECONDS = 30.0
"""What a load may take before it is known how long computing would."""


@dataclass(frozen=True, slots=True)
class _Loading:
    state: RequestState
    load: Load
    begun: float
    deadline: float
    counts: bool


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
        self._loading: dict[str, _Loading] = {}
        self.times = StepTimeModel()
        self._num_started = self._num_refused = self._num_late = self._num_tokens = 0

    def begin(self, state: RequestState, upto: int, *, counts: bool) -> bool:
        """Loads what follows the request's hits, below `upto` tokens; whether there is anything.

        The request was just started, and has slots for all its tokens. What is loaded counts as its
        hits if it `counts`: a request that returns had its hits before.
        """
        size, start = self._cache.block_size, state.num_computed_tokens
        hashes = self._cache.block_hashes(state.request_id, start // size, upto // size)
        count = self._disk.count(hashes)
        if not count:
            return False
        computing = self.times.seconds(start, count * size, self._chunk)
        if 0 < computing <= self._disk.seconds(count):
            self._disk.note_refused()
            self._num_refused += 1
            return False
        blocks = self._cache.blocks(state.request_id, start // size, start // size + count)
        load = self._disk.load(blocks, hashes[:count])
        now, most = self._clock(), max(_LEAST_SECONDS, computing) if computing else _MOST_SECONDS
        self._loading[state.request_id] = _Loading(state, load, now, now + most, counts)
        self._num_started += 1
        state.is_loading = True
        return True

    def take_done(self) -> list[tuple[RequestState, int]]:
        """The requests that need wait no longer, and the tokens that were loaded for each."""
        now = self._clock()
        late = [one for one in self._loading.values() if now > one.deadline]
        for one in late:
            one.load.cancel()
            self._disk.note_late(len(one.load.blocks), now - one.begun)
        self._num_late += len(late)
        done = [one for one in self._loading.values() if one.load.is_done]
        return [(one.state, self._end(one)) for one in done]

    def cancel(self, state: RequestState) -> None:
        """Nothing writes to the request's blocks any more."""
        if (one := self._loading.get(state.request_id)) is not None:
            one.load.cancel()
            self._end(one)

    def _end(self, one: _Loading) -> int:
        del self._loading[one.state.request_id]
        one.state.is_loading = False
        tokens = one.load.num_loaded * self._cache.block_size
        self._num_tokens += tokens
        if one.counts:
            one.state.num_disk_tokens = tokens
            one.state.num_cached_tokens = (one.state.num_cached_tokens or 0) + tokens
        return tokens

    def clear(self) -> None:
        """Ends all loads."""
        for one in list(self._loading.values()):
            self.cancel(one.state)

    def wait(self, seconds: float) -> bool:
        """Waits until a load is done, at most so long; false where there is none."""
        loads = [one.load for one in self._loading.values()]
        if loads:
            self._disk.wait(loads, seconds)
        return bool(loads)

    def counts(self) -> LoadCounts:
        """What became of loads. From any thread."""
        return LoadCounts(
            started=self._num_started,
            refused=self._num_refused,
            late=self._num_late,
            tokens=self._num_tokens,
        )
