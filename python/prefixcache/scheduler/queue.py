"""The order in which requests start: by priority, then by turn, then by arrival."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from prefixcache.scheduler.state import RequestState

_FEW = 64
"""Dead entries that are not worth clearing away."""


class _Entry(NamedTuple):
    order: tuple[int, int, float, int]
    request_id: str


class WaitingQueue:
    """Waiting requests in their `order`. A preempted one comes back to its old place.

    Removal leaves a dead entry in the heap, which holds nothing of the request; dead entries are
    cleared away when they are the most.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._waiting: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_entries(self) -> int:
        """Entries of the heap, the dead ones included."""
        return len(self._heap)

    def push(self, state: RequestState) -> None:
        """Lets the request wait."""
        self._waiting[state.request_id] = state
        heapq.heappush(self._heap, _Entry(state.order, state.request_id))

    def head(self) -> RequestState | None:
        """The request to start next, or None."""
        while self._heap:
            state = self._state(self._heap[0])
            if state is not None:
                return state
            heapq.heappop(self._heap)
        return None

    def pop(self) -> RequestState:
        """Takes the head out. Raises `IndexError` when nothing waits."""
        state = self.head()
        if state is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        del self._waiting[state.request_id]
        return state

    def remove(self, request_id: str) -> bool:
        """Takes one request out, wherever it stands; tells whether it was waiting."""
        waited = self._waiting.pop(request_id, None) is not None
        if len(self._heap) > 2 * len(self._waiting) + _FEW:
            self._heap = [entry for entry in self._heap if self._state(entry) is not None]
            heapq.heapify(self._heap)
        return waited

    def _state(self, entry: _Entry) -> RequestState | None:
        """The request that the entry stands for, if it still waits there."""
        state = self._waiting.get(entry.request_id)
        return state if state is not None and state.order == entry.order else None
