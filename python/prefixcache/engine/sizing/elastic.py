"""The cache's size as it follows from idleness and from the memory that others need.

Two limits of available memory, a margin apart, keep two servers from trading the same bytes for
ever: below the lower one each gives back what is lacking, above the upper one each takes at most
half of what is there, and between them nothing changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from prefixcache.config.engine_parts.cache_config import ElasticConfig
from prefixcache.kv.elastic import ElasticPool

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_IDLE_PARTS = 8
_MARGIN_SHARE = 0.25

Change = Callable[[ElasticPool], None]


class SelfSizing:
    """Decides once in a while what the pool may hold; `read_available` gives bytes, or None."""

    def __init__(
        self,
        config: ElasticConfig,
        pool: ElasticPool,
        read_available: Callable[[], int | None],
    ) -> None:
        self._idle_release = config.kv_cache_idle_release
        self._min_free = config.min_free_memory
        self._pool = pool
        self._read_available = read_available
        self._idle_part = 0

    @classmethod
    def of(
        cls, config: ElasticConfig, pool: ElasticPool, read_available: Callable[[], int]
    ) -> SelfSizing:
        """What the flags say, with the device's memory or the file that stands for it."""
        file = config.available_memory_file
        return cls(config, pool, read_available if file is None else _MemoryFile(file).read)

    def choose(self, idle_seconds: float) -> Change | None:
        """What is to be done to the pool now, between two steps; most often nothing."""
        return self._choose_by_memory() or self._choose_by_idleness(idle_seconds)

    def _choose_by_memory(self) -> Change | None:
        available = None if self._min_free is None else self._read_available()
        if available is None or self._min_free is None:
            return None
        lacking, margin = self._min_free - available, int(self._min_free * _MARGIN_SHARE)
        if -margin <= lacking <= 0:
            return None
        change = -(lacking + margin // 2) if lacking > 0 else (-lacking - margin // 2) // 2
        mapped = self._pool.memory.num_mapped_bytes()
        size = max(mapped + change, 0) // self._pool.sizes.block_bytes
        if lacking > 0:
            return self._give_back(size, lacking)
        return self._allow_more(size)

    def _give_back(self, size: int, lacking: int) -> Change | None:
        if self._pool.is_at_floor:
            return None
        logger.info("%.0f MiB less than --min-free-memory are available.", lacking / _MIB)
        return lambda pool: pool.allow(size)

    def _allow_more(self, size: int) -> Change | None:
        if size <= self._pool.limit or self._pool.limit >= self._pool.wanted:
            return None
        return lambda pool: pool.allow(size)

    def _choose_by_idleness(self, idle_seconds: float) -> Change | None:
        if self._idle_release is None or idle_seconds < self._idle_release:
            self._idle_part = 0
            return None
        if self._pool.is_at_floor:
            return None
        if not self._idle_part:
            removable = self._pool.num_blocks - self._pool.sizes.floor
            self._idle_part = max(1, math.ceil(removable / _IDLE_PARTS))
        part = self._idle_part
        return lambda pool: pool.rest(pool.num_blocks - part)


class _MemoryFile:
    """A file that others write the number of available bytes to."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._was_read = True

    def read(self) -> int | None:
        """The number; None while the file holds none, which is warned of once."""
        try:
            number = int(self._file.read_text())
        except (OSError, ValueError) as error:
            if self._was_read:
                logger.warning("--available-memory-file %s cannot be read: %s", self._file, error)
            self._was_read = False
            return None
        self._was_read = True
        return number
