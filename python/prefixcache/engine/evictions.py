"""The one reader of the cache's log of evicted blocks, in a thread of its own."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

from prefixcache.diagnostics.evictions import Evictions
from prefixcache.kv.cache_manager import CacheManager

_PERIOD = 0.5
_LOG_CAPACITY = 1 << 14
# So that converting them keeps the interpreter from the step loop for less than a millisecond.
_READ_AT_ONCE = 4096


class EvictionReader:
    """Reports evicted blocks to listeners; without any, nothing is logged and nothing runs.

    From the first listener on a thread reads the log twice a second, as long as the object lives.
    The step loop only writes that log, and never waits: blocks beyond its capacity are counted by
    the cache as missed.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._listeners: list[Callable[[Evictions], None]] = []
        self._reading = threading.Lock()
        self._capacity = 0
        self._read_at = time.monotonic()

    def listen(
        self,
        listener: Callable[[Evictions], None],
        *,
        capacity: int = _LOG_CAPACITY,
        gap_bounds: Sequence[float] = (),
    ) -> None:
        """Calls `listener` with all that is evicted from now on, from one thread at a time.

        The first listener decides on the log's capacity and on the gaps that the cache counts.
        """
        with self._reading:
            is_first = not self._listeners
            if is_first:
                self._cache.listen(capacity, gap_bounds)
                self._capacity = capacity
                self._read_at = time.monotonic()
            self._listeners.append(listener)
        if is_first:
            reader = threading.Thread(
                target=_read_on, args=(weakref.ref(self),), name="kv-cache-evictions", daemon=True
            )
            reader.start()

    def read(self) -> None:
        """Reports what was evicted since the last time. From any thread."""
        with self._reading:
            if self._listeners:
                self._read_all()

    def _read_all(self) -> None:
        since, self._read_at = self._read_at, time.monotonic()
        for _ in range(max(self._capacity // _READ_AT_ONCE, 1)):
            rows = self._cache.take_losses(_READ_AT_ONCE)
            evictions = Evictions(rows, since, self._read_at, self._cache.weight_version)
            for listener in self._listeners:
                listener(evictions)
            if len(rows["cause"]) < _READ_AT_ONCE:
                return


def _read_on(reference: weakref.ref[EvictionReader]) -> None:
    """Reads until the object is gone: an engine has no end that could stop a thread."""
    while (reader := reference()) is not None:
        reader.read()
        del reader
        time.sleep(_PERIOD)
