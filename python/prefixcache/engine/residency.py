"""How long blocks keep their content: histograms of what is lost, read off the step loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from prefixcache.diagnostics.evictions import EvictionReader, Evictions
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.metrics import PREFIX, Histogram

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)
_LOG_CAPACITY = 1 << 16
_EVICTED_CAUSES = (1, 3, 4, 5)
"""Why blocks go that nobody chose: room was needed, a full LRU list, a smaller pool, the bound on
what may be cached."""


class BlockResidency:
    """The histograms of one cache, under vLLM's names; every block is counted, without sampling.

    Evictions that the log had no room for are counted as missed.
    """

    def __init__(self, cache: CacheManager, evictions: EvictionReader) -> None:
        self._core = cache.core
        self._evictions = evictions
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
        evictions.listen(self._observe, capacity=_LOG_CAPACITY, gap_bounds=_SECONDS)

    def families(self) -> Iterator[Metric]:
        """The histograms as they stand now. From any thread."""
        self._evictions.read()
        self._gaps.replace(*self._core.reuse_gaps())
        yield from (histogram.family() for histogram in (self._lifetime, self._idle, self._gaps))
        yield CounterMetricFamily(
            PREFIX + "kv_block_losses_missed",
            "Evicted blocks that no histogram counts: too many at once.",
            value=self._core.missed_evictions,
        )

    def _observe(self, evictions: Evictions) -> None:
        rows = evictions.rows
        evicted = np.isin(rows["cause"], _EVICTED_CAUSES)
        self._lifetime.observe_all(rows["age"][evicted])
        self._idle.observe_all(rows["idle"][evicted])
