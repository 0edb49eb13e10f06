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

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

from prefixcache.engine.commands import (
    EngineState,
    RunBetweenSteps,
    between_steps,
    check_choice,
    endpoint,
)
from prefixcache.engine.sizing.resizing import Resizing
from prefixcache.engine.stats import PrefixCacheStats, PrefixHashInfo
from prefixcache.engine.steps import InFlightRequests
from prefixcache.engine.weights.weight_updates import WeightUpdates
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_settings import HASH_FORMAT
from prefixcache.kv.elastic import ElasticPool, ResizeStatus
from prefixcache.metrics import block_counts
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.modes import InFlightMode, MemoryTag, SleepMode, WeightsInfo


def at_once(command: Callable[[], Any]) -> Any:
    """Runs a command in the thread that calls, which is the one that runs the steps."""
    return command()


class Control:
    """The commands, and what is known of the engine; any thread may use both.

    A command that is marked so runs between two steps and returns when it is done. Everything else
    runs during steps and waits for none: properties, statistics, looking for new weights. Wrong
    arguments, and commands that do not fit the engine's state, raise `InvalidRequestError`.

    `run_between_steps` takes a call to the thread that runs the steps. Methods that are somebody
    else's are attributes here.
    """

    def __init__(
        self,
        requests: InFlightRequests,
        scheduler: Scheduler,
        cache: CacheManager,
        state: EngineState,
        pool: ElasticPool | None = None,
        run_between_steps: RunBetweenSteps = at_once,
    ) -> None:
        self.run_between_steps = run_between_steps
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._state = state
        self._pool = pool
        self.raise_if_sleeping = state.raise_if_sleeping
        self.raise_if_halted = state.raise_if_halted
        self.groups, self.block_size = cache.groups, cache.block_size
        self.stats, self.block_map = cache.core.stats, cache.core.block_map
        self.keep_events = cache.reader.keep_events
        self.progress = scheduler.progress
        self._resizing = Resizing(requests, state, pool, run_between_steps)
        self.resize, self.adjust_pool = self._resizing.resize, self._resizing.adjust_pool
        self.weights = weights = WeightUpdates(requests, state, run_between_steps)
        self.update_weights_from_disk = weights.update_weights_from_disk
        self.begin_weight_update = weights.begin_weight_update
        self.update_weights = weights.update_weights
        self.end_weight_update = weights.end_weight_update
        self.load_state_dict = weights.load_state_dict
        self.receive_weights, self.weights_push = weights.receive_weights, weights.push

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
        return self._state.is_paused

    @property
    def is_updating(self) -> bool:
        """Whether a weight update has begun and not ended."""
        return self._state.is_updating

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV tensors are given up; true until both are back."""
        return self._state.is_sleeping

    @property
    def is_halted(self) -> bool:
        """Whether nothing may be computed now."""
        return self._state.is_halted

    @property
    def weight_version(self) -> int:
        """Counts the changes of the weights; no number stands for two sets of weights."""
        return self._state.versions.number

    @property
    def weights_name(self) -> str:
        """What the root of all hashes calls the weights: see `WeightVersions.name`."""
        return self._state.versions.name

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool now, the null block included."""
        return self._cache.size.num_blocks

    @property
    def resize_status(self) -> ResizeStatus:
        """How far the last resize is."""
        return self._resizing.pool.status

    def weights_info(self) -> WeightsInfo | None:
        """How the weights are kept; None where that is not known."""
        return self._state.weights_info

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """The prefix cache in numbers: counts of its lifetime, and the hit ratio of late."""
        scheduler, core = self._scheduler, self._cache.core.stats()
        counter = scheduler.admission.counter
        return PrefixCacheStats(
            enabled=scheduler.admission.enabled,
            queries=counter.queries,
            hits=counter.hits,
            queried_tokens=counter.queried_tokens,
            hit_tokens=counter.hit_tokens,
            disk_cached_tokens=scheduler.loads.num_tokens,
            recent_queries=counter.num_recent,
            recent_hit_ratio=counter.recent_ratio,
            window_missed_tokens=scheduler.admission.num_window_missed_tokens,
            preemptions=scheduler.num_preemptions,
            num_blocks=self._cache.size.num_blocks,
            blocks_in_use=core["blocks_in_use"],
            block_size=self._cache.block_size,
            weight_version=self.weight_version,
            is_sleeping=self.is_sleeping,
            is_paused=self.is_paused,
            memory=None if self._pool is None else self._pool.gauges(core["blocks_in_use"]),
            **block_counts(core),
        )

    def prefix_hash_info(self) -> PrefixHashInfo:
        """What a client needs to compute the hashes of cached blocks."""
        return PrefixHashInfo(
            format=HASH_FORMAT,
            block_size=self._cache.block_size,
            root_hash=self._cache.core.root_hash().hex(),
            weights_name=self.weights_name,
            arithmetic=self._cache.arithmetic,
        )

    @endpoint("/reset_prefix_cache")
    @between_steps
    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, in constant time.

        Running requests keep their blocks, and publish none that they hold now.
        """
        self._cache.versions.reset()

    @endpoint("/pause")
    @between_steps
    def pause(self, mode: InFlightMode = "keep") -> None:
        """Computes nothing until `resume`. Requests that come meanwhile wait."""
        check_choice("mode", mode, InFlightMode)
        self._requests.drain()
        self._requests.interrupt(mode)
        self._state.pause()

    @endpoint("/resume")
    @between_steps
    def resume(self) -> None:
        """Goes on after `pause`; does nothing otherwise."""
        self._state.resume()

    # Sleeping.

    @endpoint("/sleep")
    @between_steps
    def sleep(self, level: int = 1, mode: SleepMode = "recompute") -> None:
        """Gives the KV cache's memory back, at level 2 that of the weights too.

        Cached prefixes are forgotten. Requests in flight wait for the wake-up, or are aborted; at
        level 2, where other weights may come back, their answers restart.
        """
        check_choice("level", level, Literal[1, 2])
        check_choice("mode", mode, SleepMode)
        memory = self._state.memory
        self._state.raise_if_updating()
        self._requests.drain()
        if level == 2:
            self._state.versions.renew()
            if mode == "abort":
                self._requests.interrupt("abort")
            else:
                self._requests.restart_all()
            memory.weights.give_up()
        else:
            self._requests.interrupt(mode)
            self._cache.versions.reset()
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
            check_choice("tags", tag, MemoryTag)
        memory = self._state.memory
        self._state.raise_if_updating()
        wanted = get_args(MemoryTag) if tags is None else tags
        try:
            if "weights" in wanted and not memory.weights.complete:
                self.weights.reload()
            if "kv_cache" in wanted and not memory.has_kv:
                if self._pool is not None:
                    self._pool.wake()
                memory.make_kv()
        finally:
            if self._pool is not None and not memory.has_kv:
                self._pool.fall_asleep()  # A resize waits on.
            memory.settle()
