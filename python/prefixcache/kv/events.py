"""What the cache stores and removes, for a publisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from prefixcache.core import PrefixCache
from prefixcache.kv.specs import GroupKind

CoreEvent: TypeAlias = tuple[
    Literal["stored", "removed", "cleared"], int, int | None, list[int], list[int]
]
"""Kind, group, hash of the block before the first, hashes, tokens: see the core's `take_events`."""


class StoredBlocks(Protocol):
    """What was cached at one moment: the core's `EventSnapshot`."""

    @property
    def num_blocks(self) -> int:
        """All of them, each counted once a group."""
        ...

    def take(self, max_blocks: int) -> list[CoreEvent]:
        """The next ones, up to about that many, as "stored" events; empty at the end."""
        ...


class CacheEvents:
    """The events of one cache from now on, which must be empty yet. For any thread.

    Blocks under a salt are not among them. To be made by the thread that changes the cache, once.
    """

    def __init__(self, cache: PrefixCache, groups: Sequence[GroupKind]) -> None:
        cache.keep_events()
        self._cache = cache
        self.block_size = cache.block_size
        self.groups = tuple(groups)

    @property
    def root_hash(self) -> str:
        """The hash before the first block, in hexadecimal."""
        return self._cache.root_hash().hex()

    def take(self, max_blocks: int) -> list[CoreEvent]:
        """The oldest events, about `max_blocks` blocks of them; empty where there are none."""
        return self._cache.take_events(max_blocks)

    def snapshot(self) -> StoredBlocks | None:
        """What the events taken have led to; None while there are others to take."""
        return self._cache.snapshot_events()
