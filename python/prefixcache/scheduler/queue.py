"""The order in which requests start: by priority, then clients in turns, then by turn and arrival.

In each round every client that waits starts one request. A client that comes waits for at most two
requests of every other one, whatever number they brought. The requests of one client start by the
turns of its jobs (`jobs.py`), and a client that waits alone uses up no rounds: without clients
nothing but those turns counts. `cache_aware.py` lets hits change the order within these bounds.
"""

from __future__ import annotations

import bisect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from prefixcache.scheduler.state import Order, RequestState

_Key = tuple[int, str | None]
"""Priority and client."""
_Entry = tuple[Order, RequestState]


@dataclass(slots=True)
class Line:
    """Waiting requests of one client and one priority; new ones start from `round` on.

    A list that is sorted by their places: newcomers nearly always go to its end, and among 10,000
    an insertion or a removal elsewhere moves 80 KB of pointers, which takes less time than keeping
    a heap. No two have one place.
    """

    round: int
    entries: list[_Entry] = field(default_factory=list[_Entry])

    def order(self) -> tuple[int, int, float, int]:
        """Sorts lines; a request that has started before keeps the round that it had."""
        priority, began, _, arrival, serial = self.entries[0][0]
        return (priority, min(began, self.round), arrival, serial)


class Ranking(Protocol):
    """Which of the requests that may start in a round does."""

    def push(self, state: RequestState) -> Order:
        """The request waits from now on; where it stands in its line."""
        ...

    def head(self, lines: Sequence[Line]) -> RequestState | None:
        """The request to start next, of lines that may start one."""
        ...

    def take(self, state: RequestState) -> None:
        """What `head` returned starts."""

    def forget(self) -> None:
        """Who waits or what hits is another now."""


class ByArrival:
    """The ranking where nothing but the order counts."""

    def push(self, state: RequestState) -> Order:
        """As `Ranking.push`."""
        return state.order

    def head(self, lines: Sequence[Line]) -> RequestState | None:
        """As `Ranking.head`."""
        first = min(lines, key=Line.order, default=None)
        return None if first is None else first.entries[0][1]

    def take(self, state: RequestState) -> None: ...  # noqa: D102

    def forget(self) -> None: ...  # noqa: D102


_BY_ARRIVAL = ByArrival()


class WaitingQueue:
    """Waiting requests. A preempted one comes back to its old place.

    Requests of clients that `is_held` names stay where they are until it does so no more.
    """

    def __init__(
        self,
        is_held: Callable[[str | None], bool] | None = None,
        ranking: Ranking = _BY_ARRIVAL,
    ) -> None:
        self._is_held = is_held
        self._ranking = ranking
        self._lines: dict[_Key, Line] = {}
        self._places: dict[str, tuple[_Key, Order]] = {}
        self._num_lines: Counter[int] = Counter()  # of each priority
        self._rounds: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def clear(self) -> None:
        """Forgets who waits, and all rounds."""
        self._lines.clear()
        self._places.clear()
        self.forget_hits()
        self.forget_rounds()

    def push(self, state: RequestState) -> None:
        """Lets the request wait."""
        priority = state.request.priority
        key, place = (priority, state.request.client), self._ranking.push(state)
        if key not in self._lines:
            self._lines[key] = Line(1 + self._rounds[priority])
            self._num_lines[priority] += 1
        bisect.insort(self._lines[key].entries, (place, state), key=itemgetter(0))
        self._places[state.request_id] = (key, place)

    def head(self) -> RequestState | None:
        """The request to start next, or None."""
        return self._ranking.head(self._open_lines())

    def take(self, state: RequestState) -> None:
        """Takes out what `head` returned; its round has come."""
        self._ranking.take(state)
        priority, client = state.request.priority, state.request.client
        if state.round == sys.maxsize:
            line = self._lines[priority, client]
            line.round = state.round = max(line.round, self._rounds[priority])
            if self._num_lines[priority] > 1:
                line.round += 1
        self._rounds[priority] = max(self._rounds[priority], state.round)
        self._remove(state.request_id)

    def remove(self, request_id: str) -> bool:
        """Takes one request out, wherever it stands; tells whether it was waiting."""
        waited = request_id in self._places
        if waited:
            self._remove(request_id)
            self._ranking.forget()
        return waited

    def forget_hits(self) -> None:
        """Called when a step begins and when a request has started: hits may be others now."""
        self._ranking.forget()

    def forget_rounds(self) -> None:
        """Counts rounds from the beginning; nothing may wait, and nothing that has started live."""
        self._rounds.clear()
        self._num_lines.clear()

    def _open_lines(self) -> list[Line]:
        """The lines that may start requests."""
        if self._is_held is None:
            return list(self._lines.values())
        return [line for key, line in self._lines.items() if not self._is_held(key[1])]

    def _remove(self, request_id: str) -> None:
        key, place = self._places.pop(request_id)
        entries = self._lines[key].entries
        del entries[bisect.bisect_left(entries, place, key=itemgetter(0))]
        if not entries:
            del self._lines[key]
            self._num_lines[key[0]] -= 1
