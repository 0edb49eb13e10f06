"""One job on its way through replicas: another one where a replica ends or has lost the prefix."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from prefixcache.core import BlockHashes
from prefixcache.exceptions import (
    EngineDeadError,
    PrefixCacheError,
    QueueFullError,
    RequestTimeoutError,
    SlowReaderError,
)
from prefixcache.ray_serve.job import Accepted, Chunk, Failed, Outputs, RoutedJob, Stale
from prefixcache.ray_serve.replicas.commands import CommandClient
from prefixcache.types.request import Request, RequestOutput

logger = logging.getLogger(__name__)

Batch = list[tuple[int, RequestOutput]]

# Replicas that a job is sent to, one after the other; the last one may have lost the prefix.
_MOST_TRIES = 4

_RETRY_SECONDS = 1
_TOO_SLOW = "The answer was read so slowly that its work was cancelled."
_GONE = "The replicas that were to compute this answer ended. Send the request again."


class RoutedAnswer:
    """The outputs of one job, whichever replicas compute them.

    A replica that dies is followed by another one, and what had come of unfinished requests is
    taken back by an output that is `restarted`. All must be there at `deadline`, in seconds of
    `time.monotonic`; `max_unread` bounds what waits for the reader, for each request.
    A replica must have done what `commands` know of; blocks have `block_size` tokens.
    """

    def __init__(
        self,
        generate: DeploymentHandle[Any],
        requests: Sequence[Request],
        *,
        commands: CommandClient,
        block_size: int,
        deadline: float | None,
        max_unread: int | None,
    ) -> None:
        self._generate = generate
        self._requests = requests
        self._commands = commands
        self._block_size = block_size
        self._job: RoutedJob | None = None
        self._deadline = deadline
        self._most_unread = math.inf if max_unread is None else max_unread * len(requests)
        self._open = dict.fromkeys(range(len(requests)))
        self._begun = set[int]()
        self._sent: list[int] = []
        self._actual_hits: dict[str, int] = {}
        self._num_tries = 0
        self._chunks: Chunks | None = None

    async def begin(self) -> None:
        """Returns when a replica has taken the job. Raises what the replica raises."""
        try:
            await self._send()
        except BaseException:
            self._cancel()
            raise

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """All outputs, as they come; closing it aborts the requests."""
        try:
            while self._open:
                chunk = await self._next_chunk()
                if isinstance(chunk, Outputs):
                    yield self._noted(chunk)
                    continue
                taken_back = self._take_back()
                if taken_back:
                    yield taken_back
                await self._send()
        finally:
            self._cancel()

    async def _send(self) -> None:
        """Hands the open requests to a replica that takes them."""
        while self._num_tries < _MOST_TRIES:
            self._num_tries += 1
            self._cancel()
            self._sent = [*self._open]
            self._job = self._new_job()
            self._chunks = Chunks(self._generate, self._job, self._most_unread)
            chunk = await self._next_chunk()
            if isinstance(chunk, Accepted):
                self._commands.learn(chunk.state)
                return
            if isinstance(chunk, Stale):
                self._actual_hits[chunk.replica] = chunk.hit_tokens
        raise EngineDeadError(_GONE)

    def _new_job(self) -> RoutedJob:
        requests = [self._requests[index] for index in self._sent]
        return RoutedJob(
            requests=requests,
            hashes={
                arithmetic: _hashes(requests, root, self._block_size)
                for arithmetic, root in self._commands.state.roots.items()
            },
            seconds_left=self._seconds_left(),
            command_number=self._commands.state.number,
            actual_hits=dict(self._actual_hits),
            takes_stale=self._num_tries == _MOST_TRIES,
        )

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0)

    async def _next_chunk(self) -> Chunk | None:
        """None where the replica has ended. Raises `RequestTimeoutError`, and what it raises."""
        if self._chunks is None:
            return None
        try:
            chunk = await asyncio.wait_for(self._chunks.take(), self._seconds_left())
        except asyncio.TimeoutError:
            raise RequestTimeoutError() from None
        if not isinstance(chunk, Failed):
            return chunk
        if not isinstance(chunk.error, EngineDeadError):
            raise chunk.error
        return None

    def _noted(self, chunk: Outputs) -> Batch:
        """The outputs by the indices of all requests, on this machine's clock."""
        if self._job is not None and self._job.computed is not None:
            self._job.computed()
            self._job.computed = None
        shift = time.monotonic() - chunk.now
        batch = [(self._sent[index], _shifted(output, shift)) for index, output in chunk.outputs]
        for index, output in batch:
            self._begun.add(index)
            if output.finished:
                self._open.pop(index, None)
        return batch

    def _take_back(self) -> Batch:
        begun = [index for index in self._open if index in self._begun]
        self._begun.difference_update(begun)
        names = [self._requests[index].request_id for index in begun]
        taken = [RequestOutput(request_id=name, restarted=True) for name in names]
        return [*zip(begun, taken, strict=True)]

    def _cancel(self) -> None:
        """Ends the work on the job, if there is any."""
        if self._chunks is not None:
            self._chunks.close()
            self._chunks = None


class Chunks:
    """The chunks of one job from one replica; at most `most_unread` outputs wait to be taken."""

    def __init__(self, generate: DeploymentHandle[Any], job: RoutedJob, most_unread: float) -> None:
        self._most_unread = most_unread
        self._num_unread = 0
        self._queue: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._response: Any = generate.remote(job)
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def take(self) -> Chunk | None:
        """The next one; None when the replica has ended."""
        chunk = await self._queue.get()
        if isinstance(chunk, Outputs):
            self._num_unread -= len(chunk.outputs)
        return chunk

    def close(self) -> None:
        """Ends the work on the job where it goes on."""
        self._reading.cancel()
        self._response.cancel()

    async def _read(self) -> None:
        try:
            async for chunk in self._response:
                self._put(chunk)
        except BackPressureError as error:
            self._queue.put_nowait(Failed(_queue_full(error)))
        except (RayError, RayServeException) as error:
            logger.warning("A replica ended with a job: %s.", type(error).__name__)
        except PrefixCacheError as error:
            self._queue.put_nowait(Failed(error))
        finally:
            self._response.cancel()
            self._queue.put_nowait(None)

    def _put(self, chunk: Chunk) -> None:
        if isinstance(chunk, Outputs):
            self._num_unread += len(chunk.outputs)
        if self._num_unread > self._most_unread:
            raise SlowReaderError(_TOO_SLOW)
        self._queue.put_nowait(chunk)


def _hashes(requests: Sequence[Request], root_hash: str, block_size: int) -> list[bytes]:
    """The state of the hashes of each prompt; requests of one prompt share it."""
    root, states = bytes.fromhex(root_hash), dict[int, bytes]()
    for request in requests:
        tokens = request.prompt_token_ids
        if id(tokens) not in states:
            hashes = BlockHashes.compute(tokens, root, block_size, cache_salt=request.cache.salt)
            states[id(tokens)] = hashes.state()
    return [states[id(request.prompt_token_ids)] for request in requests]


def _shifted(output: RequestOutput, seconds: float) -> RequestOutput:
    if output.started_at is None:
        return output
    return dataclasses.replace(output, started_at=output.started_at + seconds)


def _queue_full(error: BackPressureError) -> QueueFullError:
    return QueueFullError(f"The server is busy: {error.message}", retry_after=_RETRY_SECONDS)
