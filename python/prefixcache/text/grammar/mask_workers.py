"""Threads that compute token masks; a slow grammar keeps no other one waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_QUICK_SECONDS = 4e-3
_TRUSTED_AFTER = 16
_MAX_THREADS = 4
_NAME = "prefixcache-grammar"


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
    """Threads for grammars that are quick, and one for the others.

    They start with the first job, and end when nothing refers to this object any more, or with the
    interpreter: it waits for them, since a thread in the grammar library does not survive its end.
    """

    def __init__(self) -> None:
        num_quick = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self._quick = ThreadPoolExecutor(num_quick, thread_name_prefix=_NAME)
        self._other = ThreadPoolExecutor(1, thread_name_prefix=_NAME)

    def put(self, function: Callable[[], None], latency: Latency) -> None:
        """Lets a thread call `function`, which raises nothing."""
        (self._quick if latency.is_trusted else self._other).submit(function)
