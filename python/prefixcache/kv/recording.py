"""A cache manager that records what decides what is cached: docs/reference/recording.md.

The thread of the step loop passes on references to what it has anyway; numbers of requests, names
of blocks and lines are made where they are written (`record_writer.py`).
"""

from __future__ import annotations

import inspect
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from prefixcache.kv.cache_manager import Blocks, CacheManager
from prefixcache.kv.trace_writer import TraceWriter
from prefixcache.types.request import Request

_COUNTERS_EVERY_MS = 1000


class RecordedCacheManager(CacheManager):
    """A `CacheManager`, whose arguments it takes, that records what it does.

    Times of the cache are those of the recording, in whole milliseconds, so that a replay makes the
    same calls at the same times. The recording ends with the object, or with the interpreter.
    """

    _keeps_groups = False  # a replay does not know when a group ends

    def __init__(
        self, num_blocks: int, block_size: int, *, writer: TraceWriter, **options: Any
    ) -> None:
        super().__init__(num_blocks, block_size, **options)
        self._put = writer.put
        self._began = time.monotonic_ns()
        self._now = self._set_ms = self._counted_ms = -1
        chosen = inspect.signature(CacheManager).bind(num_blocks, block_size, **options)
        chosen.apply_defaults()
        key = secrets.token_bytes(32)
        if chosen.arguments["eviction_policy"] == "reuse-queue":
            # What the policy samples by must stand in the recording.
            self._cache.name_blocks(key)
        writer.begin_trace(self._header(chosen.arguments), key)
        self._end_recording = weakref.finalize(self, writer.close)

    def _header(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What a replay needs to make the same cache."""
        retention = self._retention
        windows = {
            "interval": retention.interval,
            "pin": retention.pin,
            "min_pin_blocks": retention.pin_min_drop_size,
            "pin_prefix": retention.pin_prefix_blocks,
        }
        names = ("num_blocks", "block_size", "groups", "eviction_policy", "retention_budget")
        return {name: options[name] for name in names} | {
            "max_blocks": self.max_blocks,
            "max_cached_blocks": options["max_cached_blocks"],
            "free_order": "unhashed_first",
            "merge_duplicates": self._merge_twins,
            "retention": windows if self.has_windows else None,
        }

    def _record(self, kind: str, **details: Any) -> None:
        self._put((kind, self._now, details))

    def _read_clock(self) -> None:
        self._now = (time.monotonic_ns() - self._began) // 1_000_000

    def _tick(self) -> None:
        """Sets the cache's time to that of the event that follows."""
        self._read_clock()
        if self._now != self._set_ms:
            self._set_ms = self._now
            # Half a millisecond on, so that no rounding leads to the one before.
            self._cache.set_time((self._now + 0.5) / 1000)

    def _count(self) -> None:
        """Records what the cache counts: where no call is half done, now and then."""
        if self._now - self._counted_ms >= _COUNTERS_EVERY_MS or not self._sequences:
            self._counted_ms = self._now
            self._record("counters", stats=self._cache.stats())

    # Each call is recorded when it has succeeded; those that may end pins within them before, as
    # the pins that they end are recorded too.

    def start(self, request: Request, *, hashed: bool = True) -> None:  # noqa: D102
        again = request.request_id in self._sequences
        super().start(request, hashed=hashed)
        # Without `_tick`, since a thread that sets the time becomes the one that writes.
        self._read_clock()
        if again:
            self._record("restart", request_id=request.request_id)
        else:
            self._record("add", request=request, hashed=hashed)

    def demote_expired(self) -> None:  # noqa: D102
        self._tick()
        if self._hints_expire:
            self._record("expire")
        super().demote_expired()
        self._count()

    def commit(self, request_id: str, hit_tokens: int, num_tokens: int, chunk: int) -> int | None:  # noqa: D102
        self._tick()
        taken = super().commit(request_id, hit_tokens, num_tokens, chunk)
        if taken is not None:
            at_once = self._window_slots(hit_tokens, chunk)
            self._record("start", request_id=request_id, hit=taken, new=num_tokens, chunk=at_once)
        return taken

    def ensure_slots(self, wanted: Sequence[tuple[str, int]]) -> int:  # noqa: D102
        self._tick()
        served = super().ensure_slots(wanted)
        if served:
            self._record("slots", wanted=wanted[:served])
        return served

    def keep_snapshots(self, starts: Sequence[tuple[str, int]]) -> None:  # noqa: D102
        self._tick()
        super().keep_snapshots(starts)
        self._record("snapshots", starts=starts)

    def append_tokens(self, sampled: Mapping[str, int]) -> None:  # noqa: D102
        super().append_tokens(sampled)
        self._record("tokens", sampled=sampled)

    def mark_filled(self, request_ids: Sequence[str], upto: Sequence[int]) -> Mapping[int, int]:  # noqa: D102
        self._tick()
        duplicates = super().mark_filled(request_ids, upto)
        self._record("publish", request_ids=request_ids, upto=upto)
        return duplicates

    def _add_anchor(self, request_id: str, position: int) -> None:
        super()._add_anchor(request_id, position)
        self._read_clock()
        self._record("anchor", request_id=request_id, at=position)

    def drop_unneeded(self, computed: Sequence[tuple[str, int]]) -> None:  # noqa: D102
        self._tick()
        self._record("drop", wanted=computed)
        super().drop_unneeded(computed)

    def _demote(self, count: int) -> None:
        super()._demote(count)
        self._record("demote", count=count)

    def release(self, request_ids: Sequence[str]) -> None:  # noqa: D102
        self._tick()
        super().release(request_ids)
        self._record("preempt", request_ids=request_ids)

    def free(self, request_ids: Sequence[str], *, ended_well: Collection[str] = ()) -> None:  # noqa: D102
        self._tick()
        self._record("end", request_ids=tuple(request_ids), well=frozenset(ended_well))
        super().free(request_ids, ended_well=ended_well)
        self._count()

    def reset(self) -> None:  # noqa: D102
        self._tick()
        self._record("reset")
        super().reset()
        self._count()

    def new_weight_version(self, weights: str | None = None) -> int:  # noqa: D102
        self._tick()
        self._record("weights")
        version = super().new_weight_version(weights)
        self._count()
        return version

    def resize(self, num_blocks: int) -> int:  # noqa: D102
        self._tick()
        self._record("resize", blocks=num_blocks)
        held = super().resize(num_blocks)
        self._count()
        return held

    def move_cached(  # noqa: D102
        self, num_blocks: int, max_moves: int, copy: Callable[[Blocks, Blocks], None]
    ) -> int:
        self._tick()
        moved = False
        try:
            count = super().move_cached(num_blocks, max_moves, copy)
            moved = True
        finally:
            self._record("move", blocks=num_blocks, most=max_moves, moved=moved)
        self._count()
        return count

    def close(self, *, waits: bool = True) -> None:  # noqa: ARG002, D102
        self._end_recording()
