"""The share of a pool that pins may keep."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.core import PrefixCache
from prefixcache.core import Sequence as CoreSequence
from prefixcache.kv.recordings.recording import CacheRecorder, NotRecorded


class Pins:
    """Pins what requests leave behind, and ends the oldest pins beyond `max_share` of the pool.

    Where it is not `enabled` there are no pins but those that a kept file brings, which end.
    """

    def __init__(
        self,
        core: PrefixCache,
        recorder: CacheRecorder | NotRecorded,
        *,
        enabled: bool,
        max_share: float,
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._enabled = enabled
        self._max_share = max_share if enabled else 0.0
        self._most = 0

    def set_size(self, num_usable_blocks: int) -> None:
        """The pool has that number of blocks now."""
        self._most = int(self._max_share * num_usable_blocks)

    def pin_anchors(self, sequences: Sequence[CoreSequence]) -> None:
        """Pins the blocks that the anchors of these requests need, which are still held."""
        if self._enabled:
            self._core.pin_anchors(sequences)

    def keep_share(self) -> None:
        """After what may have added pins, or pins below hints that ended."""
        if self._enabled:
            self.end_beyond_share()

    def end_beyond_share(self) -> None:
        """`keep_share`, also of pins from before this process."""
        beyond = self._core.stats()["pinned_blocks"] - self._most
        if beyond > 0:
            self._demote(beyond)

    def end_all(self) -> None:
        """What is pinned cannot be hit any more."""
        if self._enabled:
            self._demote(self._core.stats()["pinned_blocks"])

    def _demote(self, count: int) -> None:
        self._core.demote(count)
        self._recorder.note("demote", count=count)
