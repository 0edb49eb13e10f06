"""Commands, and what all replicas are like after them: plain data that pickles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prefixcache.exceptions import PrefixCacheError

# `server.admin.update_weights`, whose arguments are options.
UPDATE_WEIGHTS = "update_weights"


@dataclass(frozen=True, slots=True)
class Command:
    """A method of `engine.control.Control` and its arguments."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Served:
    """What a replica computes.

    All replicas are to have the same `common`: weights, model and types. The root hash of its
    blocks also depends on its `arithmetic`, which names its processor's instructions and its
    activations.
    """

    common: str
    arithmetic: str
    root_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """What all replicas are like after `number` commands, as the commands that make one so.

    `common` is that of every `Served`, None until the first replica has reported its own. `roots`
    are the root hashes of those that are known, by their arithmetic.
    """

    number: int = 0
    common: str | None = None
    roots: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    weights: Command | None = None
    size: Command | None = None
    sleep: tuple[Command, ...] = ()
    pause: Command | None = None

    def after(self, command: Command) -> ReplicaState:
        """The state when all have done a command."""
        return dataclasses.replace(self, number=self.number + 1, **self._changed(command))

    def served_by(self, served: Iterable[Served]) -> ReplicaState:
        """As replicas that have done the last command report it, the first one above all."""
        first, *_ = served = [*served]
        roots = {replica.arithmetic: replica.root_hash for replica in served}
        return dataclasses.replace(self, common=first.common, roots=roots)

    def with_roots(self, roots: Mapping[str, str]) -> ReplicaState:
        """With root hashes of replicas that started since."""
        return dataclasses.replace(self, roots={**roots, **self.roots})

    def _changed(self, command: Command) -> dict[str, Any]:
        if command.name == UPDATE_WEIGHTS:
            return {"weights": command}
        if command.name == "resize":
            return {"size": command}
        if command.name == "sleep" or (command.name == "wake_up" and command.options.get("tags")):
            return {"sleep": (*self.sleep, command)}
        if command.name == "wake_up":
            return {"sleep": ()}
        if command.name in ("pause", "resume"):
            return {"pause": command if command.name == "pause" else None}
        return {}

    def commands(self) -> list[Command]:
        """What brings a replica that has just started to this state."""
        given = (self.weights, self.size, *self.sleep, self.pause)
        return [command for command in given if command is not None]


@dataclass(frozen=True, slots=True)
class Done:
    """What a command returned, and what the replica computes after it."""

    result: Any
    served: Served


@dataclass(frozen=True, slots=True)
class Refused:
    """The error that a command ended with; nothing has changed."""

    error: PrefixCacheError
