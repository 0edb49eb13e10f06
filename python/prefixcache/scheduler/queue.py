"""The order in which requests start: by priority, then clients in turns, then by turn and arrival.

In each round every client that waits starts one request. A client that comes waits for at most two
requests of every other one, whatever number they brought. The requests of one client start by the
turns of its jobs (`jobs.py`), and a client that waits alone uses up no rounds: without clients
nothing but those turns counts. `cache_aware.py` lets hits change the order within these bounds.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from prefixcache.scheduler.state import Order, RequestState


class Line:
    """Waiting requests of one client and one priority, by place; new ones start from `round` on.

    A sorted list: newcomers nearly always go to its end, and among 10,000 an insertion or a removal
    elsewhere moves 80 KB of pointers, which takes less time than keeping a heap.
    """

    def __init__(self, round: int) -> None:  # noqa: A002
        self.round = round
        self._entries: list[tuple[Order, str]] = []
        self._waiting: dict[str, tuple[Order, RequestState]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, state: RequestState, place: Order) -> None:
        """Lets the request wait; nobody else there has its place."""
        self._waiting[state.request_id] = (place, state)
        entry = (place, state.request_id)
        if self._entries and entry < self._entries[-1]:
            bisect.insort(self._entries, entry)
        else:
            self._entries.append(entry)

    def head(self) -> RequestState:
        """The first of the waiting, of which there is one."""
        return self._waiting[self._entries[0][1]][1]

    def first(self, most: int) -> Iterator[RequestState]:
        """The first of the waiting, in order."""
        return (self._waiting[request_id][1] for _, request_id in islice(self._entries, most))

    def remove(self, request_id: str) -> None:
        """Takes the request out, which waits here."""
        place, _ = self._waiting.pop(request_id)
        del self._entries[bisect.bisect_left(self._entries, (place, request_id))]

    def order(self) -> tuple[int, int, float, int]:
        """Sorts lines; a request that has started before keeps the round that it had."""
        priority, began, _, arrival, serial = self._entries[0][0]
        return (priority, min(began, self.round), arrival, serial)


class WaitingQueue:
    """Waiting requests. A preempted one comes back to its old place.

    Requests of clients that `is_held` names stay where they are until it does so no more.
    """

    def __init__(self, is_held: Callable[[str | None], bool] | None = None) -> None:
        self._is_held = is_held
        self._lines: dict[tuple[int, str | None], Line] = {}
        self._line_of: dict[str, tuple[int, str | None]] = {}
        self._num_lines: Counter[int] = Counter()  # of each priority
        self._rounds: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._line_of)

    def clear(self) -> None:
        """Forgets who waits, and all rounds."""
        self._lines.clear()
        self._line_of.clear()
        self.forget_hits()
        self.forget_rounds()

    def push(self, state: RequestState) -> None:
        """Lets the request wait."""
        priority = state.request.priority
        key = (priority, state.request.client)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(1 + self._rounds[priority])
            self._num_lines[priority] += 1
        line.push(state, self._place(state))
        self._line_of[state.request_id] = key

    def head(self) -> RequestState | None:
        """The request to start next, or None."""
        first = min(self._open_lines(), key=Line.order, default=None)
        return None if first is None else first.head()

    def take(self, state: RequestState) -> None:
        """Takes out what `head` returned; its round has come."""
        priority, _ = key = self._line_of[state.request_id]
        line = self._lines[key]
        if not state.has_round:
            state.round = max(line.round, self._rounds[priority])
            line.round = state.round + (self._num_lines[priority] > 1)
        self._rounds[priority] = max(self._rounds[priority], state.round)
        self._remove(state.request_id, key)

    def remove(self, request_id: str) -> bool:
        """Takes one request out, wherever it stands; tells whether it was waiting."""
        key = self._line_of.get(request_id)
        if key is None:
            return False
        self._remove(request_id, key)
        return True

    def forget_hits(self) -> None:
        """Called when a step begins and when a request has started: hits may be others now."""

    def forget_rounds(self) -> None:
        """Counts rounds from the beginning; nothing may wait, and nothing that has started live."""
        self._rounds.clear()
        self._num_lines.clear()

    def _place(self, state: RequestState) -> Order:
        """Where the request stands in its line."""
        return state.order

    def _open_lines(self) -> list[Line]:
        """The lines that may start requests."""
        if self._is_held is None:
            return list(self._lines.values())
        return [line for key, line in self._lines.items() if not self._is_held(key[1])]

    def _remove(self, request_id: str, key: tuple[int, str | None]) -> None:
        del self._line_of[request_id]
        line = self._lines[key]
        line.remove(request_id)
        if not line:
            del self._lines[key]
            self._num_lines[key[0]] -= 1
