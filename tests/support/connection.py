"""A connection of the server without a network: a test gives it bytes and fires its timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from uvicorn.server import ServerState

from prefixcache.server import serve
from prefixcache.server.http.connections import Connection, ConnectionLimits


class Clock:
    """Timers that are fired by hand."""

    def __init__(self) -> None:
        self.timers: list[asyncio.TimerHandle] = []
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, _: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        loop: Any = self
        self.timers.append(asyncio.TimerHandle(0, function, (), loop))
        return self.timers[-1]

    def fire(self) -> None:
        """Runs the oldest; uvicorn's own for the time between two requests comes later."""
        timer = next(timer for timer in self.timers if not timer.cancelled())
        self.timers.remove(timer)
        timer._run()

    def create_task(self, coroutine: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(coroutine)

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """What a handle tells its loop."""


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.aborted = False
        self.num_unread = 0

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@contextmanager
def connection_of(app: Any) -> Iterator[tuple[Connection, Transport, Clock]]:
    """A connection in the hands of the test."""
    options: Any = serve.ServeOptions(timeout_read=2)
    limits = ConnectionLimits(most=9, read_seconds=2, write_seconds=30)
    config = serve.server_config(app, options, limits)
    config.load()
    clock, transport = Clock(), Transport()
    loop: Any = clock
    connection = Connection(config, ServerState(), {}, limits=limits, _loop=loop)
    connection.connection_made(transport)
    yield connection, transport, clock
    connection.connection_lost(None)
    assert not limits.awaited
