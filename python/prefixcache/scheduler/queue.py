"""The order in which requests start: by priority, then clients in turns, then by turn and arrival.

In each round every client that waits starts one request. A client that comes waits for at most two
requests of every other one, whatever number they brought. The requests of one client start by the
turns of its jobs (`jobs.py`), and a client that waits alone uses up no rounds: without clients
nothing but those turns counts.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from prefixcache.scheduler.state import RequestState

_FEW = 64
"""Dead entries that are not worth clearing away."""


class _Entry(NamedTuple):
    order: tuple[int, int, int, float, int]
    request_id: str


class _Line:
    """Waiting requests of one client and one priority; new ones start from `round` on.

    Removal leaves a dead entry in the heap, which holds nothing of the request; dead entries are
    cleared away when they are the most.
    """

    def __init__(self, round: int) -> None:  # noqa: A002
        self.round = round
        self.heap: list[_Entry] = []
        self._waiting: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, state: RequestState) -> None:
        self._waiting[state.request_id] = state
        heapq.heappush(self.heap, _Entry(state.order, state.request_id))

    def head(self) -> RequestState:
        """The first of the waiting, of which there is one."""
        while (state := self._state(self.heap[0])) is None:
            heapq.heappop(self.heap)
        return state

    def remove(self, request_id: str) -> None:
        del self._waiting[request_id]
        if len(self.heap) > 2 * len(self._waiting) + _FEW:
            self.heap = [entry for entry in self.heap if self._state(entry) is not None]
            heapq.heapify(self.heap)

    def order(self) -> tuple[int, int, float, int]:
        """Sorts lines; a request that has started before keeps the round that it had."""
        priority, began, _, arrival, serial = self.head().order
        return (priority, min(began, self.round), arrival, serial)

    def _state(self, entry: _Entry) -> RequestState | None:
        """The request that the entry stands for, if it still waits there."""
        state = self._waiting.get(entry.request_id)
        return state if state is not None and state.order == entry.order else None


class WaitingQueue:
    """Waiting requests. A preempted one comes back to its old place.

    Requests of clients that `is_held` names stay where they are until it does so no more.
    """

    def __init__(self, is_held: Callable[[str | None], bool] | None = None) -> None:
        self._is_held = is_held
        self._lines: dict[tuple[int, str | None], _Line] = {}
        self._line_of: dict[str, tuple[int, str | None]] = {}
        self._num_lines: Counter[int] = Counter()  # of each priority
        self._rounds: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._line_of)

    @property
    def num_entries(self) -> int:
        """Entries of the heaps, the dead ones included."""
        return sum(len(line.heap) for line in self._lines.values())

    def push(self, state: RequestState) -> None:
        """Lets the request wait."""
        priority = state.request.priority
        key = (priority, state.request.client)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(1 + self._rounds[priority])
            self._num_lines[priority] += 1
        line.push(state)
        self._line_of[state.request_id] = key

    def head(self) -> RequestState | None:
        """The request to start next, or None."""
        lines = self._lines.values()
        if self._is_held is not None:
            lines = [line for key, line in self._lines.items() if not self._is_held(key[1])]
        first = min(lines, key=_Line.order, default=None)
        return None if first is None else first.head()

    def pop(self) -> RequestState:
        """Takes the head out, whose round has come. Raises `IndexError` when nothing may start."""
        state = self.head()
        if state is None:
            raise IndexError("pop from an empty queue")
        priority, _ = key = self._line_of[state.request_id]
        line = self._lines[key]
        if not state.has_round:
            state.round = max(line.round, self._rounds[priority])
            line.round = state.round + (self._num_lines[priority] > 1)
        self._rounds[priority] = max(self._rounds[priority], state.round)
        self.remove(state.request_id)
        return state

    def remove(self, request_id: str) -> bool:
        """Takes one request out, wherever it stands; tells whether it was waiting."""
        key = self._line_of.pop(request_id, None)
        if key is None:
            return False
        line = self._lines[key]
        line.remove(request_id)
        if not line:
            del self._lines[key]
            self._num_lines[key[0]] -= 1
        return True

    def forget_rounds(self) -> None:
        """Counts rounds from the beginning; nothing may wait, and nothing that has started live."""
        self._rounds.clear()
        self._num_lines.clear()
