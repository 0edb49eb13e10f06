"""Threads that work out masks: grammars that are slow keep no others waiting."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

_QUICK_SECONDS = 4e-3
_TRUSTED_AFTER = 16
_MAX_THREADS = 4

_Job = tuple[Callable[[int], None], int]
_Jobs = queue.SimpleQueue[_Job | None]


class Pace:
    """Whether a grammar's masks are quick, by those of late. A new grammar must show it first."""

    def __init__(self) -> None:
        self._num_quick = 0
        self.is_slow = False

    @property
    def is_trusted(self) -> bool:
        """Whether so many masks in a row were quick that others may wait for the next one."""
        return self._num_quick >= _TRUSTED_AFTER

    def observe(self, seconds: float) -> None:
        """Takes the time of one mask, that of the processor."""
        self._num_quick = 0 if seconds > _QUICK_SECONDS else self._num_quick + 1
        self.is_slow = not self._num_quick or (self.is_slow and not self.is_trusted)


class Lanes:
    """Two queues with threads of their own: for grammars that are quick, and for the others.

    The threads start with the first job, and end when nobody holds the lanes any more.
    """

    def __init__(self) -> None:
        self._quick: _Jobs = queue.SimpleQueue()
        self._other: _Jobs = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._started = False

    def put(self, function: Callable[[int], None], token_id: int, pace: Pace) -> None:
        """Lets a thread call `function`, which raises nothing."""
        if not self._started:
            self._start()
        (self._quick if pace.is_trusted else self._other).put((function, token_id))

    def _start(self) -> None:
        with self._starting:
            if self._started:
                return
            self._started = True
            num_quick = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
            for jobs in [self._quick] * num_quick + [self._other]:
                name = "prefixcache-grammar"
                threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()
                weakref.finalize(self, jobs.put, None).atexit = False


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        function, token_id = job
        function(token_id)
        del job, function  # they hold the lanes
