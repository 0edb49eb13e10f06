"""What the pages show, as events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prefixcache.server.dashboard.prompts import PromptsView
from prefixcache.server.dashboard.rates import Look, look_at, point
from prefixcache.server.dashboard.samples import NUM_SAMPLES, Samples
from prefixcache.server.http.sse import named_event
from prefixcache.server.options.version import VERSION

if TYPE_CHECKING:
    from prefixcache.diagnostics.history import PromptHistory
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.stats import PrefixCacheStats
    from prefixcache.metrics import PoolGauges
    from prefixcache.server.jobs.served_model import ServedModel

_STATES = ("free", "cached", "pinned", "held")
_CELLS = 1024
# Seconds since the last use that the map tells apart.
_AGES = (1, 10, 60, 600, 3600)
# A page gets the samples of the last ten minutes, and adds a point a second for as long.
_MOST_POINTS = NUM_SAMPLES + 600
# Two looks that are further apart are not compared: meanwhile no page was open.
_LONGEST_GAP = 10
_MOST_REQUESTS = 50


class View:
    """Reads one engine in parallel with its steps. One thread at a time calls `take`."""

    def __init__(
        self,
        engine: AsyncEngine,
        served: ServedModel,
        samples: Samples,
        history: PromptHistory | None = None,
    ) -> None:
        self._engine = engine
        self._served = served
        self._samples = samples
        self._started = time.time()
        self._before: Look | None = None
        self._prompts = None if history is None else PromptsView(history, served.tokenizer)

    def greet(self) -> bytes:
        """What a page is sent first: what it looks at, and the last points of its curves."""
        return named_event(
            {
                "type": "hello",
                "model": self._served.names[0],
                "version": VERSION,
                "started": self._started,
                "ages": _AGES,
                "most_points": _MOST_POINTS,
                "points": self._samples.points(),
            }
        )

    def take(self) -> Mapping[str, bytes]:
        """The events of this moment, by name."""
        events = {"snapshot": named_event(self._snapshot())}
        if self._prompts is not None:
            events |= self._prompts.take(self._engine.control.block_size)
        return events

    def _snapshot(self) -> dict[str, Any]:
        control, now = self._engine.control, look_at(self._engine)
        stats = now.stats
        return {
            "type": "snapshot",
            "point": self._next_point(now),
            "map": block_map(*control.block_map(_CELLS, _AGES)),
            "cache": _cache(stats),
            "failed": now.failed,
            "refused": now.refused,
            "memory": None if stats.memory is None else _memory(stats.memory),
            "requests": [asdict(request) for request in control.progress(_MOST_REQUESTS)],
        }

    def _next_point(self, now: Look) -> dict[str, float | None]:
        before, self._before = self._before, now
        if before is None or not before.time < now.time <= before.time + _LONGEST_GAP:
            return {"time": time.time(), "running": now.running, "waiting": now.waiting}
        return point(before, now, self._engine.metrics.time_to_first_token.bounds)


def block_map(states: npt.NDArray[np.uint32], ages: npt.NDArray[np.uint32]) -> dict[str, Any]:
    """The map of `Control.block_map` in columns: blocks of each cell by state, and its age.

    The age is the number of the range that the median of the cell's blocks with content is in; -1
    where it has none, or their times are not known.
    """
    totals = ages.sum(axis=1)
    at_most = ages.cumsum(axis=1)
    median = (2 * at_most >= totals[:, None]).argmax(axis=1)
    columns = {name: states[:, place].tolist() for place, name in enumerate(_STATES)}
    return columns | {"age": np.where(totals > 0, median, -1).tolist()}


def _cache(stats: PrefixCacheStats) -> dict[str, Any]:
    return {
        "enabled": stats.enabled,
        "is_sleeping": stats.is_sleeping,
        "is_paused": stats.is_paused,
        "block_size": stats.block_size,
        "num_blocks": stats.num_blocks - 1,
        "recent_hit_ratio": stats.recent_hit_ratio,
        "recent_queries": stats.recent_queries,
        "hit_tokens": stats.hit_tokens,
        "disk_cached_tokens": stats.disk_cached_tokens,
        "queried_tokens": stats.queried_tokens,
        "evictions": stats.evictions,
        "demotions": stats.demotions + stats.hints_demoted,
        "preemptions": stats.preemptions,
    }


def _memory(memory: PoolGauges) -> dict[str, int]:
    return {
        "reserved": memory.reserved_bytes,
        "mapped": memory.mapped_bytes,
        "held": memory.held_bytes,
    }
