"""The deployment of engines: one in each replica's process, called with requests of the ingress."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from ray import serve

from prefixcache.exceptions import PrefixCacheError
from prefixcache.metrics import LabelledMetrics
from prefixcache.ray_serve.job import Accepted, Failed, Outputs, Part, RoutedJob, Stale
from prefixcache.request import Request
from prefixcache.server.limits import MAX_UNREAD_OUTPUTS

if TYPE_CHECKING:
    from prefixcache.config import EngineConfig
    from prefixcache.server.options import ServeOptions

# A replica that has less than this share of what it was chosen for says so instead of computing.
_LEAST_OF_EXPECTED = 0.5


class EngineReplica:
    """One engine. Ray Serve makes it, calls its methods, and replaces it when it dies."""

    def __init__(self, config: EngineConfig, options: ServeOptions) -> None:
        from prefixcache.engine.async_engine import AsyncEngine
        from prefixcache.engine.build import build
        from prefixcache.logs import set_up_logging

        set_up_logging(options.log_level, options.log_format, shows_prompts=options.log_prompts)
        self._id = serve.get_replica_context().replica_id.unique_id
        built = build(config)
        self._about = {
            "batch_invariant": built.batch_invariant,
            "dtype": built.dtype,
            "activations": built.activations,
            "max_model_len": built.max_model_len,
        }
        self._engine = AsyncEngine(
            built.engine,
            max_queue=options.max_queue or None,
            max_waiting_per_client=options.max_waiting_per_key,
        )
        self._metrics = LabelledMetrics(
            self._engine.metrics,
            prefix=options.metrics_prefix,
            model_name=options.served_model_name[0] if options.served_model_name else config.model,
            replica=self._id,
        )

    async def generate(self, job: RoutedJob) -> AsyncGenerator[Part, None]:
        """The answers of a job in parts: `Accepted`, then `Outputs`; or `Stale`, or `Failed`.

        Nothing of a job is computed before it is accepted. Closing the stream aborts it.
        """
        try:
            requests = _on_this_clock(job.requests)
            stale = self._stale(job, requests[0])
            if stale is not None:
                yield stale
                return
            outputs = await self._engine.generate_batches(
                requests, deadline=_deadline(job), max_unread=MAX_UNREAD_OUTPUTS
            )
            async with aclosing(outputs):
                yield Accepted(self._id)
                async for batch in outputs:
                    yield Outputs(batch, time.monotonic())
        except PrefixCacheError as error:
            yield Failed(error)

    def _stale(self, job: RoutedJob, first: Request) -> Stale | None:
        """Whether the job was sent here for a prefix most of which is gone."""
        expected = job.expected_hits.get(self._id, 0)
        if job.takes_stale or not expected:
            return None
        hit_tokens = self._engine.probe(first)
        if hit_tokens >= expected * _LEAST_OF_EXPECTED:
            return None
        return Stale(self._id, hit_tokens)

    async def probe(self, request: Request) -> int:
        """Tokens of the prompt that are cached now. Raises what `AsyncEngine.probe` does."""
        return self._engine.probe(request)

    async def about(self) -> dict[str, Any]:
        """What the ingress tells of the engines, and what must be the same of them all."""
        control = self._engine.control
        weights = control.weights_info()
        return {
            **self._about,
            "replica": self._id,
            "weights": None if weights is None else dataclasses.asdict(weights),
            "prefix_hash": dataclasses.asdict(control.prefix_hash_info()),
            "groups": control.groups,
            "num_blocks": control.num_blocks,
        }

    async def status(self) -> dict[str, Any]:
        """How busy the engine is, whether it computes, and its cache in numbers."""
        control, gauges = self._engine.control, self._engine.metrics.gauges()
        return {
            "replica": self._id,
            "running": gauges.num_running,
            "waiting": gauges.num_waiting,
            "is_paused": control.is_paused,
            "is_sleeping": control.is_sleeping,
            "prefix_cache": dataclasses.asdict(control.prefix_cache_stats()),
        }

    async def metrics(self) -> str:
        """The metrics as Prometheus reads them, with the label `replica`."""
        return generate_latest(self._metrics).decode()

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        if self._engine.dead is not None:
            raise self._engine.dead

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()


def _deadline(job: RoutedJob) -> float | None:
    return None if job.seconds_left is None else time.monotonic() + job.seconds_left


def _on_this_clock(requests: Sequence[Request]) -> list[Request]:
    """The requests, as if they came now: the ingress may be another machine."""
    now = time.monotonic()
    return [dataclasses.replace(request, arrival_time=now) for request in requests]
