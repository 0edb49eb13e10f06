"""From the cache's own events to those of the wire, and what is cached at one moment as such."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from prefixcache._core import EventSnapshot
from prefixcache.events.wire import (
    DISK_MEDIUM,
    MEDIUM,
    SNAPSHOT_VERSION,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVGroup,
    SnapshotEnd,
    SnapshotHeader,
    encode,
)
from prefixcache.kv.events import CoreEvent
from prefixcache.kv.specs import GroupKind

# As in the publisher: so that a part keeps the interpreter for a fraction of a millisecond.
_BLOCKS_AT_ONCE = 512


class WireForm:
    """Names the blocks of a cache as the wire does, with its `groups` where there are several."""

    def __init__(self, block_size: int, groups: Sequence[GroupKind]) -> None:
        self.block_size = block_size
        self.groups = [_group(kind) for kind in groups]
        self._is_hybrid = len(groups) > 1

    def event(self, event: CoreEvent, medium: str = MEDIUM) -> Event:
        """The event of the wire."""
        kind, group, parent, hashes, tokens = event
        if kind == "cleared":
            return AllBlocksCleared()
        if kind == "removed":
            return BlockRemoved(hashes, medium, group if self._is_hybrid else None)
        stored = BlockStored(hashes, parent, tokens, self.block_size, None, medium, None)
        if self._is_hybrid:
            spec = self.groups[group]
            stored.group_idx = group
            stored.kv_cache_spec_kind = spec.kv_cache_spec_kind
            stored.kv_cache_spec_sliding_window = spec.kv_cache_spec_sliding_window
        return stored


def _group(kind: GroupKind) -> KVGroup:
    if isinstance(kind, str):
        # vLLM's word for a state.
        return KVGroup({"full": "full_attention", "state": "mamba"}[kind])
    return KVGroup(*kind)


def _runs(on_disk: Iterable[tuple[int, npt.NDArray[np.uint64]]]) -> Iterator[CoreEvent]:
    for group, hashes in on_disk:
        for first in range(0, len(hashes), _BLOCKS_AT_ONCE):
            yield "stored", group, None, hashes[first : first + _BLOCKS_AT_ONCE].tolist(), []


class CacheSnapshot:
    """The bytes of a snapshot, part by part; it holds a copy of what was cached until it ends."""

    def __init__(
        self,
        blocks: EventSnapshot,
        on_disk: Sequence[tuple[int, npt.NDArray[np.uint64]]],
        form: WireForm,
        *,
        sequence: int,
        root_hash: str,
        model: str,
    ) -> None:
        self._blocks = blocks
        self._num_blocks = blocks.num_blocks + sum(len(hashes) for _, hashes in on_disk)
        self._on_disk = _runs(on_disk)
        self._form = form
        self._header: SnapshotHeader | None = SnapshotHeader(
            SNAPSHOT_VERSION, sequence, root_hash, model, form.block_size, form.groups
        )
        self._is_over = False

    def next_part(self) -> bytes:
        """The next bytes; empty at the end."""
        if self._header is not None:
            header, self._header = self._header, None
            return encode(header)
        events = self._blocks.take(_BLOCKS_AT_ONCE)
        if events:
            return b"".join(encode(self._form.event(event)) for event in events)
        if (run := next(self._on_disk, None)) is not None:
            return encode(self._form.event(run, DISK_MEDIUM))
        if self._is_over:
            return b""
        self._is_over = True
        return encode(SnapshotEnd(self._num_blocks))
