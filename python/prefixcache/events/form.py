"""From the cache's own events to those of the wire."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.events.wire import (
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Group,
)
from prefixcache.kv.events import CoreEvent
from prefixcache.kv.specs import GroupKind


class WireForm:
    """Names the blocks of a cache as the wire does, with its `groups` where there are several."""

    def __init__(self, block_size: int, groups: Sequence[GroupKind]) -> None:
        self.block_size = block_size
        self.groups = [_group(kind) for kind in groups]
        self._is_hybrid = len(groups) > 1

    def event(self, event: CoreEvent) -> Event:
        """The event of the wire."""
        kind, group, parent, hashes, tokens = event
        if kind == "cleared":
            return AllBlocksCleared()
        if kind == "removed":
            return BlockRemoved(hashes, MEDIUM, group if self._is_hybrid else None)
        stored = BlockStored(hashes, parent, tokens, self.block_size, None, MEDIUM, None)
        if self._is_hybrid:
            spec = self.groups[group]
            stored.group_idx = group
            stored.kv_cache_spec_kind = spec.kv_cache_spec_kind
            stored.kv_cache_spec_sliding_window = spec.kv_cache_spec_sliding_window
        return stored


def _group(kind: GroupKind) -> Group:
    if kind == "full":
        return Group("full_attention")
    return Group(*kind)
