"""What is known of all replicas, asked of them when somebody wants to know."""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle

from prefixcache.exceptions import EngineDeadError
from prefixcache.ray_serve.fleet.broadcast import ask_all
from prefixcache.ray_serve.fleet.merged_metrics import merged_metrics

# For a replica to say how it is; between steps it is free to.
_ASK_SECONDS = 10.0


class Fleet:
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
