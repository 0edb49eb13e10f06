"""What may be changed about a running engine: always between two steps, never beside one.

Callers on other threads reach these through `AsyncEngine`'s queue, so that the loop needs no lock.

Whoever changes something says what happens to the requests in flight, their `mode`:

- "keep": they go on with the blocks they hold, which nobody else can hit from then on. An answer
  that goes on under new weights mixes two versions; so does one that is preempted and restarts.
- "recompute": they give their blocks back and are computed again. Where the weights change, an
  answer begins anew from its prompt, with the same seed, so that it is that of one version as a
  whole; tokens that were handed out are void (`RequestOutput.restarted`). Where the weights stay,
  its tokens stay too.
- "abort": they end, with `finish_reason` "abort".
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, get_args

from torch import Tensor

from prefixcache.engine.memory import Memory
from prefixcache.engine.modes import InFlightMode, MemoryTag, SleepMode
from prefixcache.exceptions import EngineHaltedError, InvalidRequestError, ModelLoadError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.models.hub import resolve_model
from prefixcache.models.weights import listed

logger = logging.getLogger(__name__)

MODES: tuple[InFlightMode, ...] = get_args(InFlightMode)
SLEEP_MODES: tuple[SleepMode, ...] = get_args(SleepMode)
TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
LEVELS = (1, 2)


class InFlightRequests(Protocol):
    """What is done to the requests in flight; `Engine` does it."""

    def drain(self) -> None:
        """Waits until no step is under way."""
        ...

    def abort_all(self) -> None:
        """Ends them."""
        ...

    def requeue_all(self) -> None:
        """Takes their blocks back; what they generated stays."""
        ...

    def restart_all(self) -> None:
        """Takes their blocks back and lets their answers begin anew."""
        ...


class Control:
    """Operations on the engine's parts; the thread that runs the loop calls them.

    Only `check_path` and the properties may be used from another thread. Wrong arguments, and
    operations that do not fit the engine's state, raise `InvalidRequestError`. Without `memory` the
    engine can neither sleep nor change its weights.
    """

    def __init__(
        self, requests: InFlightRequests, cache: CacheManager, memory: Memory | None
    ) -> None:
        self._requests = requests
        self._cache = cache
        self._memory = memory
        self._paused = False
        self._updated: set[str] | None = None

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the requests back."""
        return self._paused

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
    def is_halted(self) -> bool:
        """Whether nothing may be computed now."""
        return self._paused or self.is_updating or self.is_sleeping

    def raise_if_sleeping(self) -> None:
        """Raises `EngineHaltedError` while the engine sleeps: it takes no requests then."""
        if self.is_sleeping:
            raise EngineHaltedError(
                "The engine is asleep and takes no requests until wake_up has brought back its "
                "weights and its KV cache."
            )

    def raise_if_halted(self) -> None:
        """Raises `EngineHaltedError` when requests would wait for a call that is still to come."""
        self.raise_if_sleeping()
        if self.is_halted:
            call = "resume" if self._paused else "end_weight_update"
            raise EngineHaltedError(f"The engine computes nothing until {call} is called.")

    # The cache.

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, in constant time.

        Running requests keep their blocks, and publish none that they hold now.
        """
        self._cache.reset()

    # Pausing.

    def pause(self, mode: InFlightMode = "keep") -> None:
        """Computes nothing until `resume`. Requests that come meanwhile wait."""
        _check_choice("mode", mode, MODES)
        self._requests.drain()
        self._interrupt(mode)
        self._paused = True

    def resume(self) -> None:
        """Goes on after `pause`; does nothing otherwise."""
        self._paused = False

    # Sleeping.

    def sleep(self, level: int = 1, mode: SleepMode = "recompute") -> None:
        """Gives the KV cache's memory back, at level 2 that of the weights too.

        Cached prefixes are forgotten. Requests in flight wait for the wake-up, or are aborted; at
        level 2, where other weights may come back, their answers begin anew.
        """
        _check_choice("level", level, LEVELS)
        _check_choice("mode", mode, SLEEP_MODES)
        memory = self._require_memory()
        self._raise_if_updating()
        self._requests.drain()
        if level == 2:
            self._new_weight_version(mode)
            memory.weights.give_up()
        else:
            self._interrupt(mode)
            self._cache.reset()
        memory.give_up_kv()
        memory.settle()

    def wake_up(self, tags: Collection[MemoryTag] | None = None) -> None:
        """Brings back what `sleep` gave up; does nothing otherwise.

        `tags` chooses "weights" or "kv_cache" alone; the engine sleeps on until both are there.
        Weights are read from the folder they came from last. Those that came as tensors are in no
        folder: the engine then waits for an update that gives them all. Raises `ModelLoadError` and
        `OutOfMemoryError`; the engine sleeps on then.
        """
        for tag in tags or ():
            _check_choice("tags", tag, TAGS)
        memory = self._require_memory()
        self._raise_if_updating()
        wanted = TAGS if tags is None else tags
        try:
            if "weights" in wanted and not memory.weights.complete:
                _reload(memory)
            if "kv_cache" in wanted and not memory.has_kv:
                memory.make_kv()
        finally:
            memory.settle()

    # New weights.

    @property
    def weight_version(self) -> int:
        """Counts the changes of the weights; no number stands for two sets of weights."""
        return self._cache.weight_version

    def check_path(self, model_path: str, revision: str | None = None) -> Path:
        """The folder of a model whose weights `update_weights_from_folder` can take.

        Reads all but the weights themselves. From any thread.
        """
        with _blaming("model_path"):
            folder = resolve_model(model_path, revision)
            self._require_memory().weights.check_folder(folder)
        return folder

    def update_weights_from_folder(self, folder: Path, mode: InFlightMode = "recompute") -> int:
        """Replaces all weights by those of a folder that `check_path` gave; returns their version.

        Ends an update in chunks that is under way. When the folder has changed since its check the
        old weights are put back, or the engine falls asleep where no folder holds them; it raises
        `ModelLoadError`.
        """
        _check_choice("mode", mode, MODES)
        memory = self._require_memory()
        self._requests.drain()
        try:
            memory.weights.load(folder)
        finally:
            memory.settle()
        self._updated = None
        return self._new_weight_version(mode)

    def begin_weight_update(self, mode: InFlightMode = "recompute") -> None:
        """Computes nothing until `end_weight_update`; chunks of new weights come meanwhile."""
        _check_choice("mode", mode, MODES)
        self._require_memory()
        self._raise_if_updating()
        self._requests.drain()
        self._new_weight_version(mode)
        self._updated = set()

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the named weights: names and shapes are the checkpoint's, types are converted.

        A tensor with a wrong name or shape is refused together with its whole chunk.
        """
        weights, updated = self._require_memory().weights, self._require_update()
        with _blaming("weights"):
            updated |= weights.write(tensors)

    def end_weight_update(self, *, full: bool = False) -> int:
        """Goes on with the new weights; returns their version.

        With `full`, or when the old ones were given up, every weight must have been replaced; else
        the update stays open.
        """
        memory, updated = self._require_memory(), self._require_update()
        if full:
            with _blaming("weights"):
                memory.weights.check_all_named(updated)
        missing = memory.weights.missing()
        if missing:
            raise InvalidRequestError(f"The update lacks {listed(missing)}.", param="weights")
        self._updated = None
        memory.settle()
        return self.weight_version

    def load_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        mode: InFlightMode = "recompute",
        *,
        strict: bool = True,
    ) -> int:
        """Replaces weights by those of a checkpoint in memory; returns their version.

        With `strict` all must be there. Everything is checked before the first one is replaced.
        """
        _check_choice("mode", mode, MODES)
        weights = self._require_memory().weights
        self._raise_if_updating()
        with _blaming("state_dict"):
            weights.check_tensors(state_dict)
            if strict or not weights.complete:
                weights.check_all_named(state_dict)
        self.begin_weight_update(mode)
        self.update_weights(state_dict)
        return self.end_weight_update()

    def _new_weight_version(self, mode: InFlightMode) -> int:
        """From here on nothing computed before can be hit or registered."""
        version = self._cache.new_weight_version()
        if mode == "recompute":
            self._requests.restart_all()
        elif mode == "abort":
            self._requests.abort_all()
        logger.info("The weights' version is %d; requests in flight: %s.", version, mode)
        return version

    def _interrupt(self, mode: InFlightMode) -> None:
        if mode == "recompute":
            self._requests.requeue_all()
        elif mode == "abort":
            self._requests.abort_all()

    def _require_memory(self) -> Memory:
        if self._memory is None:
            raise InvalidRequestError("This engine's model cannot be changed or given up.")
        return self._memory

    def _require_update(self) -> set[str]:
        if self._updated is None:
            raise InvalidRequestError("There is no weight update: begin_weight_update starts one.")
        return self._updated

    def _raise_if_updating(self) -> None:
        if self.is_updating:
            raise InvalidRequestError("A weight update has begun; end_weight_update ends it.")


def _reload(memory: Memory) -> None:
    folder = memory.weights.folder
    if folder is None:
        logger.warning("No folder holds the weights: the engine sleeps until an update brings all.")
        return
    memory.weights.load(folder)


@contextmanager
def _blaming(param: str) -> Generator[None, None, None]:
    """Weights that do not fit are the caller's mistake, in the argument `param`."""
    try:
        yield
    except ModelLoadError as error:
        raise InvalidRequestError(str(error), param=param) from error


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises `InvalidRequestError` unless `value` is one of `choices`; true is not 1."""
    if isinstance(value, bool) or value not in choices:
        shown = ", ".join(map(repr, choices))
        raise InvalidRequestError(f"{name} must be one of {shown}, got {value!r}.", param=name)
