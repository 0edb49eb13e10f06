"""The engine for asyncio: one thread runs the loop, everything reaches it through one queue.

A request's outputs go back to the event loop that asked, all of a step in one delivery. An idle
loop waits on the queue and costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from prefixcache.engine.control import Control
from prefixcache.engine.engine import Engine
from prefixcache.engine.pool_watch import PoolWatch
from prefixcache.engine.request_rules import CheckedParts, CheckedRequest
from prefixcache.engine.threads.engine_thread import EngineThread
from prefixcache.engine.threads.streams import (
    Batch,
    Inbox,
    Item,
    OpenStreams,
    QueueBound,
    Stream,
    end_of_part,
)
from prefixcache.exceptions import EngineDeadError, InvalidRequestError, RequestTimeoutError
from prefixcache.metrics import Metrics
from prefixcache.text.grammar.answer_matcher import Grammar
from prefixcache.text.grammar.sandbox import Sandboxes
from prefixcache.types.request import Request, RequestOutput
from prefixcache.types.structured_output import StructuredOutput

T = TypeVar("T")

_MAX_COMMANDS = 32
"""Commands of coroutines that may wait at the same time; more wait for one of them."""


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
        self._queue = QueueBound(engine, max_queue, max_waiting_per_client)
        self._sandboxes = Sandboxes()
        self._inbox: Inbox = Inbox()
        self._streams = OpenStreams(engine, self._queue, self._inbox)
        self._thread = EngineThread(engine, self._streams, self._inbox)
        self._control = engine.control_for(self._thread.call)
        # Their own: commands that wait, for a download say, must not keep others from a thread.
        self._command_threads = ThreadPoolExecutor(_MAX_COMMANDS, "prefixcache-command")
        self._watch = None if engine.self_sizing is None else PoolWatch(engine, self._control)

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing can be served any more; None while the engine lives."""
        return self._thread.error

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
        self._check(request)

    def _check(self, request: Request, parts: CheckedParts | None = None) -> CheckedRequest:
        self._thread.raise_if_dead()
        return self._engine.check(request, parts)

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Streams what each step adds to the request; closing the stream aborts the request.

        Raises `InvalidRequestError`, `QueueFullError`, `RateLimitError`, `EngineHaltedError` and
        `EngineDeadError` at once. The engine gets the request when the iteration starts. A stream
        whose engine dies raises `EngineDeadError`. An output that is `restarted` takes back all
        before it.
        """
        return _without_index(_one_by_one(self._open([self._check(request)])))

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
    ) -> AsyncGenerator[Batch, None]:
        """As `generate_all`, with all that has come since the reader looked last at once.

        The requests are aborted, and the stream ends with `RequestTimeoutError`, at `deadline`, in
        seconds of `time.monotonic`; with `SlowReaderError` when more than `max_unread` outputs for
        each of them wait for the reader.
        """
        if len({request.job for request in requests}) != 1:
            raise InvalidRequestError("Requests of one stream need one job_id.", param="job_id")
        parts, checked = CheckedParts(), list[CheckedRequest]()
        while len(checked) < len(requests):
            if checked:
                self._queue.raise_if_full(requests[0])
                await asyncio.sleep(0)
            end = end_of_part(requests, len(checked))
            checked += [self._check(request, parts) for request in requests[len(checked) : end]]
        return self._open(checked, deadline, max_unread)

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
        self._thread.raise_if_dead()
        sandbox = self._sandboxes.quick if quick else self._sandboxes.thorough
        return self._engine.rules.compile(output, sandbox, cancelled)

    def probe(self, request: Request) -> int:
        """Tokens of the prompt that are cached now, in full blocks; see `Engine.probe`.

        Reads while the loop runs, from any thread, and does not wait for a step. Raises what
        `generate` does.
        """
        self._thread.raise_if_dead()
        return self._engine.probe(request)

    async def probe_all(self, requests: Sequence[Request]) -> list[int]:
        """`probe` of each, in a thread of its own."""
        return await asyncio.to_thread(lambda: list(map(self.probe, requests)))

    @property
    def control(self) -> Control:
        """The commands, which block until they are done, and what is known of the engine."""
        self._thread.raise_if_dead()
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
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    async def abort(self, request_id: str) -> None:
        """Ends the request, whose stream then ends with `finish_reason` "abort"."""
        abort = partial(self._engine.abort, [request_id])
        await asyncio.wrap_future(
            self._thread.submit(lambda: self._streams.deliver_outputs(abort()))
        )

    async def shutdown(self, *, drain: bool = False) -> None:
        """Ends the loop: after all requests with `drain`, else they are aborted. Idempotent."""
        await asyncio.to_thread(self.close, drain=drain)

    def close(self, *, drain: bool = False, waits: bool = True) -> None:
        """`shutdown` for code without an event loop. Waits until the loop has ended.

        It `waits` for a disk tier too, a few seconds at most.
        """
        if self._watch is not None:
            self._watch.close()
        try:
            self._thread.stop(drain=drain)
            self._engine.close(waits=waits)
        finally:
            self._sandboxes.close()

    def _open(
        self,
        checked: Sequence[CheckedRequest],
        deadline: float | None = None,
        max_unread: int | None = None,
    ) -> AsyncGenerator[Batch, None]:
        """The stream of one job's requests."""
        first = checked[0].request
        self._queue.raise_if_full(first)
        outputs = self._outputs(checked, deadline, max_unread)
        self._queue.let_in(first, outputs)
        return outputs

    async def _outputs(
        self,
        checked: Sequence[CheckedRequest],
        deadline: float | None,
        max_unread: int | None,
    ) -> AsyncGenerator[Batch, None]:
        most_unread = None if max_unread is None else max_unread * len(checked)
        stream = Stream(checked, most_unread)
        self._thread.send(partial(self._streams.add, stream))
        timer = self._end_at(deadline, stream)
        num_open = len(checked)
        try:
            while num_open:
                outputs, error = _until_error(await stream.take())
                num_open = 0 if error else num_open - sum(output.finished for _, output in outputs)
                if outputs:
                    yield outputs
                if error is not None:
                    raise error
        finally:
            if timer is not None:
                timer.cancel()
            if num_open:
                self._inbox.put(partial(self._streams.abandon, stream))

    def _end_at(self, deadline: float | None, stream: Stream) -> asyncio.TimerHandle | None:
        """Aborts the requests at the deadline, whether or not the stream is read then."""
        if deadline is None:
            return None
        seconds = max(deadline - time.monotonic(), 0.0)
        return stream.loop.call_later(seconds, self._streams.cut, stream, RequestTimeoutError())


def _until_error(
    items: Sequence[Item],
) -> tuple[Batch, Exception | None]:
    """The outputs before the first error, and that."""
    outputs: Batch = []
    for item in items:
        if isinstance(item, Exception):
            return outputs, item
        outputs.append(item)
    return outputs, None


async def _one_by_one(
    batches: AsyncGenerator[Batch, None],
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
