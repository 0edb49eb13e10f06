"""An ingress's side of commands: it sends them, and knows what replicas are like."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from prefixcache.exceptions import EngineDeadError
from prefixcache.ray_serve.fleet.fleet_state import UPDATE_WEIGHTS, Command, FleetState, Refused

T = TypeVar("T")


class Orders:
    """Sends commands to the deployment `Commands`. Belongs to the event loop that made it."""

    def __init__(self, commands: DeploymentHandle[Any], state: FleetState) -> None:
        self.state = state
        self._commands = commands
        self._loop = asyncio.get_running_loop()

    async def give(self, command: Command) -> Any:
        """What the command returns, once all replicas have done it. Raises what it raises."""
        try:
            state, answer = await self._commands.run.remote(command)
        except (RayError, RayServeException) as error:
            message = "Commands were cut off: ask for the state, and send it again if need be."
            raise EngineDeadError(message) from error
        self.learn(state)
        if isinstance(answer, Refused):
            raise answer.error
        return answer.result

    def learn(self, state: FleetState) -> None:
        """What replicas are like, if that is newer than what is known."""
        if state.number > self.state.number:
            self.state = state

    async def update_weights(self, **options: Any) -> Any:
        """As `server.admin.update_weights`, of all replicas."""
        return await self.give(Command(UPDATE_WEIGHTS, options=options))

    async def run(self, operation: Callable[[Any], T]) -> T:
        """As `AsyncEngine.run`: the commands that `operation` calls are those of all replicas."""
        return await asyncio.to_thread(operation, _AllReplicas(self, self._loop))


class _AllReplicas:
    """Has the methods of a `Control`, which block until every replica is done."""

    def __init__(self, orders: Orders, loop: asyncio.AbstractEventLoop) -> None:
        self._orders = orders
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            given = self._orders.give(Command(name, args, options))
            return asyncio.run_coroutine_threadsafe(given, self._loop).result()

        return call
