"""The thread that runs an engine's steps, and takes what others want done between two of them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from prefixcache.config.logs import SHOWS_ERROR
from prefixcache.engine.engine import Engine
from prefixcache.engine.threads.streams import Inbox, OpenStreams
from prefixcache.exceptions import EngineDeadError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Steps an engine while it has work; else it waits for commands and costs nothing.

    `error` says why nothing can be served any more.
    """

    def __init__(self, engine: Engine, streams: OpenStreams, inbox: Inbox) -> None:
        self._engine = engine
        self._streams = streams
        self._inbox = inbox
        self._is_stopping = False
        self.error: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, name="prefixcache-engine", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """The thread, as `threading.get_ident` names it."""
        return self._thread.ident

    def call(self, command: Callable[[], T]) -> T:
        """Waits for the loop to run a command, unless it is a part of another one."""
        if threading.current_thread() is self._thread:
            return command()
        return self.submit(partial(self._operate, command)).result()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Lets the loop call `function` between two steps."""
        future: Future[T] = Future()
        self.send(partial(self._resolve, future, function))
        return future

    def send(self, command: Callable[[], None]) -> None:
        """Hands a command to the loop; one that comes too late is run here, and so refused."""
        self.raise_if_dead()
        self._inbox.put(command)
        if self.error is not None:
            self._run_commands()

    def raise_if_dead(self) -> None:
        """Raises `EngineDeadError` when nothing can be served any more."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error

    def stop(self, *, drain: bool) -> None:
        """Ends the thread: after all requests with `drain`, else they are aborted. Waits for it."""
        self._inbox.put(partial(self._stop, drain))
        self._thread.join()

    def _run_commands(self) -> None:
        """Runs the commands that have come. What they put into the inbox waits for a step."""
        for _ in range(self._inbox.qsize()):
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    # Everything below runs on the loop's thread; commands may run elsewhere once it has ended.

    def _run(self) -> None:
        try:
            self._engine.adopt_loop()
            self._serve()
            self._die(EngineDeadError("The engine was shut down."))
        except BaseException as cause:
            logger.exception("The engine stopped.", extra=SHOWS_ERROR)
            error = EngineDeadError(f"The engine stopped: {cause}")
            error.__cause__ = cause
            self._die(error)

    def _serve(self) -> None:
        while True:
            self._receive()
            if self._engine.has_work():
                self._streams.deliver_outputs(self._engine.step())
            elif self._is_stopping:
                self._streams.abort_all()  # those that wait for a paused or sleeping engine
                return

    def _receive(self) -> None:
        """Runs the commands that have come; waits for one when there is nothing else to do."""
        if not (self._engine.has_work() or self._is_stopping):
            self._inbox.get()()
        self._run_commands()

    def _resolve(self, future: Future[T], function: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self.error is not None:
                raise self.error
            result = function()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    def _operate(self, command: Callable[[], T]) -> T:
        """Runs a command, and tells the requests what it did to them."""
        try:
            return command()
        finally:
            self._streams.deliver_outputs(self._engine.take_outputs())

    def _stop(self, drain: bool) -> None:
        self._is_stopping = True
        self._streams.stop(drain=drain)

    def _die(self, error: EngineDeadError) -> None:
        """Tells everybody who waits.

        The error is set before the queue is emptied, and `send` looks at it after it has put its
        command there: one of the two runs the command.
        """
        self.error = error
        self._streams.end_all(error)
        self._run_commands()
