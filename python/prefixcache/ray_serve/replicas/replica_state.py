"""Commands, and what all replicas are like after them: plain data that pickles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """What all replicas are like after `number` commands, as the commands that make one so.

    `root_hash` is that of every replica: the same model, weights, types and blocks, and
    `weights_name` what it calls the weights; None until the first one has reported its own.
    """

    number: int = 0
    root_hash: str | None = None
    weights_name: str | None = None
    weights: Command | None = None
    size: Command | None = None
    sleep: tuple[Command, ...] = ()
    pause: Command | None = None

    def after(self, command: Command) -> ReplicaState:
        """The state when all have done a command."""
        return dataclasses.replace(self, number=self.number + 1, **self._changed(command))

    def named_by(self, done: Done) -> ReplicaState:
        """With the names of a replica that has done the last command."""
        return dataclasses.replace(self, root_hash=done.root_hash, weights_name=done.weights_name)

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
    """What a command returned, and the root hash and the weights' name after it."""

    result: Any
    root_hash: str
    weights_name: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The error that a command ended with; nothing has changed."""

    error: PrefixCacheError
