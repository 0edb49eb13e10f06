"""What is known of all replicas, asked of them when somebody wants to know."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from prefixcache.exceptions import EngineDeadError
from prefixcache.ray_serve.merged_metrics import merged_metrics

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
        asked = self._replicas.broadcast(method)
        try:
            found = await asked.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineDeadError(f"No replica answers ({type(error).__name__}).") from error
        answers = [one for one in found if not isinstance(one, BaseException)]
        if not answers:
            raise EngineDeadError("No replica answers.")
        return answers
