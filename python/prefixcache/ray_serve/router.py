"""Which replica a job goes to: Ray Serve asks, in the process of whoever holds the handle."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.utils import generate_request_id
from ray.serve.request_router import (
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from prefixcache.ray_serve.job import RoutedJob

logger = logging.getLogger(__name__)

# For a replica to say what it has cached; one that takes longer counts as empty.
_PROBE_SECONDS = 1.0


class PrefixRequestRouter(RequestRouter):
    """Sends a job to the replica with the longest prefix, unless that is too far behind.

    Calls that are no jobs go to the replica with the fewest requests.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called once by Ray Serve, with `request_router_kwargs`."""
        self._running: Counter[str] = Counter()

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
        job = pending_request.args[0] if pending_request.args else None
        if not isinstance(job, RoutedJob):
            return [candidate_replicas]
        hits = await self._hits(candidate_replicas, pending_request, job)
        order = sorted(candidate_replicas, key=lambda one: self._cost(one, hits, job))
        best = order[0].replica_id.unique_id
        job.expected_hits = {best: hits[best]}
        return [[replica] for replica in order]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: Any,  # noqa: ARG002
    ) -> None:
        """Counts what each replica was sent from here."""
        if pending_request.metadata.call_method == "generate":
            self._running[replica_id.unique_id] += 1

    def _cost(self, replica: RunningReplica, hits: dict[str, int], job: RoutedJob) -> float:
        name = replica.replica_id.unique_id
        queued = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return job.num_prompt_tokens - hits[name] + 64 * queued

    async def _hits(
        self, replicas: list[RunningReplica], pending: PendingRequest, job: RoutedJob
    ) -> dict[str, int]:
        """Tokens of the prompt that each replica has cached."""
        found = await asyncio.gather(*(self._probe(one, pending, job) for one in replicas))
        names = [replica.replica_id.unique_id for replica in replicas]
        return dict(zip(names, found, strict=True)) | dict(job.actual_hits)

    async def _probe(self, replica: RunningReplica, pending: PendingRequest, job: RoutedJob) -> int:
        if not job.requests[0].cache.read or replica.replica_id.unique_id in job.actual_hits:
            return 0
        call = PendingRequest(
            args=[job.requests[0]],
            kwargs={},
            metadata=dataclasses.replace(
                pending.metadata,
                call_method="probe",
                is_streaming=False,
                internal_request_id=generate_request_id(),
            ),
        )
        call.resolved = True
        try:
            result = replica.try_send_request(call, with_rejection=False)
            return await asyncio.wait_for(result.get_async(), _PROBE_SECONDS)
        except Exception as error:  # noqa: BLE001 - the replica may have died; the job goes on
            logger.debug("%s did not answer a probe: %r", replica.replica_id, type(error))
            return 0
