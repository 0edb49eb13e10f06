"""Outputs on their way from the engine's thread to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefixcache.engine.engine import Engine
from prefixcache.engine.request_rules import CheckedRequest
from prefixcache.exceptions import EngineDeadError, QueueFullError, RateLimitError, SlowReaderError
from prefixcache.types.request import Request, RequestOutput

_LONGEST_RETRY = 60
"""Seconds after which a refused client may ask again at the latest."""

_AT_ONCE = 2**16
_REQUEST_COST = 256
"""Tokens of requests that are checked or added in one go, and what a request costs in addition."""

_TOO_SLOW = "The answer was read so slowly that its work was cancelled."

Batch = list[tuple[int, RequestOutput]]
"""Outputs with the indices of their requests."""

Item = tuple[int, RequestOutput] | Exception
Inbox = queue.SimpleQueue[Callable[[], None]]
"""What the engine's thread is to do between two steps."""


class Stream:
    """Outputs of a job on their way to the event loop that waits for them, at most `most_unread`.

    Its methods are called in that event loop alone.
    """

    def __init__(self, checked: Sequence[CheckedRequest], most_unread: int | None) -> None:
        self.checked = checked
        self.requests = [request.request for request in checked]
        self.is_open = True
        self.sent = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self._items: list[Item] = []
        self._reader: asyncio.Future[None] | None = None
        self._most_unread = math.inf if most_unread is None else most_unread
        self._is_cut = False

    def put(self, item: Item) -> bool:
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

    async def take(self) -> list[Item]:
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
class StreamPlace:
    """A request's place in its stream, and when it was sent, until its first output."""

    stream: Stream
    index: int
    sent: float | None


_Delivery = tuple[Stream, Item]


class QueueBound:
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
        num_sharing = num_clients if num_waiting else num_clients + 1
        return own, (self._limit or 0) // max(num_sharing, 1)

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

    def observe(self, place: StreamPlace) -> None:
        """Remembers how long the first output of a request took: others may wait as long."""
        if place.sent is not None:
            self._last_wait = time.monotonic() - place.sent
            place.sent = None


class OpenStreams:
    """The streams of the requests that an engine has.

    The engine's thread makes all calls but `cut`, which event loops make.
    """

    def __init__(self, engine: Engine, queue_bound: QueueBound, inbox: Inbox) -> None:
        self._engine = engine
        self._queue = queue_bound
        self._inbox = inbox
        self._places: dict[str, StreamPlace] = {}
        self._error: EngineDeadError | None = None
        self._is_stopping = self._is_draining = False

    def __len__(self) -> int:
        return len(self._places)

    def add(self, stream: Stream, begin: int = 0) -> None:
        """Adds a part of a job's requests; steps go on before the next part."""
        end = end_of_part(stream.requests, begin)
        for index in range(begin, end):
            if stream.is_open:
                self._add_one(stream, index)
        if stream.is_open and end < len(stream.requests):
            self._inbox.put(partial(self.add, stream, end))
        self._queue.has_arrived(stream.requests[0].job)

    def _add_one(self, stream: Stream, index: int) -> None:
        """Whatever keeps a request from being served ends its job: the others go on."""
        try:
            self._raise_if_ending(is_new_job=index == 0)
            self._engine.add(stream.checked[index])
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self.abandon(stream)
            self._deliver([(stream, error)])
        else:
            self._places[stream.requests[index].request_id] = StreamPlace(
                stream, index, stream.sent
            )

    def _raise_if_ending(self, *, is_new_job: bool) -> None:
        """Raises `EngineDeadError` unless draining lets a job go on that has begun."""
        if self._error is not None:
            raise self._error
        if self._is_stopping and (is_new_job or not self._is_draining):
            raise EngineDeadError("The engine is shutting down.")

    def abandon(self, stream: Stream) -> None:
        """Nobody listens to the stream any more."""
        stream.is_open = False
        names = [request.request_id for request in stream.requests]
        places = [(name, self._places.get(name)) for name in names]
        running = [name for name, place in places if place and place.stream is stream]
        for name in running:
            del self._places[name]
        if running:
            self._engine.abort(running)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests, and so their streams."""
        self.deliver_outputs(self._engine.abort(request_ids))

    def abort_all(self) -> None:
        """Ends all requests."""
        self.abort(list(self._places))

    def stop(self, *, drain: bool) -> None:
        """Adds no further job, and without `drain` nothing more of those that have begun."""
        self._is_stopping, self._is_draining = True, drain
        if not drain and self._error is None:
            self.abort_all()

    def end_all(self, error: EngineDeadError) -> None:
        """All streams end with the error, and so do those that are still to be added."""
        self._error = error
        places, self._places = self._places, {}
        streams = {id(place.stream): place.stream for place in places.values()}
        self._deliver([(stream, error) for stream in streams.values()])

    def deliver_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Readers get the outputs next."""
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
                self.cut(stream, SlowReaderError(_TOO_SLOW))

    def _deliver_to(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Delivery]) -> None:
        try:
            loop.call_soon_threadsafe(self._put_all, batch)
        except RuntimeError:  # the event loop is closed: nobody listens
            for stream, _ in batch:
                self.abandon(stream)

    def cut(self, stream: Stream, error: Exception) -> None:
        """Ends a stream with an error in the place of what nobody has read."""
        stream.cut(error)
        self._inbox.put(partial(self.abandon, stream))


def end_of_part(requests: Sequence[Request], begin: int) -> int:
    """The end of a part of the requests that may be checked or added in one go."""
    size = 0
    for end, request in enumerate(itertools.islice(requests, begin, None), begin + 1):
        size += len(request.prompt_token_ids) + _REQUEST_COST
        if size >= _AT_ONCE:
            return end
    return len(requests)
