"""How long blocks keep their content: histograms of what is lost, read off the step loop."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from prefixcache.kv.cache_manager import EVICTED_CAUSES, CacheManager
from prefixcache.metrics import PREFIX, Histogram

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)
_PERIOD = 0.5
_LOG_CAPACITY = 1 << 16
# So that converting them keeps the interpreter from the step loop for less than a millisecond.
_LOSSES_AT_ONCE = 4096


class BlockResidency:
    """The histograms of one cache, under vLLM's names; every block is counted, without sampling.

    A thread of its own reads the log of losses, as long as the object lives. The step loop only
    writes that log, and never waits: losses beyond its capacity are counted as missed.
    """

    def __init__(self, cache: CacheManager) -> None:
        cache.listen(_LOG_CAPACITY, _SECONDS)
        self._cache = cache
        self._reading = threading.Lock()
        self._lifetime = Histogram(
            "kv_block_lifetime_seconds",
            "From the registration of a block's content to its eviction.",
            _SECONDS,
        )
        self._idle = Histogram(
            "kv_block_idle_before_evict_seconds",
            "From the last use of a block's content to its eviction.",
            _SECONDS,
        )
        self._gaps = Histogram(
            "kv_block_reuse_gap_seconds", "Between two uses of a block's content.", _SECONDS
        )
        reader = threading.Thread(
            target=_read_on, args=(weakref.ref(self),), name="kv-cache-metrics", daemon=True
        )
        reader.start()

    def families(self) -> Iterator[Metric]:
        """The histograms as they stand now. From any thread."""
        self.read()
        self._gaps.replace(*self._cache.reuse_gaps())
        yield from (histogram.family() for histogram in (self._lifetime, self._idle, self._gaps))
        yield CounterMetricFamily(
            PREFIX + "kv_block_losses_missed",
            "Lost blocks that no histogram counts: too many at once.",
            value=self._cache.num_missed_losses,
        )

    def read(self) -> None:
        """Counts what was lost since the last time. From any thread."""
        with self._reading:
            for _ in range(_LOG_CAPACITY // _LOSSES_AT_ONCE):
                losses = self._cache.take_losses(_LOSSES_AT_ONCE)
                evicted = np.isin(losses["cause"], EVICTED_CAUSES)
                self._lifetime.observe_all(losses["age"][evicted])
                self._idle.observe_all(losses["idle"][evicted])
                if len(evicted) < _LOSSES_AT_ONCE:
                    return


def _read_on(reference: weakref.ref[BlockResidency]) -> None:
    """Reads until the object is gone: an engine has no end that could stop a thread."""
    while (residency := reference()) is not None:
        residency.read()
        del residency
        time.sleep(_PERIOD)
