"""Sharing in flight: one request computes a prefix, the others that need it wait for its blocks.

A running request stands in the way of others by one block only: the first that it has not
published. Its hash names the whole prefix up to there, salt included, so whoever is about to
compute that very block waits until it is published, and asks again: chunk by chunk.

Where layers have a sliding window, the running request keeps the window at the position where the
two prompts part, since it may be far past it before the other one asks again. It does so for the
request that is next in order too, which need not have asked yet: long chunks leave no room to
start others. Whoever asks when that window is gone already computes the prefix once more, and the
rest wait for it.

No wait lasts for ever. Only requests that hold no blocks wait, and only for running ones, so there
is no cycle; a request that leaves the running set wakes those who waited for it; and nobody waits
longer than `max_wait_steps` in all.
"""

from __future__ import annotations

from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.queue import WaitingQueue
from prefixcache.scheduler.state import RequestState


class InFlight:
    """Who computes which block next, and who waits for it, to go back to the queue then.

    With `windows` running requests keep those that the next one in the queue needs.
    """

    def __init__(
        self, cache: CacheManager, queue: WaitingQueue, *, max_wait_steps: int, windows: bool
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._windows = windows
        self._block_size = cache.block_size
        self._max_wait_steps = max_wait_steps
        self._next_hash: dict[str, bytes] = {}
        self._producers: dict[bytes, str] = {}
        self._waiters: dict[bytes, dict[str, RequestState]] = {}
        self._step = 0
        self.num_waits = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    def clear(self) -> None:
        """Forgets who computes what and who waits."""
        self._next_hash.clear()
        self._producers.clear()
        self._waiters.clear()

    def must_wait(self, state: RequestState, matched_tokens: int) -> bool:
        """Lets the request wait if its first missing block is being computed; tells whether."""
        if not self._producers or self._is_overdue(state):
            return False
        block_hash = self._cache.block_hash(state.request_id, matched_tokens // self._block_size)
        if block_hash is None or block_hash not in self._producers:
            return False
        self._cache.keep_for(self._producers[block_hash], state.request_id)
        if state.first_wait_step is None:
            state.first_wait_step = self._step
            self.num_waits += 1
        self._waiters.setdefault(block_hash, {})[state.request_id] = state
        return True

    def foresee(self) -> None:
        """Lets running requests keep windows for the next in order, which could not ask yet."""
        state = self._queue.head() if self._windows else None
        if state is not None and state.request.cache.read:
            for producer in self._next_hash:
                self._cache.keep_for(producer, state.request_id)

    def advance(self, state: RequestState) -> None:
        """A running request started or published: others may go on, and wait for what is next."""
        woken = self._withdraw(state.request_id)
        if state.publishes_more and state.num_tokens - state.num_published_tokens > 1:
            index = state.num_published_tokens // self._block_size
            block_hash = self._cache.block_hash(state.request_id, index)
            if block_hash is not None:
                self._next_hash[state.request_id] = block_hash
                self._producers[block_hash] = state.request_id
        self._wake(woken)

    def leave(self, request_id: str) -> bool:
        """The request neither waits nor computes for others any more; tells whether it waited."""
        self._wake(self._withdraw(request_id))
        return any(waiters.pop(request_id, None) for waiters in self._waiters.values())

    def next_step(self) -> None:
        """Counts a step. Those who have waited long enough go on."""
        self._step += 1
        waiting = (state for waiters in self._waiters.values() for state in waiters.values())
        overdue = list(filter(self._is_overdue, waiting))
        for state in overdue:
            self.leave(state.request_id)
        self._wake(overdue)

    def _withdraw(self, request_id: str) -> list[RequestState]:
        """The request computes nothing more for others. Returns who may go on."""
        block_hash = self._next_hash.pop(request_id, None)
        if block_hash is None or self._producers.get(block_hash) != request_id:
            return []
        del self._producers[block_hash]
        return list(self._waiters.pop(block_hash, {}).values())

    def _wake(self, states: list[RequestState]) -> None:
        for state in states:
            self._queue.push(state)

    def _is_overdue(self, state: RequestState) -> bool:
        first = state.first_wait_step
        return first is not None and self._step - first >= self._max_wait_steps
