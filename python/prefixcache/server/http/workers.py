"""Threads for what would hold up the event loop, and with it every other client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# What may run in the event loop. All else waits for the interpreter twice, there and back.
_SMALL = 2**14
# Many that are small hold it up as one that is not: they together take this share of its time, and
# this many seconds at once.
_SHARE = 0.25
_SECONDS_AT_ONCE = 0.005
# Python code of several threads takes turns, and the event loop waits for its own turn: more
# threads would make nothing faster.
_NUM_THREADS = 2


class Workers:
    """Runs functions in a few threads, first come, first served. One event loop uses it.

    The event loop goes on meanwhile as far as a function lets go of the interpreter: Python code
    does every few milliseconds, and so must whatever it calls.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefixcache-worker")
        self._owed_seconds = 0.0
        self._paid_at = time.monotonic()

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """The result of `function`, called at once when its input is small and the loop has time.

        `size` is of that input: bytes, characters or numbers.
        """
        if size >= _SMALL or not self._has_time():
            return await self.in_thread(function)
        begun = time.monotonic()
        try:
            return function()
        finally:
            self._owed_seconds += time.monotonic() - begun

    async def in_thread(self, function: Callable[[], T]) -> T:
        """The result of `function`, which is never called in the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _has_time(self) -> bool:
        """Whether little was run in the event loop lately: a share of the time since pays it."""
        now = time.monotonic()
        self._owed_seconds = max(0.0, self._owed_seconds - (now - self._paid_at) * _SHARE)
        self._paid_at = now
        return self._owed_seconds < _SECONDS_AT_ONCE
