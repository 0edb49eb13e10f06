"""New weights for a running engine: from a folder, from tensors at once, or in chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from prefixcache.engine.commands import (
    EngineState,
    RunBetweenSteps,
    between_steps,
    blaming,
    check_choice,
)
from prefixcache.engine.steps import InFlightRequests
from prefixcache.engine.weight_versions import check_tag, content_name, tag_name
from prefixcache.engine.weights.staged import StagedTensors
from prefixcache.engine.weights.weights_push import DEFAULT_TIMEOUT, Chunk, WeightsPush
from prefixcache.exceptions import InvalidRequestError
from prefixcache.models.checkpoint import Checkpoint
from prefixcache.models.hub import resolve_model
from prefixcache.models.weights import listed
from prefixcache.runner.base import ModelWeights
from prefixcache.types.modes import InFlightMode

logger = logging.getLogger(__name__)


class WeightUpdates:
    """The ways to replace the weights; callers know them as methods of `Control`.

    `weight_version` is everywhere a tag by which hashes call the weights, or None. Each way returns
    the number of the new version.
    """

    def __init__(
        self, requests: InFlightRequests, state: EngineState, run_between_steps: RunBetweenSteps
    ) -> None:
        self.run_between_steps = run_between_steps
        self._requests = requests
        self._state = state
        self.push = WeightsPush(self._stage, self._replace_staged)

    def check_path(self, model_path: str, revision: str | None = None) -> Checkpoint:
        """A model whose weights `update_weights_from_folder` can take.

        Reads the weights for their digest, unless it is remembered.
        """
        with blaming("model_path"):
            folder = resolve_model(model_path, revision)
            return self._state.memory.weights.check_folder(folder)

    def update_weights_from_disk(
        self,
        model_path: str,
        mode: InFlightMode = "recompute",
        *,
        revision: str | None = None,
        weight_version: str | None = None,
    ) -> int:
        """Replaces all weights by those of a folder, a GGUF file or a hub id.

        The files are found and checked while requests are served; only the reading is between two
        steps. When they are not of this very model nothing has changed. `weight_version` takes the
        place of their digest in hashes; one that weights of another digest had is refused.
        """
        check_tag(weight_version)
        checkpoint = self.check_path(model_path, revision)
        return self.update_weights_from_folder(checkpoint, mode, weight_version=weight_version)

    @between_steps
    def update_weights_from_folder(
        self,
        checkpoint: Checkpoint,
        mode: InFlightMode = "recompute",
        *,
        weight_version: str | None = None,
    ) -> int:
        """Replaces all weights by those that `check_path` found.

        Ends an update in chunks that is open. When the folder has changed since its check the
        old weights are put back, or the engine falls asleep where no folder holds them; it raises
        `ModelLoadError`. `weight_version` is that of `update_weights_from_disk`.
        """
        weights = self._checked(mode, weight_version)

        def load() -> str | None:
            weights.load(checkpoint)
            self._state.close_update()
            if weight_version is not None:
                return tag_name(weight_version, weights.quantized_digest)
            return _content_name(weights)

        return self._replace(load, mode, weight_version, checkpoint.digest)

    @between_steps
    def begin_weight_update(
        self, mode: InFlightMode = "recompute", *, weight_version: str | None = None
    ) -> None:
        """Computes nothing until `end_weight_update`; chunks of new weights come meanwhile.

        `weight_version` is trusted: who gives it to other weights, here or to another replica,
        makes them hit.
        """
        weights = self._checked(mode, weight_version)
        self._state.raise_if_updating()
        self._requests.drain()
        name = tag_name(weight_version, weights.requantized_digest)
        self._begin_version(mode, name, weight_version)
        self._state.open_update()

    @between_steps
    def update_weights(self, tensors: Mapping[str, Any]) -> None:
        """Replaces the named weights: names and shapes are the checkpoint's, types are converted.

        They are torch tensors or numpy arrays. One with a wrong name or shape is refused with its
        whole chunk.
        """
        weights, updated = self._state.memory.weights, self._state.updated
        with blaming("weights"):
            updated |= weights.write(tensors)

    @between_steps
    def end_weight_update(self, *, full: bool = False) -> int:
        """Goes on with the new weights.

        With `full`, or when the old ones were given up, every weight must have been replaced; else
        the update stays open.
        """
        memory, updated = self._state.memory, self._state.updated
        if full:
            with blaming("weights"):
                memory.weights.check_all_named(updated)
        missing = memory.weights.missing()
        if missing:
            raise InvalidRequestError(f"The update lacks {listed(missing)}.", param="weights")
        self._state.close_update()
        memory.settle()
        return self._state.versions.number

    @between_steps
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        mode: InFlightMode = "recompute",
        *,
        strict: bool = True,
        weight_version: str | None = None,
    ) -> int:
        """Replaces weights by those of a checkpoint in memory.

        With `strict` all must be there. Everything is checked before the first one is replaced.
        What ends the call after that, as Ctrl-C, brings back the folder's weights; without one the
        engine sleeps until an update gives all. `weight_version` is that of `begin_weight_update`.
        """
        weights, tensors = self._checked(mode, weight_version), nullcontext(state_dict)
        self._state.raise_if_updating()
        with blaming("state_dict"):
            weights.check_tensors(state_dict)
            _check_all_named(weights, state_dict, full=strict)
            return self._replace_tensors(weights, tensors, mode, weight_version)

    def receive_weights(
        self,
        chunks: Chunk | Iterable[Chunk],
        mode: InFlightMode = "recompute",
        *,
        weight_version: str | None = None,
        digest: str | None = None,
        full: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> int:
        """Takes new weights in chunks while requests are served, then replaces the old ones.

        A chunk is a mapping from a checkpoint's names to arrays or torch tensors, or the bytes of a
        file of safetensors; one may come alone. All are replaced between two steps or none are:
        whatever fails, the chunks' own errors included, the old ones serve on. The weights' name in
        all hashes is that of their content, so that hits after a restart with them are sound;
        `digest`, as `weights_digest` gives it, is compared with what came. `weight_version` labels
        them, and names them where `full` is false, so that some keep their values.
        """
        return self.push.receive(
            chunks, timeout, mode=mode, weight_version=weight_version, digest=digest, full=full
        )

    def _stage(self) -> StagedTensors:
        """Memory for the tensors of an update. From any thread."""
        weights = self._state.memory.weights
        return StagedTensors(weights.check_tensors, weights.most_given_bytes)

    @between_steps
    def _replace_staged(
        self,
        staged: StagedTensors,
        mode: InFlightMode = "recompute",
        *,
        digest: str | None = None,
        weight_version: str | None = None,
        full: bool = True,
    ) -> int:
        """Replaces the weights by staged ones, whose `digest` is given where they are all."""
        weights = self._checked(mode, weight_version)
        self._state.raise_if_updating()
        with blaming("full"):
            _check_all_named(weights, staged.names, full=full)
        with blaming("chunk"):
            return self._replace_tensors(weights, staged.open(), mode, weight_version, digest)

    def reload(self) -> None:
        """Weights that were given up come from the folder that they came from last."""
        weights = self._state.memory.weights
        before = weights.checkpoint
        if before is None:
            logger.warning(
                "No folder holds the weights: the engine sleeps until an update brings all."
            )
            return
        weights.load(weights.check_folder(before.folder))
        self._rename_unless(before)

    def _checked(self, mode: InFlightMode, tag: str | None) -> ModelWeights:
        """The weights that an update of this kind may replace."""
        check_choice("mode", mode, InFlightMode)
        check_tag(tag)
        return self._state.memory.weights

    def _replace_tensors(
        self,
        weights: ModelWeights,
        tensors: AbstractContextManager[Mapping[str, Any]],
        mode: InFlightMode,
        tag: str | None,
        digest: str | None = None,
    ) -> int:
        def write() -> str | None:
            with tensors as given:
                weights.replace(given)
            quantized = weights.requantized_digest
            return tag_name(tag, quantized) if digest is None else content_name(digest, quantized)

        return self._replace(write, mode, tag, digest)

    def _replace(
        self,
        write: Callable[[], str | None],
        mode: InFlightMode,
        tag: str | None,
        digest: str | None,
    ) -> int:
        """Lets `write` replace the weights, and calls them by the name that it returns.

        Ctrl-C may come at any line: never are weights called by the name of others. Where it breaks
        off, those that are there then get a name of their own.
        """
        memory, versions = self._state.memory, self._state.versions
        versions.check(tag, digest)
        self._requests.drain()
        before = memory.weights.checkpoint
        try:
            return self._begin_version(mode, write(), tag, digest)
        except BaseException:
            self._rename_unless(before)
            raise
        finally:
            memory.settle()

    def _rename_unless(self, before: Checkpoint | None) -> None:
        """Weights that are not surely those of `before` get a name of their own."""
        weights = self._state.memory.weights
        now = weights.checkpoint
        if weights.complete and not (now and before and now.digest == before.digest):
            self._begin_version("recompute", _content_name(weights))

    def _begin_version(
        self,
        mode: InFlightMode,
        name: str | None,
        tag: str | None = None,
        digest: str | None = None,
    ) -> int:
        versions = self._state.versions
        number = versions.begin(name, tag, digest)
        self._requests.change_weights(mode)
        logger.info(
            "The weights' version is %d (%s); requests in flight: %s.", number, versions.name, mode
        )
        return number


def _check_all_named(weights: ModelWeights, names: Iterable[str], *, full: bool) -> None:
    """Raises `ModelLoadError` when a weight is missing that must come: with `full` all must."""
    if full or not weights.complete:
        weights.check_all_named(list(names))


def _content_name(weights: ModelWeights) -> str | None:
    """The name of weights that a folder holds; None of others."""
    checkpoint = weights.checkpoint
    return None if checkpoint is None else content_name(checkpoint.digest, weights.quantized_digest)
