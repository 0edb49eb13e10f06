"""The engine for asyncio: one thread runs the loop, everything reaches it through one queue.

A request's outputs go back to the event loop that asked, all of a step in one hand-over. An idle
loop waits on the queue and costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from prefixcache.engine.control import Control
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import EngineDeadError, QueueFullError
from prefixcache.metrics import Metrics
from prefixcache.request import Request, RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LONGEST_RETRY = 60
"""Seconds after which a refused client may ask again at the latest."""


class _Stream:
    """Outputs of one request on their way to the event loop that waits for them."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self.begun: float | None = time.monotonic()


_Delivery = tuple[_Stream, RequestOutput | Exception]


class _QueueBound:
    """Who may join the queue.

    A job that was let in counts as soon as it is, not when the loop's thread takes it: a burst
    between two steps is bounded too.
    """

    def __init__(self, engine: Engine, limit: int | None) -> None:
        self._engine = engine
        self._limit = limit
        self._on_their_way: set[str] = set()
        self._last_wait = 0.0

    def raise_if_full(self, job: str) -> None:
        """Raises `QueueFullError` unless the job may join, or has done so before."""
        if self._limit is None or job in self._on_their_way or self._engine.has_job(job):
            return
        length = self._engine.queue_length + len(self._on_their_way)
        if length >= self._limit:
            self._engine.metrics.queue_full_refusals += 1
            raise QueueFullError(
                f"The server is busy: {length} requests wait already, and the queue holds "
                f"{self._limit}. Try again later.",
                retry_after=min(max(math.ceil(self._last_wait), 1), _LONGEST_RETRY),
            )

    def let_in(self, job: str, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        """Counts the job until it has arrived, or until a stream that nobody read is dropped."""
        if self._limit is None:
            return
        self._on_their_way.add(job)
        weakref.finalize(outputs, self.has_arrived, job).atexit = False

    def has_arrived(self, job: str) -> None:
        """The engine has the job, or nobody ever will."""
        self._on_their_way.discard(job)

    def observe(self, stream: _Stream) -> None:
        """Remembers how long the first output of a stream took: others may wait as long."""
        if stream.begun is not None:
            self._last_wait = time.monotonic() - stream.begun
            stream.begun = None


class AsyncEngine:
    """Serves requests of coroutines, of any number of event loops.

    Takes the engine over: nobody else may call it afterwards. After `shutdown`, or when the engine
    died, every call raises `EngineDeadError`, and so does every stream that is still open.

    While `max_queue` jobs wait, requests of others are refused (None: never). A job counts once for
    every `max_num_seqs` of its waiting requests.
    """

    def __init__(self, engine: Engine, *, max_queue: int | None = None) -> None:
        self._engine = engine
        self._queue = _QueueBound(engine, max_queue)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._error: EngineDeadError | None = None
        self._stopping = False
        engine.control.run_between_steps = self._run_between_steps
        self._thread = threading.Thread(target=self._run, name="prefixcache-engine", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing can be served any more; None while the engine lives."""
        return self._error

    @property
    def num_streams(self) -> int:
        """Requests that the engine has and whose streams are open."""
        return len(self._streams)

    @property
    def num_commands(self) -> int:
        """Requests and commands that the loop has not looked at."""
        return self._inbox.qsize()

    @property
    def thread_id(self) -> int | None:
        """The loop's thread, as `threading.get_ident` names it."""
        return self._thread.ident

    @property
    def metrics(self) -> Metrics:
        """The engine's counters."""
        return self._engine.metrics

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and answer together."""
        return self._engine.max_model_len

    def check(self, request: Request) -> None:
        """Raises `InvalidRequestError`, or `EngineHaltedError` while the engine sleeps."""
        self._engine.check(request)

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Streams what each step adds to the request; closing the stream aborts the request.

        Raises `InvalidRequestError`, `QueueFullError`, `EngineHaltedError` and `EngineDeadError` at
        once. The request is handed over when the iteration starts. A stream whose engine dies
        raises `EngineDeadError`. An output that is `restarted` takes back all before it.
        """
        self._raise_if_dead()
        self.check(request)
        self._queue.raise_if_full(request.job)
        outputs = self._outputs(request)
        self._queue.let_in(request.job, outputs)
        return outputs

    def probe(self, request: Request) -> int:
        """Tokens of the prompt that are cached now, in full blocks; see `Engine.probe`.

        Reads beside the loop, from any thread, and does not wait for a step. Raises what `generate`
        does.
        """
        self._raise_if_dead()
        return self._engine.probe(request)

    @property
    def control(self) -> Control:
        """The commands, which block until they are done, and what is known of the engine."""
        self._raise_if_dead()
        return self._engine.control

    async def run(self, operation: Callable[[Control], T]) -> T:
        """Runs commands in a thread: `await engine.run(lambda control: control.sleep(1))`.

        Each command runs between two steps; what `operation` does besides is beside the steps.
        """
        return await asyncio.to_thread(operation, self.control)

    async def abort(self, request_id: str) -> None:
        """Ends the request, whose stream then ends with `finish_reason` "abort"."""
        abort = partial(self._engine.abort, [request_id])
        await asyncio.wrap_future(self._submit(lambda: self._deliver_outputs(abort())))

    async def shutdown(self, *, drain: bool = False) -> None:
        """Ends the loop: after all requests with `drain`, else they are aborted. Idempotent."""
        await asyncio.to_thread(self.close, drain=drain)

    def close(self, *, drain: bool = False) -> None:
        """`shutdown` for code without an event loop. Waits until the loop has ended."""
        self._inbox.put(partial(self._stop, drain))
        self._thread.join()

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        stream = _Stream(request.request_id)
        self._send(partial(self._add, request, stream))
        finished = False
        try:
            while not finished:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._inbox.put(partial(self._abandon, stream))

    def _run_between_steps(self, command: Callable[[], T]) -> T:
        """Waits for the loop to run a command, unless it is a part of another one."""
        if threading.current_thread() is self._thread:
            return command()
        return self._submit(partial(self._operate, command)).result()

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        """Lets the loop call `function` between two steps."""
        future: Future[T] = Future()
        self._send(partial(self._resolve, future, function))
        return future

    def _send(self, command: Callable[[], None]) -> None:
        """Hands a command to the loop; one that comes too late is run here, and so refused."""
        self._raise_if_dead()
        self._inbox.put(command)
        if self._error is not None:
            self._run_commands()

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error

    def _run_commands(self) -> None:
        while True:
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
            logger.exception("The engine stopped.")
            error = EngineDeadError(f"The engine stopped: {cause}")
            error.__cause__ = cause
            self._die(error)

    def _serve(self) -> None:
        while True:
            self._receive()
            if self._engine.has_work():
                self._deliver_outputs(self._engine.step())
            elif self._stopping:
                self._end_halted()
                return

    def _receive(self) -> None:
        """Runs the commands that have come; waits for one when there is nothing else to do."""
        if not (self._engine.has_work() or self._stopping):
            self._inbox.get()()
        self._run_commands()

    def _end_halted(self) -> None:
        """Requests that wait for a paused or sleeping engine cannot end otherwise."""
        self._deliver_outputs(self._engine.abort(list(self._streams)))

    def _add(self, request: Request, stream: _Stream) -> None:
        error = self._try_to_add(request)
        self._queue.has_arrived(request.job)
        if error is None:
            self._streams[request.request_id] = stream
        else:
            self._deliver([(stream, error)])

    def _try_to_add(self, request: Request) -> Exception | None:
        """What keeps the request from being served, whatever it is: the others go on."""
        if self._error is not None or self._stopping:
            return self._error or EngineDeadError("The engine is shutting down.")
        try:
            self._engine.add_request(request)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            return error
        return None

    def _abandon(self, stream: _Stream) -> None:
        """Nobody listens to the stream any more."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort([stream.request_id])

    def _resolve(self, future: Future[T], function: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._error is not None:
                raise self._error
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
            self._deliver_outputs(self._engine.take_outputs())

    def _stop(self, drain: bool) -> None:
        self._stopping = True
        if not drain and self._error is None:
            self._deliver_outputs(self._engine.abort(list(self._streams)))

    def _die(self, error: EngineDeadError) -> None:
        """Tells everybody who waits.

        The error is set before the queue is emptied, and `_send` looks at it after it has put its
        command there: one of the two runs the command.
        """
        self._error = error
        streams, self._streams = self._streams, {}
        self._deliver([(stream, error) for stream in streams.values()])
        self._run_commands()

    def _deliver_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        deliveries: list[_Delivery] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            deliveries.append((stream, output))
            self._queue.observe(stream)
            if output.finished:
                del self._streams[output.request_id]
        self._deliver(deliveries)

    def _deliver(self, deliveries: Sequence[_Delivery]) -> None:
        """One hand-over for each event loop."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Delivery]] = defaultdict(list)
        for delivery in deliveries:
            by_loop[delivery[0].loop].append(delivery)
        for loop, batch in by_loop.items():
            self._hand_over(loop, batch)

    def _hand_over(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Delivery]) -> None:
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the event loop is closed: nobody listens
            for stream, _ in batch:
                self._abandon(stream)


def _put_all(batch: Sequence[_Delivery]) -> None:
    for stream, item in batch:
        stream.items.put_nowait(item)
