"""Threads for what would hold up the event loop, and with it every other client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# A change of threads takes longer than what a size below this takes.
_SMALL = 2**14
# Python code of several threads takes turns, and the event loop waits for its own turn: more
# threads would make nothing faster.
_NUM_THREADS = 2


class Workers:
    """Runs functions in a few threads, first come, first served.

    The event loop goes on meanwhile as far as a function lets go of the interpreter: Python code
    does every few milliseconds, and so must whatever it calls.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefixcache-worker")

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """The result of `function`, which is called at once when its input is small.

        `size` is of that input: bytes, characters or numbers.
        """
        if size < _SMALL:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def beside(self, function: Callable[[], T]) -> T:
        """The result of `function`, which is never called in the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)
