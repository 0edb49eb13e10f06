"""What may be asked and changed of a running engine; changes always between two steps.

A command is one method of `Control`. `LLM.control` and `AsyncEngine.control` give it to callers as
it stands here, and `endpoint` gives it a path on the server.

Whoever changes something says what happens to the requests in flight, their `mode`:

- "keep": they go on with the blocks they hold, which nobody else can hit from then on. An answer
  that goes on under new weights mixes two versions; so does one that is preempted and restarts.
- "recompute": they give their blocks back and are computed again. Where the weights change, an
  answer restarts from its prompt, with the same seed, so that it is that of one version as a
  whole; tokens that were handed out are void (`RequestOutput.restarted`). Where the weights stay,
  its tokens stay too.
- "abort": they end, with `finish_reason` "abort".

When the weights change, a request that has a mode of its own (`CacheOptions.on_weight_update`)
follows that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import Lock
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from prefixcache.config.checked import shown
from prefixcache.config.engine_config import parse_memory
from prefixcache.engine.staged import StagedTensors
from prefixcache.engine.stats import PrefixCacheStats, PrefixHashInfo
from prefixcache.engine.weights_names import (
    Tags,
    check_tag,
    content_name,
    count_name,
    own_name,
    tag_name,
)
from prefixcache.engine.weights_push import DEFAULT_TIMEOUT, Chunk, WeightsPush
from prefixcache.exceptions import (
    EngineHaltedError,
    InvalidRequestError,
    ModelLoadError,
    OutOfMemoryError,
)
from prefixcache.kv.cache_manager import HASH_FORMAT, CacheManager, GroupKind
from prefixcache.kv.elastic import ElasticPool, ResizeStatus
from prefixcache.kv.events import CacheEvents
from prefixcache.metrics import block_counts
from prefixcache.models.checkpoint import Checkpoint
from prefixcache.models.hub import resolve_model
from prefixcache.models.weights import listed
from prefixcache.runner.base import ModelMemory, ModelWeights
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.scheduler.state import RequestProgress
from prefixcache.types.modes import InFlightMode, MemoryTag, SleepMode, WeightsInfo
from prefixcache.types.weight_spans import WeightLabel

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def between_steps(
    command: Callable[Concatenate[Control, P], T],
) -> Callable[Concatenate[Control, P], T]:
    """Lets `command` run between two steps, whichever thread calls it; the caller waits for it."""

    @wraps(command)
    def call(control: Control, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return control.run_between_steps(partial(command, control, *args, **kwargs))

    return call


def endpoint(path: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Lets administrators call the command by `POST path`, with its arguments as options.

    A result other than None is the answer, in JSON.
    """

    def mark(command: Callable[P, T]) -> Callable[P, T]:
        command.__dict__["endpoint_path"] = path
        return command

    return mark


class InFlightRequests(Protocol):
    """The part of `Engine` that commands need. Named here, since `Engine` imports this module."""

    def drain(self) -> None:
        """Waits until no step is in flight."""
        ...

    def abort_all(self) -> None:
        """Ends them."""
        ...

    def requeue_all(self) -> None:
        """Takes their blocks back; what they generated stays."""
        ...

    def restart_all(self) -> None:
        """Takes their blocks back and restarts their answers."""
        ...

    def change_weights(self, mode: InFlightMode) -> None:
        """Each keeps its blocks, restarts or ends, as it says itself, or else as `mode` does."""
        ...


class Control:
    """The commands, and what is known of the engine; any thread may use both.

    A command that is marked so runs between two steps and returns when it is done. Everything else
    runs during steps and waits for none: properties, statistics, looking for new weights. Wrong
    arguments, and commands that do not fit the engine's state, raise `InvalidRequestError`. Without
    `memory` the engine can neither sleep nor change its weights.

    `run_between_steps` takes a call to the thread that runs the steps; who runs them sets it.
    Without it that is the thread that calls.
    """

    def __init__(
        self,
        requests: InFlightRequests,
        scheduler: Scheduler,
        cache: CacheManager,
        memory: ModelMemory | None,
        pool: ElasticPool | None = None,
    ) -> None:
        self.run_between_steps: Callable[[Callable[[], Any]], Any] = lambda command: command()
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._memory = memory
        self._pool = pool
        self._slicing = Lock()  # else steps would wait for a slice of every caller
        self._paused = False
        self._updated: set[str] | None = None
        self._tags = Tags()
        self._label: WeightLabel = self.weight_version
        self.weights_push = WeightsPush(self.stage, self.replace_weights)

    @classmethod
    def endpoints(cls) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The paths of the commands that have one, and the commands, still without a control."""
        for name in dir(cls):
            command = getattr(cls, name)
            path = getattr(command, "endpoint_path", None)
            if path is not None:
                yield path, command

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
                "weights and its KV cache.",
                code="engine_asleep",
            )

    def raise_if_halted(self) -> None:
        """Raises `EngineHaltedError` when requests would wait for a call that is still to come."""
        self.raise_if_sleeping()
        if self.is_halted:
            call = "resume" if self._paused else "end_weight_update"
            raise EngineHaltedError(f"The engine computes nothing until {call} is called.")

    # The cache.

    def stats(self) -> dict[str, int]:
        """Lifetime counters of the cache, and blocks by state."""
        return self._cache.stats()

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """The prefix cache in numbers: counts of its lifetime, and the hit ratio of late."""
        scheduler, core = self._scheduler, self._cache.stats()
        counter = scheduler.admission.counter
        return PrefixCacheStats(
            enabled=scheduler.admission.enabled,
            queries=counter.queries,
            hits=counter.hits,
            queried_tokens=counter.queried_tokens,
            hit_tokens=counter.hit_tokens,
            disk_cached_tokens=0 if scheduler.loads is None else scheduler.loads.counts().tokens,
            recent_queries=counter.num_recent,
            recent_hit_ratio=counter.recent_ratio,
            window_missed_tokens=scheduler.admission.num_window_missed_tokens,
            preemptions=scheduler.num_preemptions,
            num_blocks=self._cache.num_blocks,
            blocks_in_use=core["blocks_in_use"],
            block_size=self._cache.block_size,
            weight_version=self.weight_version,
            is_sleeping=self.is_sleeping,
            is_paused=self.is_paused,
            memory=None if self._pool is None else self._pool.gauges(core["blocks_in_use"]),
            **block_counts(core),
        )

    def block_map(
        self, cells: int, age_bounds: Sequence[float]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """The pool in up to `cells` cells of neighbouring blocks.

        Blocks free, cached, pinned and held, shape (cells, 4); and blocks with content by the
        seconds since their last use, shape (cells, len(age_bounds) + 1), 0 where nobody listens.
        """
        return self._cache.block_map(cells, age_bounds)

    def progress(self, most: int) -> list[RequestProgress]:
        """How far up to `most` of the running requests are."""
        return self._scheduler.progress(most)

    def weights_info(self) -> WeightsInfo | None:
        """How the weights are kept; None where that is not known."""
        return None if self._memory is None else self._memory.weights.info

    @property
    def groups(self) -> tuple[GroupKind, ...]:
        """The kinds of attention that have block tables of their own."""
        return self._cache.groups

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._cache.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool now, the null block included."""
        return self._cache.num_blocks

    def prefix_hash_info(self) -> PrefixHashInfo:
        """What a client needs to compute the hashes of cached blocks."""
        return PrefixHashInfo(
            format=HASH_FORMAT,
            block_size=self._cache.block_size,
            root_hash=self._cache.root_hash.hex(),
            weights_name=self.weights_name,
            arithmetic=self._cache.arithmetic,
        )

    def keep_events(self) -> CacheEvents:
        """The cache's events from now on. Once, before the engine has had a request."""
        return self._cache.keep_events()

    @endpoint("/reset_prefix_cache")
    @between_steps
    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, in constant time.

        Running requests keep their blocks, and publish none that they hold now.
        """
        self._cache.reset()

    # Its size.

    @property
    def resize_status(self) -> ResizeStatus:
        """How far the last resize is."""
        return self._require_pool().status

    def resize(
        self, memory: str | float | None = None, num_blocks: int | None = None
    ) -> ResizeStatus:
        """Gives the KV cache another size, while requests are served; how far that is.

        `memory` is bytes, a size as "2GiB", or a share of what was free at the start; `num_blocks`
        counts the null block. A shrink keeps the blocks that are worth most and takes several
        slices between steps. Of several calls at once the last one to begin decides, and each
        returns the same. Blocks above the end that requests hold go as these end; while the
        engine sleeps all of it waits for `wake_up`. Raises `InvalidRequestError` for a size out of
        range, during an update of the weights, and where there is not as much memory.
        """
        pool = self._require_pool()
        wanted, param = _asked_blocks(pool, memory, num_blocks)
        self.run_between_steps(partial(self._begin_resize, pool, wanted, param))
        with self._slicing:
            self._do_slices(pool)
        return pool.status

    def adjust_pool(self, choose: Callable[[ElasticPool], None]) -> None:
        """Lets `choose` change what the pool may hold, and does what follows from it."""
        pool = self._require_pool()
        self.run_between_steps(partial(choose, pool))
        # Never waited for: whoever has it may wait for a lock that this thread holds.
        if self._slicing.acquire(blocking=False):
            try:
                self._do_slices(pool)
            finally:
                self._slicing.release()

    def _begin_resize(self, pool: ElasticPool, num_blocks: int, param: str) -> None:
        if self.is_updating:
            raise InvalidRequestError(
                f"{param} cannot change before end_weight_update has ended the open weight "
                f"update. Allowed then are {pool.sizes.describe()}.",
                param=param,
            )
        self._requests.drain()
        try:
            pool.resize(num_blocks)
        except OutOfMemoryError as error:
            raise InvalidRequestError(
                f"{param} asks for more than there is: {error}", param=param
            ) from error

    def _do_slices(self, pool: ElasticPool) -> None:
        """All that are left, with steps between them."""
        while self.run_between_steps(partial(self._advance, pool)):
            pass

    def _advance(self, pool: ElasticPool) -> bool:
        if not pool.has_slices:
            return False
        self._requests.drain()
        return pool.advance()

    # Pausing.

    @endpoint("/pause")
    @between_steps
    def pause(self, mode: InFlightMode = "keep") -> None:
        """Computes nothing until `resume`. Requests that come meanwhile wait."""
        _check_choice("mode", mode, InFlightMode)
        self._requests.drain()
        self._interrupt(mode)
        self._paused = True

    @endpoint("/resume")
    @between_steps
    def resume(self) -> None:
        """Goes on after `pause`; does nothing otherwise."""
        self._paused = False

    # Sleeping.

    @endpoint("/sleep")
    @between_steps
    def sleep(self, level: int = 1, mode: SleepMode = "recompute") -> None:
        """Gives the KV cache's memory back, at level 2 that of the weights too.

        Cached prefixes are forgotten. Requests in flight wait for the wake-up, or are aborted; at
        level 2, where other weights may come back, their answers restart.
        """
        _check_choice("level", level, Literal[1, 2])
        _check_choice("mode", mode, SleepMode)
        memory = self._require_memory()
        self._raise_if_updating()
        self._requests.drain()
        if level == 2:
            self._cache.new_weight_version(own_name(self.weights_name) or self._next_count())
            self._label = self.weight_version
            if mode == "abort":
                self._requests.abort_all()
            else:
                self._requests.restart_all()
            memory.weights.give_up()
        else:
            self._interrupt(mode)
            self._cache.reset()
        memory.give_up_kv()
        if self._pool is not None:
            self._pool.fall_asleep()
        memory.settle()

    @endpoint("/wake_up")
    @between_steps
    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Brings back what `sleep` gave up; does nothing otherwise.

        `tags` chooses "weights" or "kv_cache" alone; the engine sleeps on until both are there.
        Weights are read from the folder they came from last. Those that came as tensors are in no
        folder: the engine then waits for an update that gives them all. Raises `ModelLoadError` and
        `OutOfMemoryError`; the engine sleeps on then.
        """
        for tag in tags or ():
            _check_choice("tags", tag, MemoryTag)
        memory = self._require_memory()
        self._raise_if_updating()
        wanted = get_args(MemoryTag) if tags is None else tags
        try:
            if "weights" in wanted and not memory.weights.complete:
                self._reload(memory)
            if "kv_cache" in wanted and not memory.has_kv:
                if self._pool is not None:
                    self._pool.wake()
                memory.make_kv()
        finally:
            if self._pool is not None and not memory.has_kv:
                self._pool.fall_asleep()  # A resize waits on.
            memory.settle()

    # New weights.

    @property
    def weight_version(self) -> int:
        """Counts the changes of the weights; no number stands for two sets of weights."""
        return self._cache.weight_version

    @property
    def weight_label(self) -> WeightLabel:
        """What tokens are labelled with: the tag of the last update, or the version."""
        return self._label

    @property
    def weights_name(self) -> str:
        """What the root of all hashes calls the weights: where it is the same they are the same.

        A digest of their content or the tag of their update; where neither is known how often they
        were changed since something was.
        """
        return self._cache.weights_name

    def check_path(self, model_path: str, revision: str | None = None) -> Checkpoint:
        """A model whose weights `update_weights_from_folder` can take.

        Reads the weights for their digest, unless it is remembered.
        """
        with _blaming("model_path"):
            folder = resolve_model(model_path, revision)
            return self._require_memory().weights.check_folder(folder)

    def update_weights_from_disk(
        self,
        model_path: str,
        mode: InFlightMode = "recompute",
        *,
        revision: str | None = None,
        weight_version: str | None = None,
    ) -> int:
        """Replaces all weights by those of a folder, a GGUF file or a hub id; their new version.

        The files are found and checked while requests are served; only the reading is between two
        steps. When they are not of this very model nothing has changed. `weight_version` is a tag
        by which hashes call the weights in the place of their digest; one that weights of another
        digest had is refused.
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
        """Replaces all weights by those that `check_path` found; returns their version.

        Ends an update in chunks that is open. When the folder has changed since its check the
        old weights are put back, or the engine falls asleep where no folder holds them; it raises
        `ModelLoadError`. `weight_version` is that of `update_weights_from_disk`.
        """
        _check_choice("mode", mode, InFlightMode)
        check_tag(weight_version)
        memory = self._require_memory()
        if weight_version is not None:
            self._tags.check(weight_version, checkpoint.digest)
        self._requests.drain()
        with self._named_whatever_comes(memory):
            memory.weights.load(checkpoint)
            self._updated = None
            if weight_version is None:
                name = _content_name(memory.weights)
            else:
                self._tags.remember(weight_version, checkpoint.digest)
                name = tag_name(weight_version, memory.weights.quantized_digest)
            return self._new_weight_version(mode, name, weight_version)

    @between_steps
    def begin_weight_update(
        self, mode: InFlightMode = "recompute", *, weight_version: str | None = None
    ) -> None:
        """Computes nothing until `end_weight_update`; chunks of new weights come meanwhile.

        `weight_version` is a tag by which hashes call the weights at the end of the update. It is
        trusted: who gives it to other weights, here or to another replica, makes them hit.
        """
        _check_choice("mode", mode, InFlightMode)
        check_tag(weight_version)
        memory = self._require_memory()
        self._raise_if_updating()
        self._requests.drain()
        named = weight_version is not None
        quantized = memory.weights.requantized_digest
        name = tag_name(weight_version, quantized) if named else None
        self._new_weight_version(mode, name, weight_version)
        self._updated = set()

    @between_steps
    def update_weights(self, tensors: Mapping[str, Any]) -> None:
        """Replaces the named weights: names and shapes are the checkpoint's, types are converted.

        They are torch tensors or numpy arrays. One with a wrong name or shape is refused with its
        whole chunk.
        """
        weights, updated = self._require_memory().weights, self._require_update()
        with _blaming("weights"):
            updated |= weights.write(tensors)

    @between_steps
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

    @between_steps
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        mode: InFlightMode = "recompute",
        *,
        strict: bool = True,
        weight_version: str | None = None,
    ) -> int:
        """Replaces weights by those of a checkpoint in memory; returns their version.

        With `strict` all must be there. Everything is checked before the first one is replaced.
        What ends the call after that, as Ctrl-C, brings back the folder's weights; without one the
        engine sleeps until an update gives all. `weight_version` is that of `begin_weight_update`.
        """
        _check_choice("mode", mode, InFlightMode)
        check_tag(weight_version)
        memory = self._require_memory()
        weights = memory.weights
        self._raise_if_updating()
        with _blaming("state_dict"):
            weights.check_tensors(state_dict)
            if strict or not weights.complete:
                weights.check_all_named(state_dict)
        self._requests.drain()
        with self._named_whatever_comes(memory), _blaming("state_dict"):
            weights.replace(state_dict)
            name = weight_version and tag_name(weight_version, weights.requantized_digest)
            return self._new_weight_version(mode, name, weight_version)

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
        them, and names them where `full` is false, so that some keep their values. Returns their
        version.
        """
        return self.weights_push.receive(
            chunks, timeout, mode=mode, weight_version=weight_version, digest=digest, full=full
        )

    def stage(self) -> StagedTensors:
        """Memory for the tensors of an update. From any thread."""
        weights = self._require_memory().weights
        return StagedTensors(weights.check_tensors, weights.most_given_bytes)

    @between_steps
    def replace_weights(
        self,
        staged: StagedTensors,
        mode: InFlightMode = "recompute",
        *,
        digest: str | None = None,
        weight_version: str | None = None,
        full: bool = True,
    ) -> int:
        """Replaces the weights by staged ones, all or none; their version.

        `digest` is that of the tensors where they are all there are.
        """
        _check_choice("mode", mode, InFlightMode)
        memory = self._require_memory()
        self._raise_if_updating()
        weights = memory.weights
        with _blaming("full"):
            if full or not weights.complete:
                weights.check_all_named(staged.names)
        if weight_version is not None and digest is not None:
            self._tags.check(weight_version, digest)
        self._requests.drain()
        with self._named_whatever_comes(memory):
            with staged.open() as tensors, _blaming("chunk"):
                weights.replace(tensors)
            if digest is not None:
                name = content_name(digest, weights.requantized_digest)
            else:
                name = weight_version and tag_name(weight_version, weights.requantized_digest)
            if weight_version is not None and digest is not None:
                self._tags.remember(weight_version, digest)
            return self._new_weight_version(mode, name, weight_version)

    @contextmanager
    def _named_whatever_comes(self, memory: ModelMemory) -> Generator[None, None, None]:
        """Weights are replaced and named meanwhile; where that breaks off, those there get a name.

        Ctrl-C may come at any line: never are weights called by the name of others.
        """
        before = memory.weights.checkpoint
        try:
            yield
        except BaseException:
            self._rename_unless(memory, before)
            raise
        finally:
            memory.settle()

    def _reload(self, memory: ModelMemory) -> None:
        before = memory.weights.checkpoint
        if before is None:
            logger.warning(
                "No folder holds the weights: the engine sleeps until an update brings all."
            )
            return
        memory.weights.load(memory.weights.check_folder(before.folder))
        self._rename_unless(memory, before)

    def _rename_unless(self, memory: ModelMemory, before: Checkpoint | None) -> None:
        """Weights that are not surely those of `before` get a name of their own."""
        now = memory.weights.checkpoint
        if memory.weights.complete and not (now and before and now.digest == before.digest):
            self._new_weight_version("recompute", _content_name(memory.weights))

    def _new_weight_version(
        self, mode: InFlightMode, name: str | None, tag: str | None = None
    ) -> int:
        """From here on nothing computed before can be hit or registered, unless it may be stale.

        Without a `name` the weights are called by a count. `tag` labels the tokens they sample.
        """
        version = self._cache.next_weight_version(name or self._next_count())
        self._label = version if tag is None else tag
        self._requests.change_weights(mode)
        logger.info(
            "The weights' version is %d (%s); requests in flight: %s.",
            version,
            self.weights_name,
            mode,
        )
        return version

    def _next_count(self) -> str | None:
        return count_name(self.weights_name, self.weight_version + 1)

    def _interrupt(self, mode: InFlightMode) -> None:
        if mode == "recompute":
            self._requests.requeue_all()
        elif mode == "abort":
            self._requests.abort_all()

    def _require_memory(self) -> ModelMemory:
        if self._memory is None:
            raise InvalidRequestError("This engine's model cannot be changed or given up.")
        return self._memory

    def _require_pool(self) -> ElasticPool:
        if self._pool is None:
            raise InvalidRequestError("This engine's KV cache cannot be resized.")
        return self._pool

    def _require_update(self) -> set[str]:
        if self._updated is None:
            raise InvalidRequestError("There is no weight update: begin_weight_update starts one.")
        return self._updated

    def _raise_if_updating(self) -> None:
        if self.is_updating:
            raise InvalidRequestError("A weight update has begun; end_weight_update ends it.")


def _asked_blocks(
    pool: ElasticPool, memory: str | float | None, num_blocks: int | None
) -> tuple[int, str]:
    """The size that was asked for, in blocks, and by which argument.

    Raises `InvalidRequestError`.
    """
    if (memory is None) == (num_blocks is None):
        raise InvalidRequestError("Give either memory or num_blocks.", param="memory")
    if memory is None:
        _check_count("num_blocks", num_blocks)
        asked, param = cast("int", num_blocks), "num_blocks"
    else:
        try:
            asked, param = pool.sizes.blocks_of(parse_memory(memory)), "memory"
        except ValueError as error:
            raise InvalidRequestError(
                f"memory {error}, got {shown(memory)}; allowed are {pool.sizes.describe()}.",
                param="memory",
            ) from None
    pool.check(asked, param)
    return asked, param


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {shown(value)}.", param=name)


def _content_name(weights: ModelWeights) -> str | None:
    """The name of weights that a folder holds; None of others."""
    checkpoint = weights.checkpoint
    return checkpoint and content_name(checkpoint.digest, weights.quantized_digest)


@contextmanager
def _blaming(param: str) -> Generator[None, None, None]:
    """Weights that do not fit are the caller's mistake, in the argument `param`."""
    try:
        yield
    except ModelLoadError as error:
        raise InvalidRequestError(str(error), param=param) from error


def _check_choice(name: str, value: object, literal: object) -> None:
    """Raises `InvalidRequestError` unless the `Literal` has `value`; true is not 1."""
    choices = get_args(literal)
    if isinstance(value, bool) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise InvalidRequestError(f"{name} must be one of {known}, got {shown(value)}.", param=name)
