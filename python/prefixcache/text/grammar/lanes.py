"""Threads that work out masks: grammars that are slow keep no others waiting."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

_QUICK_SECONDS = 4e-3
_TRUSTED_AFTER = 16
_MAX_THREADS = 4
_MOST_SECONDS_AT_EXIT = 5.0

_Job = tuple[Callable[[int], None], int]
_Jobs = queue.SimpleQueue[_Job | None]


class Pace:
    """Whether a grammar's masks are quick, by those of late. A new grammar must show it first."""

    def __init__(self) -> None:
        self._num_quick = 0
        self.is_slow = False

    @property
    def is_trusted(self) -> bool:
        """Whether enough masks in a row were quick that others may wait for the next one."""
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
            workers = _Workers([self._quick] * num_quick + [self._other])
            atexit.register(workers.end_and_wait)
            weakref.finalize(self, workers.end).atexit = False


class _Workers:
    """A thread for each of the queues."""

    def __init__(self, queues: Sequence[_Jobs]) -> None:
        self._queues = queues
        self._is_ending = threading.Event()
        self._threads = [self._started(jobs) for jobs in queues]

    def end(self) -> None:
        """Lets the threads end when they are through with their job."""
        atexit.unregister(self.end_and_wait)
        self._is_ending.set()
        for jobs in self._queues:
            jobs.put(None)

    def end_and_wait(self) -> None:
        """For the interpreter's end, which a thread in the grammar library does not survive."""
        self.end()
        for thread in self._threads:
            thread.join(_MOST_SECONDS_AT_EXIT)

    def _started(self, jobs: _Jobs) -> threading.Thread:
        name, args = "prefixcache-grammar", (jobs, self._is_ending)
        thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
        thread.start()
        return thread


def _work(jobs: _Jobs, is_ending: threading.Event) -> None:
    while (job := jobs.get()) is not None and not is_ending.is_set():
        function, token_id = job
        function(token_id)
        del job, function  # they hold the lanes
