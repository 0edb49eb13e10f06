"""Which blocks were evicted lately, when and why: one reader of the cache's log, and a sketch."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.config.logs import RecurringError
from prefixcache.diagnostics.history import Pressure
from prefixcache.kv.cache_manager import CacheManager

logger = logging.getLogger(__name__)

DISCARDED = 2
"""The cause of a block that its last holder gave up, as one behind a window."""

_PRESSURES: Mapping[int, Pressure] = {
    1: "capacity",
    3: "capacity",
    4: "shrunk_cache",
    5: "cached_limit",
}
_CLEARED = 0
# 64 bits of a hash, in which the group is mixed, name a row.
_ROW = np.dtype(
    [
        ("key", np.uint64),
        ("since", np.float64),
        ("time", np.float64),
        ("age", np.float32),
        ("idle", np.float32),
        ("hits", np.uint32),
        ("cause", np.uint8),
    ]
)
_GROUP_FACTOR = 0x9E3779B97F4A7C15

_PERIOD = 0.5
_LOG_CAPACITY = 1 << 14
# So that converting them keeps the interpreter from the step loop for less than a millisecond.
_READ_AT_ONCE = 4096


class Evictions(NamedTuple):
    """What was evicted between two times, in seconds of `time.monotonic`.

    `rows` are the arrays of the core's `take_evictions`, `weight_version` that after they were
    taken.
    """

    rows: Mapping[str, npt.NDArray[Any]]
    since: float
    time: float
    weight_version: int


class EvictionReader:
    """Reports evicted blocks to listeners; without any, nothing is logged and nothing runs.

    From the first listener on a thread reads the log twice a second, as long as the object lives.
    The step loop only writes that log, and never waits: blocks beyond its capacity are counted by
    the cache as missed.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._core = cache.core
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
                self._core.listen(capacity, gap_bounds)
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
            rows = self._core.take_evictions(_READ_AT_ONCE)
            evictions = Evictions(rows, since, self._read_at, self._core.weight_version)
            for listener in self._listeners:
                listener(evictions)
            if len(rows["cause"]) < _READ_AT_ONCE:
                return


def _read_on(reference: weakref.ref[EvictionReader]) -> None:
    """Reads until the object is gone: an engine has no end that could stop a thread."""
    failing = RecurringError(logger, "Evicted blocks could not be read. The next try comes soon.")
    while (reader := reference()) is not None:
        try:
            reader.read()
        except Exception as error:  # noqa: BLE001 - logged
            failing.log(error)
        del reader
        time.sleep(_PERIOD)


@dataclass(frozen=True, slots=True)
class EvictedBlock:
    """One evicted block: it went after `since` and by `time`, in seconds of `time.monotonic`."""

    since: float
    time: float
    age_s: float
    idle_s: float
    hits: int
    cause: int

    @property
    def pressure(self) -> Pressure:
        """What it had to make room for."""
        return _PRESSURES.get(self.cause, "unknown")


class EvictedBlocks:
    """The blocks whose last copy was evicted, each in the one row that its hash leads to.

    A later eviction may take the row of an earlier one, so older ones fade. At most `max_bytes`.
    From any thread. `cleared_at` is when everything was forgotten last, `new_weights_at` when it
    was for new weights, in seconds of `time.monotonic`; minus infinity before the first time.
    """

    def __init__(self, max_bytes: int) -> None:
        num_rows = 1 << max(max_bytes // _ROW.itemsize, 1).bit_length() - 1
        self._rows = np.zeros(num_rows, _ROW)
        self._mask = np.uint64(num_rows - 1)
        self._lock = threading.Lock()
        self._weight_version: int | None = None
        self.cleared_at = -math.inf
        self.new_weights_at = -math.inf

    @property
    def num_bytes(self) -> int:
        """The memory of the rows."""
        return self._rows.nbytes

    def add(self, evictions: Evictions) -> None:
        """Takes note of what was evicted."""
        rows = evictions.rows
        if (rows["cause"] == _CLEARED).any():
            self.cleared_at = evictions.time
        if self._weight_version not in (None, evictions.weight_version):
            self.new_weights_at = evictions.time
        self._weight_version = evictions.weight_version
        gone = (rows["cause"] != _CLEARED) & rows["is_last"]
        if not gone.any():
            return
        added = np.zeros(int(gone.sum()), _ROW)
        added["key"] = _keys(rows["hash"][gone], rows["group"][gone])
        added["since"], added["time"] = evictions.since, evictions.time
        for name in ("age", "idle", "hits", "cause"):
            added[name] = rows[name][gone]
        with self._lock:
            self._rows[added["key"] & self._mask] = added

    def find(self, block_hash: bytes, group: int = 0) -> EvictedBlock | None:
        """The last eviction of the block; None where none is known."""
        key = _keys(
            np.frombuffer(block_hash, np.uint8).reshape(1, -1), np.array([group], np.uint16)
        )[0]
        with self._lock:
            row = self._rows[key & self._mask].copy()
        if row["key"] != key or not row["time"]:
            return None
        return EvictedBlock(
            since=float(row["since"]),
            time=float(row["time"]),
            age_s=float(row["age"]),
            idle_s=float(row["idle"]),
            hits=int(row["hits"]),
            cause=int(row["cause"]),
        )


def _keys(hashes: npt.NDArray[np.uint8], groups: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Keys of blocks [n], of their hashes [n, 32] and groups [n]."""
    words = np.ascontiguousarray(hashes[:, :8]).view(np.uint64)[:, 0]
    return words ^ (groups.astype(np.uint64) * np.uint64(_GROUP_FACTOR))
