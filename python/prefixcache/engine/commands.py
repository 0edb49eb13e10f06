"""What the commands of a running engine share: when they run, and the state that they change."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args

from prefixcache.config.checked import shown
from prefixcache.engine.weight_versions import WeightVersions
from prefixcache.exceptions import EngineHaltedError, InvalidRequestError, ModelLoadError
from prefixcache.runner.base import ModelMemory
from prefixcache.types.modes import SleepState, WeightsInfo

RunBetweenSteps = Callable[[Callable[[], Any]], Any]
"""Takes a call to the thread that runs the steps, and waits for it."""


class _Commands(Protocol):
    run_between_steps: RunBetweenSteps


C = TypeVar("C", bound=_Commands)
P = ParamSpec("P")
T = TypeVar("T")


def between_steps(command: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Lets `command` run between two steps, whichever thread calls it; the caller waits for it."""

    @wraps(command)
    def call(commands: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return commands.run_between_steps(partial(command, commands, *args, **kwargs))

    return call


def endpoint(path: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Lets administrators call the command by `POST path`, with its arguments as options.

    A result other than None is the answer, in JSON.
    """

    def mark(command: Callable[P, T]) -> Callable[P, T]:
        command.__dict__["endpoint_path"] = path
        return command

    return mark


class EngineState:
    """What holds an engine back, and its weights. Commands change it, between two steps.

    Without `memory` the engine can neither sleep nor change its weights. Any thread may read it.
    """

    def __init__(self, versions: WeightVersions, memory: ModelMemory | None) -> None:
        self.versions = versions
        self.is_paused = False
        self._memory = memory
        self._updated: set[str] | None = None

    @property
    def is_updating(self) -> bool:
        """Whether a weight update has begun and not ended."""
        return self._updated is not None

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV tensors are given up; true until both are back."""
        memory = self._memory
        return memory is not None and not (memory.has_kv and memory.weights.complete)

    @property
    def sleep_state(self) -> SleepState:
        """What `is_sleeping` comes from, in vLLM's words."""
        if self._memory is not None and not self._memory.weights.complete:
            return "discard_all"
        return "weights_offloaded" if self.is_sleeping else "awake"

    @property
    def is_halted(self) -> bool:
        """Whether nothing may be computed now."""
        return self.is_paused or self.is_updating or self.is_sleeping

    @property
    def memory(self) -> ModelMemory:
        """What may be given up or replaced. Raises `InvalidRequestError` where nothing may."""
        if self._memory is None:
            raise InvalidRequestError("This engine's model cannot be changed or given up.")
        return self._memory

    @property
    def weights_info(self) -> WeightsInfo | None:
        """How the weights are kept; None where that is not known."""
        return None if self._memory is None else self._memory.weights.info

    @property
    def updated(self) -> set[str]:
        """The weights that the open update has replaced. Raises `InvalidRequestError`."""
        if self._updated is None:
            raise InvalidRequestError("There is no weight update: begin_weight_update starts one.")
        return self._updated

    def pause(self) -> None:
        """Holds the engine back until `resume`."""
        self.is_paused = True

    def resume(self) -> None:
        """Ends a pause."""
        self.is_paused = False

    def open_update(self) -> None:
        """A weight update begins, of which nothing has come."""
        self._updated = set()

    def close_update(self) -> None:
        """It ends, if there is one."""
        self._updated = None

    def raise_if_sleeping(self) -> None:
        """Raises `EngineHaltedError` while the engine sleeps: it takes no requests then."""
        if self.is_sleeping:
            raise EngineHaltedError(
                "The engine is asleep and takes no requests until wake_up has brought back its "
                "weights and its KV cache.",
                code="engine_asleep",
            )

    def raise_if_halted(self) -> None:
        """Raises `EngineHaltedError` when requests would wait for a call that is still to come."""
        self.raise_if_sleeping()
        if self.is_halted:
            call = "resume" if self.is_paused else "end_weight_update"
            raise EngineHaltedError(f"The engine computes nothing until {call} is called.")

    def raise_if_updating(self) -> None:
        """Raises `InvalidRequestError` while an update is open."""
        if self.is_updating:
            raise InvalidRequestError("A weight update has begun; end_weight_update ends it.")


@contextmanager
def blaming(param: str, prefix: str = "") -> Generator[None, None, None]:
    """Weights that do not fit are the caller's mistake, in the argument `param`."""
    try:
        yield
    except ModelLoadError as error:
        raise InvalidRequestError(f"{prefix}{error}", param=param) from error


def check_choice(name: str, value: object, literal: object) -> None:
    """Raises `InvalidRequestError` unless the `Literal` has `value`; true is not 1."""
    choices = get_args(literal)
    if isinstance(value, bool) or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise InvalidRequestError(
            f"{name} must be one of {listed}, got {shown(value)}.", param=name
        )
