"""What the cache stores and removes, for a publisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixcache._core import BlockStaging, EventSnapshot
from prefixcache.core import PrefixCache
from prefixcache.kv.specs import GroupKind

CoreEvent: TypeAlias = tuple[
    Literal["stored", "removed", "cleared"], int, int | None, list[int], list[int]
]
"""Kind, group, hash of the block before the first, hashes, tokens: see the core's `take_events`."""


class CacheEvents:
    """The events of one cache from now on, which must be empty yet. For any thread.

    Blocks under a salt are not among them. To be made by the thread that changes the cache, once.
    """

    def __init__(
        self, cache: PrefixCache, groups: Sequence[GroupKind], disk: BlockStaging | None = None
    ) -> None:
        cache.keep_events()
        self._cache = cache
        self._disk = disk
        self.block_size = cache.block_size
        self.groups = tuple(groups)

    @property
    def root_hash(self) -> str:
        """The hash before the first block, in hexadecimal."""
        return self._cache.root_hash().hex()

    def take(self, max_blocks: int) -> list[CoreEvent]:
        """The oldest events, about `max_blocks` blocks of them; empty where there are none."""
        return self._cache.take_events(max_blocks)

    def take_of_disk(self, max_blocks: int) -> list[CoreEvent]:
        """What a disk tier got or lost, without tokens. To be taken, and sent, before `take`."""
        return [] if self._disk is None else self._disk.take_events(max_blocks)

    def report_disk_again(self) -> None:
        """After a "cleared" event: what the disk tier has is to be taken once more."""
        if self._disk is not None:
            self._disk.report_again()

    def on_disk(self) -> list[tuple[int, npt.NDArray[np.uint64]]]:
        """Each group, and the hashes [n] of its reported blocks that the disk tier has."""
        if self._disk is None:
            return []
        return [(group, self._disk.reported(group)) for group in range(len(self.groups))]

    def snapshot(self) -> EventSnapshot | None:
        """What the events taken have led to; None while there are others to take."""
        return self._cache.snapshot_events()
