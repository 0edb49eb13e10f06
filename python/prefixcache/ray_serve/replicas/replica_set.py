"""All replicas at once: what they say, and what becomes of their metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from prefixcache.exceptions import EngineDeadError

logger = logging.getLogger(__name__)

# For a replica to say how it is; between steps it is free to.
_ASK_SECONDS = 10.0


async def ask_all(
    replicas: DeploymentHandle[Any], method: str, *args: Any, seconds: float
) -> list[Any]:
    """What the replicas answer that do so within `seconds`; none where none runs.

    One that dies, hangs or fails is left out, and logged.
    """
    asked = replicas.broadcast(method, *args)  # pyright: ignore[reportUnknownMemberType]
    # Ray's way for event loops loses all answers where one is late.
    wait = partial(asked.results, timeout_s=seconds, return_exceptions=True)
    try:
        answers = await asyncio.to_thread(wait)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("No replica was asked for %s: %s.", method, type(error).__name__)
        return []
    for answer in answers:
        if isinstance(answer, BaseException):
            logger.warning("A replica did not answer %s: %s.", method, type(answer).__name__)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


class ReplicaSet:
    """Asks every replica behind a handle."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self._replicas = replicas

    async def about(self) -> list[dict[str, Any]]:
        """What each replica serves; see `EngineReplica.about`."""
        return await self._ask("about")

    async def statuses(self) -> list[dict[str, Any]]:
        """How each replica is; see `EngineReplica.status`. Raises `EngineDeadError` without any."""
        return await self._ask("status")

    async def metrics(self) -> str:
        """The metrics of all replicas, which their label `replica` tells apart."""
        return merged_metrics(await self._ask("metrics"))

    async def _ask(self, method: str) -> list[Any]:
        """What the replicas say that answer in time. Raises `EngineDeadError` where none does."""
        answers = await ask_all(self._replicas, method, seconds=_ASK_SECONDS)
        if not answers:
            raise EngineDeadError("No replica answers.")
        return answers


def merged_metrics(pages: Sequence[str]) -> str:
    """One page with all samples, in the order of the first page that has a family.

    Replicas tell theirs apart by a label.
    """
    families: dict[str, Metric] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(family.name, family)
            if merged is not family:
                merged.samples += family.samples
    return generate_latest(_Families(families.values())).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
