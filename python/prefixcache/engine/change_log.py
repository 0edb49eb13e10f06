"""How many blocks were evicted, pinned and demoted, in the debug log."""

from __future__ import annotations

import logging

from prefixcache.kv.cache_manager import CacheManager

logger = logging.getLogger(__name__)

_COUNTERS = ("evictions", "pins", "demotions", "pinned_evictions", "hints_demoted")


class ChangeLog:
    """Writes what changed in a cache since the last time."""

    def __init__(self, cache: CacheManager) -> None:
        self._core = cache.core
        self._logged = dict.fromkeys(_COUNTERS, 0)

    def write(self) -> None:
        """One line, where something has changed and somebody reads the debug log."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        counts = self._core.stats()
        changes = {name: counts[name] - logged for name, logged in self._logged.items()}
        self._logged = {name: counts[name] for name in self._logged}
        if any(changes.values()):
            text = ", ".join(f"{count} {name}" for name, count in changes.items() if count)
            logger.debug("Blocks of the cache: %s.", text.replace("_", " "))
