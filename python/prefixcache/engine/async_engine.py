"""The engine for asyncio: one thread runs the loop, everything reaches it through one queue.

A request's outputs go back to the event loop that asked, all of a step in one delivery. An idle
loop waits on the queue and costs nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prefixcache.config.logs import SHOWS_ERROR
from prefixcache.engine.control import Control
from prefixcache.engine.engine import Engine
from prefixcache.engine.pool_watch import PoolWatch
from prefixcache.engine.request_rules import CheckedIds
from prefixcache.exceptions import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RateLimitError,
    RequestTimeoutError,
    SlowReaderError,
)
from prefixcache.metrics import Metrics
from prefixcache.text.grammar.answer_matcher import Grammar
from prefixcache.text.grammar.sandbox import Sandboxes
from prefixcache.types.request import Request, RequestOutput
from prefixcache.types.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LONGEST_RETRY = 60
"""Seconds after which a refused client may ask again at the latest."""

_MAX_COMMANDS = 32
"""Commands of coroutines that may wait at the same time; more wait for one of them."""

_AT_ONCE = 2**16
_REQUEST_COST = 256
"""Tokens of requests that are checked or added in one go, and what a request costs in addition."""

_TOO_SLOW = "The answer was read so slowly that its work was cancelled."


class _Stream:
    """Outputs of a job on their way to the event loop that waits for them, at most `most_unread`.

    Its methods are called in that event loop alone.
    """

    def __init__(
        self, requests: Sequence[Request], checked: CheckedIds, most_unread: int | None
    ) -> None:
        self.requests = requests
        self.checked = checked
        self.is_open = True
        self.sent = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self._items: list[_Item] = []
        self._reader: asyncio.Future[None] | None = None
        self._most_unread = math.inf if most_unread is None else most_unread
        self._is_cut = False

    def put(self, item: _Item) -> bool:
        """Lets the reader have an output; False when there are too many."""
        if not self._is_cut:
            self._items.append(item)
            self._wake_reader()
        return len(self._items) <= self._most_unread

    def cut(self, error: Exception) -> None:
        """The reader gets the error next, and nothing more."""
        self._is_cut = True
        self._items = [error]
        self._wake_reader()

    async def take(self) -> list[_Item]:
        """All that has come since the last call, at least one; the one reader calls it."""
        if not self._items:
            self._reader = self.loop.create_future()
            await self._reader
        items, self._items = self._items, []
        return items

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(slots=True)
class _Place:
    """A request's place in its stream, and when it was sent, until its first output."""

    stream: _Stream
    index: int
    sent: float | None


_Item = tuple[int, RequestOutput] | Exception
_Delivery = tuple[_Stream, _Item]


class _QueueBound:
    """Who may join the queue: at most `limit` jobs of all, and `limit_per_client` of each client.

    A job that was let in counts as soon as it is, not when the loop's thread takes it: a burst
    between two steps is bounded too. A full queue still takes jobs of a client that has less than
    its share, the limit divided by the clients that wait: nobody fills it for the others.
    """

    def __init__(self, engine: Engine, limit: int | None, limit_per_client: int | None) -> None:
        self._engine = engine
        self._limit = limit
        self._limit_per_client = limit_per_client
        self._on_their_way: dict[str, str | None] = {}
        self._last_wait = 0.0

    @property
    def _is_bounded(self) -> bool:
        return self._limit is not None or self._limit_per_client is not None

    def raise_if_full(self, request: Request) -> None:
        """Raises unless the request's job may join, or has done so before.

        Raises `QueueFullError`, or `RateLimitError` where it is the client who has too many.
        """
        job, client = request.job, request.client
        if not self._is_bounded or job in self._on_their_way or job in self._engine.jobs:
            return
        own, share = (0, 0) if client is None else self._own(client)
        if client is not None and own >= (self._limit_per_client or math.inf):
            self._engine.metrics.key_limit_refusals += 1
            raise RateLimitError(
                f"{own} requests with this API key wait already, and {self._limit_per_client} may. "
                "Try again later.",
                retry_after=self._retry_after(),
            )
        length = self._engine.jobs.queue_length + len(self._on_their_way)
        if self._limit is not None and length >= self._limit and own >= share:
            self._engine.metrics.queue_full_refusals += 1
            raise QueueFullError(
                f"The server is busy: {length} requests wait already, and the queue holds "
                f"{self._limit}. Try again later.",
                retry_after=self._retry_after(),
            )

    def _own(self, client: str) -> tuple[int, int]:
        """How many jobs of a client wait, and its share of the queue."""
        # The engine's thread may change them between two looks.
        waiting = self._engine.jobs.waiting
        num_waiting, num_clients = waiting[client], len(waiting)
        own = num_waiting + list(self._on_their_way.values()).count(client)
        return own, (self._limit or 0) // max(num_clients + (not num_waiting), 1)

    def _retry_after(self) -> int:
        return min(max(math.ceil(self._last_wait), 1), _LONGEST_RETRY)

    def let_in(self, request: Request, outputs: AsyncGenerator[Any, None]) -> None:
        """Counts the job until it has arrived, or until a stream that nobody read is dropped."""
        if not self._is_bounded:
            return
        self._on_their_way[request.job] = request.client
        weakref.finalize(outputs, self.has_arrived, request.job).atexit = False

    def has_arrived(self, job: str) -> None:
        """The engine has the job, or nobody ever will."""
        self._on_their_way.pop(job, None)

    def observe(self, place: _Place) -> None:
        """Remembers how long the first output of a request took: others may wait as long."""
        if place.sent is not None:
            self._last_wait = time.monotonic() - place.sent
            place.sent = None


class AsyncEngine:
    """Serves requests of coroutines, of any number of event loops.

        async for output in engine.generate(request):
            print(output.text, end="")
        async for index, output in await engine.generate_all(requests):
            texts[index] += output.text
        await engine.run(lambda control: control.reset_prefix_cache())

    Takes the engine over: nobody else may call it afterwards. After `shutdown`, or when the engine
    died, every call raises `EngineDeadError`, and so does every stream that is still open.

    While `max_queue` jobs wait, requests of others are refused, and while `max_waiting_per_client`
    jobs of one client wait, others of that client (None: never). A job counts once for every
    `max_num_seqs` of its waiting requests.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int | None = None,
        max_waiting_per_client: int | None = None,
    ) -> None:
        self._engine = engine
        self._queue = _QueueBound(engine, max_queue, max_waiting_per_client)
        self._sandboxes = Sandboxes()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._places: dict[str, _Place] = {}
        self._error: EngineDeadError | None = None
        self._stopping = self._draining = False
        self._control = engine.control_for(self._run_between_steps)
        # Their own: commands that wait, for a download say, must not keep others from a thread.
        self._command_threads = ThreadPoolExecutor(_MAX_COMMANDS, "prefixcache-command")
        self._thread = threading.Thread(target=self._run, name="prefixcache-engine", daemon=True)
        self._thread.start()
        self._watch = None if engine.self_sizing is None else PoolWatch(engine, self._control)

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing can be served any more; None while the engine lives."""
        return self._error

    @property
    def num_streams(self) -> int:
        """Requests that the engine has and whose streams are open."""
        return len(self._places)

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
        self._check(request, None)

    def _check(self, request: Request, checked: CheckedIds | None) -> None:
        self._raise_if_dead()
        self._engine.check(request, checked)

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Streams what each step adds to the request; closing the stream aborts the request.

        Raises `InvalidRequestError`, `QueueFullError`, `RateLimitError`, `EngineHaltedError` and
        `EngineDeadError` at once. The engine gets the request when the iteration starts. A stream
        whose engine dies raises `EngineDeadError`. An output that is `restarted` takes back all
        before it.
        """
        checked = CheckedIds()
        self._check(request, checked)
        return _without_index(_one_by_one(self._open([request], checked)))

    async def generate_all(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """As `generate` for the requests of one job: outputs come with the request's index.

        All are checked before the first one runs; other coroutines take turns with many. One that
        cannot be added ends the stream with its error. Closing the stream aborts them all.
        """
        return _one_by_one(await self.generate_batches(requests))

    async def generate_batches(
        self,
        requests: Sequence[Request],
        *,
        deadline: float | None = None,
        max_unread: int | None = None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """As `generate_all`, with all that has come since the reader looked last at once.

        The requests are aborted, and the stream ends with `RequestTimeoutError`, at `deadline`, in
        seconds of `time.monotonic`; with `SlowReaderError` when more than `max_unread` outputs for
        each of them wait for the reader.
        """
        if len({request.job for request in requests}) != 1:
            raise InvalidRequestError("Requests of one stream need one job_id.", param="job_id")
        end, checked = 0, CheckedIds()
        while end < len(requests):
            if end:
                await asyncio.sleep(0)
            begin, end = end, _end_of_part(requests, end)
            for request in requests[begin:end]:
                self._check(request, checked)
            self._queue.raise_if_full(requests[0])
        return self._open(requests, checked, deadline, max_unread)

    def find_grammar(self, output: StructuredOutput) -> Grammar | None:
        """The grammar of such answers, if it is compiled already."""
        return self._engine.rules.find_grammar(output)

    def compile(
        self,
        output: StructuredOutput,
        cancelled: threading.Event | None = None,
        *,
        quick: bool = False,
    ) -> Grammar:
        """The grammar of such answers, within bounds of time and memory; not for an event loop.

        While the caller holds it, `generate` and `generate_all` find it. Raises
        `InvalidRequestError`, `QueueFullError` and `EngineDeadError`; `SlowGrammarError` where it
        is to be `quick` and is not; and `CancelledError` soon after `cancelled` is set.
        """
        self._raise_if_dead()
        sandbox = self._sandboxes.quick if quick else self._sandboxes.thorough
        return self._engine.rules.compile(output, sandbox, cancelled)

    def probe(self, request: Request) -> int:
        """Tokens of the prompt that are cached now, in full blocks; see `Engine.probe`.

        Reads while the loop runs, from any thread, and does not wait for a step. Raises what
        `generate` does.
        """
        self._raise_if_dead()
        return self._engine.probe(request)

    async def probe_all(self, requests: Sequence[Request]) -> list[int]:
        """`probe` of each, in a thread of its own."""
        return await asyncio.to_thread(lambda: list(map(self.probe, requests)))

    @property
    def control(self) -> Control:
        """The commands, which block until they are done, and what is known of the engine."""
        self._raise_if_dead()
        return self._control

    async def run(self, operation: Callable[[Control], T]) -> T:
        """Runs commands in a thread: `await engine.run(lambda control: control.sleep(1))`.

        Each command runs between two steps; the rest of `operation` runs during steps.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._command_threads, operation, self.control)

    async def loop_passes(self) -> None:
        """Returns when the loop has come round: after the step in flight, or at once when idle.

        Raises `EngineDeadError` when it never will.
        """
        await asyncio.wrap_future(self._submit(lambda: None))

    async def abort(self, request_id: str) -> None:
        """Ends the request, whose stream then ends with `finish_reason` "abort"."""
        abort = partial(self._engine.abort, [request_id])
        await asyncio.wrap_future(self._submit(lambda: self._deliver_outputs(abort())))

    async def shutdown(self, *, drain: bool = False) -> None:
        """Ends the loop: after all requests with `drain`, else they are aborted. Idempotent."""
        await asyncio.to_thread(self.close, drain=drain)

    def close(self, *, drain: bool = False, waits: bool = True) -> None:
        """`shutdown` for code without an event loop. Waits until the loop has ended.

        It `waits` for a disk tier too, a few seconds at most.
        """
        if self._watch is not None:
            self._watch.close()
        self._inbox.put(partial(self._stop, drain))
        try:
            self._thread.join()
            self._engine.close(waits=waits)
        finally:
            self._sandboxes.close()

    def _open(
        self,
        requests: Sequence[Request],
        checked: CheckedIds,
        deadline: float | None = None,
        max_unread: int | None = None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """The stream of checked requests."""
        self._queue.raise_if_full(requests[0])
        outputs = self._outputs(requests, checked, deadline, max_unread)
        self._queue.let_in(requests[0], outputs)
        return outputs

    async def _outputs(
        self,
        requests: Sequence[Request],
        checked: CheckedIds,
        deadline: float | None,
        max_unread: int | None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        most_unread = None if max_unread is None else max_unread * len(requests)
        stream = _Stream(requests, checked, most_unread)
        self._send(partial(self._add, stream))
        timer = self._end_at(deadline, stream)
        num_open = len(requests)
        try:
            while num_open:
                outputs, error = _until_error(await stream.take())
                num_open = 0 if error else num_open - sum(one.finished for _, one in outputs)
                if outputs:
                    yield outputs
                if error is not None:
                    raise error
        finally:
            if timer is not None:
                timer.cancel()
            if num_open:
                self._inbox.put(partial(self._abandon, stream))

    def _end_at(self, deadline: float | None, stream: _Stream) -> asyncio.TimerHandle | None:
        """Aborts the requests at the deadline, whether or not the stream is read then."""
        if deadline is None:
            return None
        seconds = max(deadline - time.monotonic(), 0.0)
        return stream.loop.call_later(seconds, self._cut, stream, RequestTimeoutError())

    def _cut(self, stream: _Stream, error: Exception) -> None:
        """Ends a stream with an error in the place of what nobody has read."""
        stream.cut(error)
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
        self._deliver_outputs(self._engine.abort(list(self._places)))

    def _add(self, stream: _Stream, begin: int = 0) -> None:
        """Adds a part of a job's requests; steps go on before the next part."""
        end = _end_of_part(stream.requests, begin)
        for index in range(begin, end):
            if stream.is_open:
                self._add_one(stream, index)
        if stream.is_open and end < len(stream.requests):
            self._inbox.put(partial(self._add, stream, end))
        self._queue.has_arrived(stream.requests[0].job)

    def _add_one(self, stream: _Stream, index: int) -> None:
        """Whatever keeps a request from being served ends its job: the others go on."""
        request = stream.requests[index]
        try:
            self._raise_if_ending(is_new_job=index == 0)
            self._engine.add_request(request, stream.checked)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._abandon(stream)
            self._deliver([(stream, error)])
        else:
            self._places[request.request_id] = _Place(stream, index, stream.sent)

    def _raise_if_ending(self, *, is_new_job: bool) -> None:
        """Raises `EngineDeadError` unless draining lets a job go on that has begun."""
        if self._error is not None:
            raise self._error
        if self._stopping and (is_new_job or not self._draining):
            raise EngineDeadError("The engine is shutting down.")

    def _abandon(self, stream: _Stream) -> None:
        """Nobody listens to the stream any more."""
        stream.is_open = False
        names = [request.request_id for request in stream.requests]
        places = [(name, self._places.get(name)) for name in names]
        running = [name for name, place in places if place and place.stream is stream]
        for name in running:
            del self._places[name]
        if running:
            self._engine.abort(running)

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
        self._stopping, self._draining = True, drain
        if not drain and self._error is None:
            self._deliver_outputs(self._engine.abort(list(self._places)))

    def _die(self, error: EngineDeadError) -> None:
        """Tells everybody who waits.

        The error is set before the queue is emptied, and `_send` looks at it after it has put its
        command there: one of the two runs the command.
        """
        self._error = error
        places, self._places = self._places, {}
        streams = {id(place.stream): place.stream for place in places.values()}
        self._deliver([(stream, error) for stream in streams.values()])
        self._run_commands()

    def _deliver_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        deliveries: list[_Delivery] = []
        for output in outputs:
            place = self._places.get(output.request_id)
            if place is None:
                continue
            deliveries.append((place.stream, (place.index, output)))
            self._queue.observe(place)
            if output.finished:
                del self._places[output.request_id]
        self._deliver(deliveries)

    def _deliver(self, deliveries: Sequence[_Delivery]) -> None:
        """One delivery for each event loop."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Delivery]] = defaultdict(list)
        for delivery in deliveries:
            by_loop[delivery[0].loop].append(delivery)
        for loop, batch in by_loop.items():
            self._deliver_to(loop, batch)

    def _put_all(self, batch: Sequence[_Delivery]) -> None:
        """Runs on the event loop."""
        for stream, item in batch:
            if not stream.put(item):
                self._cut(stream, SlowReaderError(_TOO_SLOW))

    def _deliver_to(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Delivery]) -> None:
        try:
            loop.call_soon_threadsafe(self._put_all, batch)
        except RuntimeError:  # the event loop is closed: nobody listens
            for stream, _ in batch:
                self._abandon(stream)


def _until_error(
    items: Sequence[_Item],
) -> tuple[list[tuple[int, RequestOutput]], Exception | None]:
    """The outputs before the first error, and that."""
    outputs: list[tuple[int, RequestOutput]] = []
    for item in items:
        if isinstance(item, Exception):
            return outputs, item
        outputs.append(item)
    return outputs, None


async def _one_by_one(
    batches: AsyncGenerator[list[tuple[int, RequestOutput]], None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with aclosing(batches):
        async for batch in batches:
            for output in batch:
                yield output


async def _without_index(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncGenerator[RequestOutput, None]:
    async with aclosing(outputs):
        async for _, output in outputs:
            yield output


def _end_of_part(requests: Sequence[Request], begin: int) -> int:
    """The end of a part of the requests that may be checked or added in one go."""
    size = 0
    for end, request in enumerate(itertools.islice(requests, begin, None), begin + 1):
        size += len(request.prompt_token_ids) + _REQUEST_COST
        if size >= _AT_ONCE:
            return end
    return len(requests)
