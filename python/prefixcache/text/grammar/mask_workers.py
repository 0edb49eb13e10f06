"""Threads that compute token masks; a slow grammar keeps no other one waiting."""

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

_Task = tuple[Callable[[int], None], int]
_Tasks = queue.SimpleQueue[_Task | None]


class Latency:
    """Whether a grammar's masks are quick, by the last ones. A new grammar must show it first."""

    def __init__(self) -> None:
        self._num_quick = 0
        self.is_slow = False

    @property
    def is_trusted(self) -> bool:
        """Whether enough masks in a row were quick that others may wait for the next one."""
        return self._num_quick >= _TRUSTED_AFTER

    def observe(self, seconds: float) -> None:
        """Takes the time of one mask, in CPU time."""
        self._num_quick = 0 if seconds > _QUICK_SECONDS else self._num_quick + 1
        self.is_slow = not self._num_quick or (self.is_slow and not self.is_trusted)


class MaskWorkers:
    """Two queues with threads of their own: for grammars that are quick, and for the others.

    The threads start with the first task, and end when nothing refers to this object any more.
    """

    def __init__(self) -> None:
        self._quick: _Tasks = queue.SimpleQueue()
        self._other: _Tasks = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._started = False

    def put(self, function: Callable[[int], None], token_id: int, latency: Latency) -> None:
        """Lets a thread call `function`, which raises nothing."""
        if not self._started:
            self._start()
        (self._quick if latency.is_trusted else self._other).put((function, token_id))

    def _start(self) -> None:
        with self._starting:
            if self._started:
                return
            self._started = True
            num_quick = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
            threads = _Threads([self._quick] * num_quick + [self._other])
            atexit.register(threads.end_and_wait)
            weakref.finalize(self, threads.end).atexit = False


class _Threads:
    """A thread for each of the queues."""

    def __init__(self, queues: Sequence[_Tasks]) -> None:
        self._queues = queues
        self._is_ending = threading.Event()
        self._threads = [self._started(tasks) for tasks in queues]

    def end(self) -> None:
        """Lets the threads end when they are through with their task."""
        atexit.unregister(self.end_and_wait)
        self._is_ending.set()
        for tasks in self._queues:
            tasks.put(None)

    def end_and_wait(self) -> None:
        """For the interpreter's end, which a thread in the grammar library does not survive."""
        self.end()
        for thread in self._threads:
            thread.join(_MOST_SECONDS_AT_EXIT)

    def _started(self, tasks: _Tasks) -> threading.Thread:
        name, args = "prefixcache-grammar", (tasks, self._is_ending)
        thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
        thread.start()
        return thread


def _work(tasks: _Tasks, is_ending: threading.Event) -> None:
    while (task := tasks.get()) is not None and not is_ending.is_set():
        function, token_id = task
        function(token_id)
        del task, function  # they refer to the workers
