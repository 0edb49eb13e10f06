"""One job on its way through replicas: another one where a replica ends or has lost the prefix."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from prefixcache.core import BlockHashes
from prefixcache.exceptions import EngineDeadError, RequestTimeoutError
from prefixcache.ray_serve.fleet.commands import Orders
from prefixcache.ray_serve.job import Accepted, Failed, Outputs, Part, RoutedJob, Stale
from prefixcache.ray_serve.parts import Parts
from prefixcache.types.request import Request, RequestOutput

Batch = list[tuple[int, RequestOutput]]

# Replicas that a job is sent to, one after the other; the last one may have lost the prefix.
_MOST_TRIES = 4

_GONE = "The replicas that were to compute this answer ended. Send the request again."


class Answer:
    """The outputs of one job, whichever replicas compute them.

    A replica that dies is followed by another one, and what had come of unfinished requests is
    taken back by an output that is `restarted`. All must be there at `deadline`, in seconds of
    `time.monotonic`; `max_unread` bounds what waits for the reader, for each request.
    A replica must have done what `orders` know of; blocks have `block_size` tokens.
    """

    def __init__(
        self,
        generate: DeploymentHandle[Any],
        requests: Sequence[Request],
        *,
        orders: Orders,
        block_size: int,
        deadline: float | None,
        max_unread: int | None,
    ) -> None:
        self._generate = generate
        self._requests = requests
        self._orders = orders
        self._block_size = block_size
        self._job: RoutedJob | None = None
        self._deadline = deadline
        self._most_unread = math.inf if max_unread is None else max_unread * len(requests)
        self._open = dict.fromkeys(range(len(requests)))
        self._begun = set[int]()
        self._sent: list[int] = []
        self._actual_hits: dict[str, int] = {}
        self._num_tries = 0
        self._parts: Parts | None = None

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
                part = await self._next_part()
                if isinstance(part, Outputs):
                    yield self._noted(part)
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
            self._parts = Parts(self._generate, self._job, self._most_unread)
            part = await self._next_part()
            if isinstance(part, Accepted):
                self._orders.learn(part.state)
                return
            if isinstance(part, Stale):
                self._actual_hits[part.replica] = part.hit_tokens
        raise EngineDeadError(_GONE)

    def _new_job(self) -> RoutedJob:
        requests = [self._requests[index] for index in self._sent]
        return RoutedJob(
            requests=requests,
            hashes=_hashes(requests, self._orders.state.root_hash or "", self._block_size),
            seconds_left=self._seconds_left(),
            command_number=self._orders.state.number,
            actual_hits=dict(self._actual_hits),
            takes_stale=self._num_tries == _MOST_TRIES,
        )

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0)

    async def _next_part(self) -> Part | None:
        """None where the replica has ended. Raises `RequestTimeoutError`, and what it raises."""
        if self._parts is None:
            return None
        try:
            part = await asyncio.wait_for(self._parts.take(), self._seconds_left())
        except asyncio.TimeoutError:
            raise RequestTimeoutError() from None
        if not isinstance(part, Failed):
            return part
        if not isinstance(part.error, EngineDeadError):
            raise part.error
        return None

    def _noted(self, part: Outputs) -> Batch:
        """The outputs by the indices of all requests, on this machine's clock."""
        if self._job is not None and self._job.computed is not None:
            self._job.computed()
            self._job.computed = None
        shift = time.monotonic() - part.now
        batch = [(self._sent[index], _shifted(output, shift)) for index, output in part.outputs]
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
        if self._parts is not None:
            self._parts.close()
            self._parts = None


def _hashes(requests: Sequence[Request], root_hash: str, block_size: int) -> list[bytes]:
    """The state of the hashes of each prompt; requests of one prompt share it."""
    root, found = bytes.fromhex(root_hash), dict[int, bytes]()
    for request in requests:
        tokens = request.prompt_token_ids
        if id(tokens) not in found:
            hashes = BlockHashes.compute(tokens, root, block_size, cache_salt=request.cache.salt)
            found[id(tokens)] = hashes.state()
    return [found[id(request.prompt_token_ids)] for request in requests]


def _shifted(output: RequestOutput, seconds: float) -> RequestOutput:
    if output.started_at is None:
        return output
    return dataclasses.replace(output, started_at=output.started_at + seconds)
