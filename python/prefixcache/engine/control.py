"""What may be changed about a running engine: always between two steps, never beside one.

Callers on other threads reach these through `AsyncEngine`'s queue, so that the loop needs no lock.
"""

from __future__ import annotations

from prefixcache.kv.cache_manager import CacheManager


class Control:
    """Operations on the engine's parts; the thread that runs the loop calls them."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, in constant time.

        Running requests keep their blocks, and publish none that they hold now.
        """
        self._cache.reset()
