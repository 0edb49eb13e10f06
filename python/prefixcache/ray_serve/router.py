"""Which replica a job goes to: Ray Serve asks, in the process of whoever holds the handle."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from prefixcache.events.config import is_local_endpoint
from prefixcache.ray_serve.job import RoutedJob
from prefixcache.ray_serve.known_caches import KnownCaches
from prefixcache.ray_serve.ray_internals import ReplicaID, direct_call
from prefixcache.ray_serve.replicas.replica_state import Refused
from prefixcache.routing import Choice, PrefixRouting, Routed
from prefixcache.types.request import Request

logger = logging.getLogger(__name__)

# For a replica to say what it has cached; one that takes longer counts as empty.
_PROBE_SECONDS = 1.0
# A request that another process has sent to a replica, in tokens to compute.
_REQUEST_TOKENS = 64.0
_SNAPSHOT_SECONDS = 30.0
_EVENT_SECONDS = 0.05
_NO_HASHES = np.zeros(0, np.uint64)


class PrefixRequestRouter(RequestRouter):
    """Sends a job to the replica with the longest prefix, unless that is too far behind.

    Calls that are no jobs go to the replica with the fewest requests.
    """

    def initialize_state(self, block_size: int = 16, **_: Any) -> None:
        """Called once by Ray Serve, with `request_router_kwargs`: tokens of a block."""
        self._routing = PrefixRouting(block_size=block_size)
        self._caches = KnownCaches(self._routing)
        self._routed: dict[str, Routed] = {}
        # What each replica computes with: hashes of its blocks begin at a root of their own.
        self._arithmetic: dict[str, str] = {}
        # Calls in flight that are no jobs; Ray counts them as requests of a replica.
        self._asked = Counter[str]()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when there are other replicas than before."""
        super().update_replicas(replicas)
        names = {_name(replica) for replica in replicas}
        for name in set(self._routing.replicas) - names:
            self._caches.forget(name)
            self._routing.remove(name)
            self._arithmetic.pop(name, None)
        for replica in replicas:
            self._routing.add(_name(replica))
            self._arithmetic[_name(replica)] = replica.replica_metadata.get("arithmetic", "")
            self._read_events(replica)

    def _read_events(self, replica: RunningReplica) -> None:
        """Begins to read what a replica stores and loses, if that can be read from here."""
        endpoints = replica.replica_metadata.get("kv_events")
        here = ray.get_runtime_context().get_node_id() == replica.node_id
        if endpoints and (here or not is_local_endpoint(endpoints["endpoint"])):
            loop = self._event_loop

            def snapshot() -> list[bytes]:
                asked = self._call(replica, "kv_snapshot", _SNAPSHOT_SECONDS)
                return asyncio.run_coroutine_threadsafe(asked, loop).result()

            self._caches.read(_name(replica), endpoints, snapshot)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas from the best to the last, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        # Without it Ray asks again at once, for ever, where no replica takes the request.
        pending_request.routing_context.should_backoff = True
        job = _job_of(pending_request)
        if job is None:
            return [candidate_replicas]
        return [[replica] for replica in await self._ordered(candidate_replicas, job)]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: Any,  # noqa: ARG002
    ) -> None:
        """Called by Ray Serve: the job's blocks count as cached there until they are computed."""
        job, name = _job_of(pending_request), replica_id.unique_id
        if job is None or name not in self._routing.replicas:
            return
        choice = Choice(name, job.expected_hits.get(name, 0))
        hashes = job.short_hashes().get(self._arithmetic.get(name, ""), _NO_HASHES)
        routed = self._routing.route(choice, hashes, job.num_prompt_tokens)
        self._routed[pending_request.metadata.internal_request_id] = routed
        loop = self._event_loop

        def settle() -> None:
            # The events that tell of the blocks come a moment after the first token.
            loop.call_later(_EVENT_SECONDS, self._routing.settle, routed)

        job.computed = lambda: loop.call_soon_threadsafe(settle)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve when a request has ended, however it did."""
        del replica_id
        routed = self._routed.pop(internal_request_id, None)
        if routed is not None:
            self._routing.settle(routed)

    async def _ordered(
        self, replicas: Sequence[RunningReplica], job: RoutedJob
    ) -> list[RunningReplica]:
        hits = await self._hits(replicas, job)
        by_name = {_name(replica): replica for replica in replicas}
        choices = self._routing.choose(
            [*job.short_hashes().values()] or _NO_HASHES,
            job.num_prompt_tokens,
            self._loads(replicas),
            hit_tokens=hits,
            key=job.requests[0].affinity,
        )
        job.expected_hits = {choice.replica: choice.hit_tokens for choice in choices[:1]}
        return [by_name[choice.replica] for choice in choices]

    def _loads(self, replicas: Sequence[RunningReplica]) -> dict[str, float]:
        """What each was sent from elsewhere, in tokens."""
        own = Counter(routed.replica for routed in self._routed.values()) + self._asked
        return {
            _name(replica): max(self._queue_length(replica) - own[_name(replica)], 0)
            * _REQUEST_TOKENS
            for replica in replicas
        }

    def _queue_length(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    async def _hits(self, replicas: Sequence[RunningReplica], job: RoutedJob) -> dict[str, int]:
        """Tokens of the prompt that are cached by replicas whose events do not tell.

        Blocks under a salt are in no event, and a replica that started now may have hashes of an
        arithmetic that the job does not know.
        """
        request = job.requests[0]
        if not request.cache.read:
            return dict.fromkeys(map(_name, replicas), 0)
        tells = request.cache.salt is None
        asked = [
            replica
            for replica in replicas
            if _name(replica) not in job.actual_hits
            and not (tells and self._knows(_name(replica), job))
        ]
        hits = await asyncio.gather(*(self._probe(replica, request) for replica in asked))
        return dict(zip(map(_name, asked), hits, strict=True)) | dict(job.actual_hits)

    def _knows(self, name: str, job: RoutedJob) -> bool:
        return self._arithmetic.get(name) in job.hashes and self._caches.knows(name)

    async def _probe(self, replica: RunningReplica, request: Request) -> int:
        try:
            hits = await self._call(replica, "probe_all", _PROBE_SECONDS, [request])
            return 0 if isinstance(hits, Refused) else hits[0]
        except Exception as error:  # noqa: BLE001 - it may have died, or sleep; the job goes on
            logger.debug("%s did not answer a probe: %s", _name(replica), type(error).__name__)
            return 0

    async def _call(self, replica: RunningReplica, method: str, seconds: float, *args: Any) -> Any:
        """What a method of this very replica returns. Raises what it raises, and `TimeoutError`."""
        self._asked[_name(replica)] += 1
        try:
            result: Any = replica.try_send_request(direct_call(method, *args), with_rejection=False)
            return await asyncio.wait_for(result.get_async(), seconds)
        finally:
            self._asked[_name(replica)] -= 1


def _name(replica: RunningReplica) -> str:
    return replica.replica_id.unique_id


def _job_of(pending: PendingRequest) -> RoutedJob | None:
    job = pending.args[0] if pending.args else None
    return job if isinstance(job, RoutedJob) else None
