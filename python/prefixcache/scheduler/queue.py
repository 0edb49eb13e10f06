"""The order in which requests start: by priority, then by arrival."""

from __future__ import annotations

import heapq

from prefixcache.scheduler.state import RequestState


class WaitingQueue:
    """Waiting requests in their `order`. A preempted one comes back to its old place.

    Removal leaves a dead entry in the heap, which is skipped when it reaches the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], RequestState]] = []
        self._waiting: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, state: RequestState) -> None:
        """Lets the request wait."""
        self._waiting[state.request_id] = state
        heapq.heappush(self._heap, (state.order, state))

    def head(self) -> RequestState | None:
        """The request to start next, or None."""
        while self._heap:
            state = self._heap[0][1]
            if self._waiting.get(state.request_id) is state:
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
        return self._waiting.pop(request_id, None) is not None
