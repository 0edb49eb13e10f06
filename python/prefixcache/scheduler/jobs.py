"""Requests that came together are a job, and the jobs of a client take turns.

The k-th request of a job starts in the k-th round after the job came. Whoever comes with one
request waits for one or two of every waiting job, not for the thousands that another brought.

Up to `GROUP_TURN` requests of one group share a turn: the prompt that they have in common is then
still cached when they start, however little memory there is.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

from prefixcache.types.request import Request

GROUP_TURN = 32


@dataclass(slots=True)
class _JobTurns:
    last_turn: int = 0
    num_requests: int = 0
    num_waiting: int = 0


@dataclass(slots=True)
class _GroupTurn:
    turn: int = 0
    num_left: int = 0
    num_requests: int = 0


class Jobs:
    """The jobs of the requests that a scheduler has.

    `queue_length` counts the jobs that wait; one with more than `batch_size` waiting requests
    counts once for every `batch_size` of them. `waiting` is the same for each client that has any,
    and `running` are its requests that have started, up to `max_running`.
    """

    def __init__(self, batch_size: int, max_running: int | None = None) -> None:
        self._batch_size = batch_size
        self._max_running = sys.maxsize if max_running is None else max_running
        self.clear()

    def clear(self) -> None:
        """Forgets all jobs."""
        self._jobs: dict[str, _JobTurns] = {}
        self._groups: dict[tuple[object, ...], _GroupTurn] = {}
        self._rounds: Counter[tuple[int, str | None]] = Counter()
        self.queue_length = 0
        self.waiting: Counter[str | None] = Counter()
        self.running: Counter[str | None] = Counter()

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def add(self, request: Request) -> int:
        """Lets the request wait; returns its turn, a number that grows with the rounds."""
        job = self._jobs.setdefault(request.job, _JobTurns())
        job.num_requests += 1
        self._change_waiting(request, job, 1)
        group_name = _group_name(request)
        if group_name is None:
            return self._next_turn(request, job)
        group = self._groups.setdefault(group_name, _GroupTurn())
        group.num_requests += 1
        if not group.num_left:
            group.turn = max(group.turn + 1, self._next_turn(request, job))
            group.num_left = GROUP_TURN
        group.num_left -= 1
        return group.turn

    def has_most_running(self, client: str | None) -> bool:
        """Whether as many requests of a client run as may."""
        return client is not None and self.running[client] >= self._max_running

    def _next_turn(self, request: Request, job: _JobTurns) -> int:
        job.last_turn = 1 + max(job.last_turn, self._rounds[_line(request)])
        return job.last_turn

    def start(self, request: Request, turn: int) -> None:
        """The request waits no more: its round has begun."""
        line = _line(request)
        self._rounds[line] = max(self._rounds[line], turn)
        self._change_waiting(request, self._jobs[request.job], -1)
        _change(self.running, request.client, 1)

    def put_back(self, request: Request) -> None:
        """A request that has started waits again."""
        self._change_waiting(request, self._jobs[request.job], 1)
        _change(self.running, request.client, -1)

    def remove(self, request: Request, *, waited: bool) -> None:
        """The request has ended."""
        job = self._jobs[request.job]
        if waited:
            self._change_waiting(request, job, -1)
        else:
            _change(self.running, request.client, -1)
        job.num_requests -= 1
        if not job.num_requests:
            del self._jobs[request.job]
        if (name := _group_name(request)) is not None:
            self._groups[name].num_requests -= 1
            if not self._groups[name].num_requests:
                del self._groups[name]
        if not self._jobs:
            self._rounds.clear()

    def _change_waiting(self, request: Request, job: _JobTurns, change: int) -> None:
        before = self._places(job)
        job.num_waiting += change
        more = self._places(job) - before
        self.queue_length += more
        _change(self.waiting, request.client, more)

    def _places(self, job: _JobTurns) -> int:
        """How many a job counts for in the queue."""
        return -(-job.num_waiting // self._batch_size)


def _line(request: Request) -> tuple[int, str | None]:
    """Turns are compared among requests of one client and one priority alone."""
    return (request.priority, request.client)


def _group_name(request: Request) -> tuple[object, ...] | None:
    """Of the part of a group that may share turns."""
    return None if request.group is None else (_line(request), request.group.name)


def _change(counts: Counter[str | None], client: str | None, change: int) -> None:
    """Keeps no client that has none."""
    counts[client] += change
    if not counts[client]:
        del counts[client]
