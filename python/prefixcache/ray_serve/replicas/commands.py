"""The deployment that gives commands to all replicas in order, and its client in an ingress.

What a replica that starts later has to do is kept as a `ReplicaState`. Replicas have a copy of it,
so that it outlives the process of this deployment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from prefixcache.exceptions import EngineDeadError
from prefixcache.ray_serve.replicas.replica_set import ask_all
from prefixcache.ray_serve.replicas.replica_state import (
    UPDATE_WEIGHTS,
    Command,
    Done,
    Refused,
    ReplicaState,
    Served,
)

REPLICAS = "EngineReplica"
COMMANDS = "Commands"

# For replicas to be found, and to answer what takes no time.
_ASK_SECONDS = 10.0
# What replicas do between two steps, or read files for.
_BETWEEN_STEPS = frozenset({"check_weights", "do", "obey"})


# The state after a command, and what a replica says of it.
Outcome = tuple[ReplicaState, Done | Refused]


class Commands:
    """Gives commands to all replicas in order; there is one for all ingresses.

    Each replica does a command within `timeout` seconds, or is replaced.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._state: ReplicaState | None = None

    async def state(self, served: Served | None = None) -> ReplicaState:
        """What all replicas are like, once no command is in flight.

        The first replica that starts says what is `served`: the others are to serve the same.
        """
        async with self._lock:
            state = await self._known_state()
            if state.common is None and served is not None:
                self._state = state = state.served_by([served])
            return state

    async def run(self, command: Command) -> Outcome:
        """Lets every replica do the command; the state after it, and what the first of them says.

        Where all refuse it nothing has changed. A replica that fails alone, or is not done in time,
        is replaced: the one in its place starts with the command done.
        """
        async with self._lock:
            before = await self._known_state()
            if command.name != UPDATE_WEIGHTS:
                return await self._run(before, command)
            # Before any has changed.
            refused = _refusal(await self._ask("check_weights", command))
            if refused is not None:
                return before, refused
            return await self._run_paused(before, command)

    async def _run_paused(self, before: ReplicaState, command: Command) -> Outcome:
        """Nobody computes from before the first replica changes until the last one has."""
        await self._ask("do", Command("pause"))
        try:
            return await self._run(before, command)
        finally:
            if before.pause is None:
                await self._ask("do", Command("resume"))

    async def _run(self, before: ReplicaState, command: Command) -> Outcome:
        after = before.after(command)
        answers = await self._ask("obey", command, after)
        if not answers:
            raise EngineDeadError("No replica answers.")
        done = [answer for answer in answers if isinstance(answer, Done)]
        if not done:
            return before, _refusal(answers) or answers[0]
        self._state = after = after.served_by(answer.served for answer in done)
        await self._ask("agree", after)
        return after, done[0]

    async def _known_state(self) -> ReplicaState:
        """The newest state that anybody remembers; a command cut short is ended for all."""
        if self._state is not None:
            return self._state
        states = await self._ask("replica_state")
        state = max(states, key=lambda state: state.number, default=ReplicaState())
        if states:
            await self._ask("agree", state)
            if state.pause is None:
                await self._ask("do", Command("resume"))
        self._state = state
        return state

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """What the replicas say; those that died meanwhile are started again and join."""
        application = serve.get_replica_context().app_name
        replicas = cast(
            "DeploymentHandle[Any]",
            serve.get_deployment_handle(REPLICAS, application),  # pyright: ignore[reportUnknownMemberType]
        )
        # Replicas end commands themselves in time, but for those whose process hangs.
        seconds = _ASK_SECONDS + (self._timeout if method in _BETWEEN_STEPS else 0)
        return await ask_all(replicas, method, *args, seconds=seconds)


def _refusal(answers: Sequence[Any]) -> Refused | None:
    """The first of a replica that is not replaced anyway."""
    refused = (answer for answer in answers if isinstance(answer, Refused))
    return next(
        (refusal for refusal in refused if not isinstance(refusal.error, EngineDeadError)), None
    )


class CommandClient:
    """An ingress's side of `Commands`: sends them, and knows what replicas are like."""

    def __init__(self, commands: DeploymentHandle[Any], state: ReplicaState) -> None:
        self.state = state
        self._commands = commands

    async def give(self, name: str, **options: Any) -> Any:
        """What the command returns, once all replicas have done it. Raises what it raises."""
        try:
            state, answer = cast(
                "tuple[ReplicaState, Any]",
                await self._commands.run.remote(Command(name, options)),
            )
        except (RayError, RayServeException) as error:
            message = "Commands were cut off: ask for the state, and send it again if need be."
            raise EngineDeadError(message) from error
        self.learn(state)
        if isinstance(answer, Refused):
            raise answer.error
        return answer.result

    def learn(self, state: ReplicaState) -> None:
        """What replicas are like, if that is newer than what is known or of another processor."""
        if state.number > self.state.number:
            self.state = state
        elif state.number == self.state.number:
            self.state = self.state.with_roots(state.roots)
