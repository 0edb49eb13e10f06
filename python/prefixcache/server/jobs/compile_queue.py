"""Grammars that clients wait for: compiled one by one, clients in turns, within bounds."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from prefixcache.exceptions import QueueFullError, SlowGrammarError

if TYPE_CHECKING:
    from prefixcache.engine.client import EngineClient
    from prefixcache.text.grammar.answer_matcher import Grammar
    from prefixcache.types.structured_output import StructuredOutput

T = TypeVar("T")

_MOST_WAITING = 256
_MOST_OF_CLIENT = 32
_RETRY_AFTER = 10


class CompileQueue:
    """Compiles grammars; belongs to one event loop.

    Each is tried for a moment first, and waits among the slow ones where that was not enough, so
    that slow grammars keep only slow ones waiting.
    """

    def __init__(self) -> None:
        self._quick = TurnQueue("prefixcache-compiler")
        self._slow = TurnQueue("prefixcache-slow-compiler")

    async def compile(
        self, engine: EngineClient, output: StructuredOutput, client: str | None
    ) -> Grammar:
        """The grammar, which is not compiled yet. Whoever is cancelled gives its place up.

        Raises what `EngineClient.compile` does, and `QueueFullError` when too many wait.
        """
        try:
            return await self._quick.run(client, partial(engine.compile, output, quick=True))
        except SlowGrammarError:
            return await self._slow.run(client, partial(engine.compile, output))


class TurnQueue:
    """Calls functions in a thread, one at a time; clients with several waiting take turns."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}
        self._is_running = False

    async def run(self, client: str | None, function: Callable[[threading.Event], T]) -> T:
        """The result of `function`, whose argument is set when the caller is cancelled."""
        if self._is_running:
            await self._turn(client)
        self._is_running = True
        cancelled = threading.Event()
        call = asyncio.get_running_loop().run_in_executor(self._thread, function, cancelled)
        call.add_done_callback(self._end)
        try:
            return await asyncio.shield(call)
        finally:
            cancelled.set()

    async def _turn(self, client: str | None) -> None:
        line = self._waiting.get(client, ())
        if len(line) >= _MOST_OF_CLIENT or sum(map(len, self._waiting.values())) >= _MOST_WAITING:
            raise QueueFullError("Too many grammars wait to be compiled.", retry_after=_RETRY_AFTER)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(client, turn)
            else:  # its turn had just come
                self._start_next()
            raise

    def _leave(self, client: str | None, turn: asyncio.Future[None]) -> None:
        """Gives the place up, unless `_start_next` has passed it over already."""
        line = self._waiting.get(client, deque())
        if turn in line:
            line.remove(turn)
        if not line:
            self._waiting.pop(client, None)

    def _end(self, call: asyncio.Future[Any]) -> None:
        if not call.cancelled():
            call.exception()  # else asyncio logs it where the caller has left
        self._start_next()

    def _start_next(self) -> None:
        self._is_running = False
        while self._waiting and not self._is_running:
            client, line = next(iter(self._waiting.items()))
            del self._waiting[client]
            turn = line.popleft()
            if line:
                self._waiting[client] = line  # behind all others
            if not turn.cancelled():
                turn.set_result(None)
                self._is_running = True
