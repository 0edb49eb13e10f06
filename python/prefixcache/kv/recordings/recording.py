"""Records what decides what is cached: docs/reference/recording.md.

The thread of the step loop passes on references to what it has anyway; numbers of requests, names
of blocks and lines are made where they are written (`record_writer.py`).
"""

# ruff: noqa: D102 - what a method of `NotRecorded` is for says the class that does something.

from __future__ import annotations

import secrets
import time
import weakref
from typing import Any

from prefixcache.core import PrefixCache
from prefixcache.kv.cache_settings import CacheSettings
from prefixcache.kv.recordings.trace_writer import TraceWriter
from prefixcache.kv.retention import Retention

_COUNTERS_EVERY_MS = 1000


class CacheRecorder:
    """Gets each call that changes a cache, for `writer`.

    Times of the cache are those of the recording, in whole milliseconds, so that a replay makes the
    same calls at the same times: `tick` comes before each call whose time matters. A call is noted
    once it has succeeded; one that may end pins is noted before, as the pins that end within it are
    noted too. The recording ends with the object, or with the interpreter.
    """

    replays_groups = False
    """Whether groups of requests may raise prompts: a replay does not know when a group ends."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._put = writer.put
        self._began = time.monotonic_ns()
        self._now = self._set_ms = self._counted_ms = -1
        self._num_requests = 0
        self._core: PrefixCache

    def begin(
        self, core: PrefixCache, settings: CacheSettings, retention: Retention, *, merges: bool
    ) -> None:
        """Begins with what a replay needs to make the same cache, which is empty yet."""
        self._core = core
        key = secrets.token_bytes(32)
        if settings.eviction_policy == "reuse-queue":
            # What the policy samples by must stand in the recording.
            core.name_blocks(key)
        header = {
            "num_blocks": settings.num_blocks,
            "block_size": settings.block_size,
            "groups": settings.groups,
            "eviction_policy": settings.eviction_policy,
            "retention_budget": settings.retention_budget,
            "max_blocks": settings.most_blocks,
            "max_cached_blocks": settings.max_cached_blocks,
            "free_order": "unhashed_first",
            "merge_duplicates": merges,
            "retention": retention.recorded() if settings.windows else None,
        }
        self._writer.begin_trace(header, key)
        self._end = weakref.finalize(self, self._writer.close)

    def tick(self) -> None:
        """Sets the cache's time to that of the event that follows."""
        self._read_clock()
        if self._now != self._set_ms:
            self._set_ms = self._now
            # Half a millisecond on, so that no rounding leads to the one before.
            self._core.set_time((self._now + 0.5) / 1000)

    def _read_clock(self) -> None:
        self._now = (time.monotonic_ns() - self._began) // 1_000_000

    def note(self, kind: str, **details: Any) -> None:
        """Records an event at the time of the last `tick`."""
        self._put((kind, self._now, details))

    def note_now(self, kind: str, **details: Any) -> None:
        """Records one before which the cache's time is not set: that is the writer's right."""
        self._read_clock()
        self._put((kind, self._now, details))

    def note_requests(self, change: int) -> None:
        """By how many the number of known requests has changed."""
        self._num_requests += change

    def count(self) -> None:
        """Records what the cache counts: where no call is half done, now and then."""
        if self._now - self._counted_ms >= _COUNTERS_EVERY_MS or not self._num_requests:
            self._counted_ms = self._now
            self.note("counters", stats=self._core.stats())

    def close(self) -> None:
        """Ends the recording."""
        self._end()


class NotRecorded:
    """`CacheRecorder` where nothing is recorded."""

    replays_groups = True

    def begin(
        self, core: PrefixCache, settings: CacheSettings, retention: Retention, *, merges: bool
    ) -> None: ...
    def tick(self) -> None: ...
    def note(self, kind: str, **details: Any) -> None: ...
    def note_now(self, kind: str, **details: Any) -> None: ...
    def note_requests(self, change: int) -> None: ...
    def count(self) -> None: ...
    def close(self) -> None: ...
