"""What a cache is made with."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from prefixcache.config.engine_parts.cache_config import EvictionPolicy
from prefixcache.core import PrefixCache
from prefixcache.kv.specs import GroupKind

HASH_FORMAT = "prefixcache v2"
"""Names what docs/reference/hashing.md specifies; other bytes need another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The pool of a cache, and what enters its hashes.

    `model`, `revision`, `weights`, `kv_dtype` and `arithmetic` enter every hash, `weights` until it
    is changed.
    """

    num_blocks: int
    """With the null block, which no request can hold."""
    block_size: int
    model: str
    revision: str = ""
    weights: str | None = None
    kv_dtype: str = ""
    arithmetic: str = ""
    groups: Sequence[GroupKind] = ("full",)
    """Each has a block table of its own over the one pool."""
    eviction_policy: EvictionPolicy = "lru"
    retention_budget: float = 0.2
    """The share of the pool, 0 to 1, that the hints of one owner may raise."""
    max_blocks: int | None = None
    """The pool can be resized up to there; None stands for `num_blocks`."""
    max_cached_blocks: int | None = None
    """At most that number is cached while no request holds them."""

    @property
    def most_blocks(self) -> int:
        """Blocks that the pool may ever have."""
        return self.max_blocks or self.num_blocks

    @property
    def windows(self) -> list[int]:
        """Tokens of the window of each group that keeps less than all blocks of a request."""
        return [2 if kind == "state" else kind[1] for kind in self.groups if kind != "full"]

    def make_core(self) -> PrefixCache:
        """An empty cache. Errors of the core pass through: `ValueError` names an argument."""
        return PrefixCache(**asdict(self))


def fitting_tokens(
    num_blocks: int, block_size: int, groups: Sequence[GroupKind], *, chunk: int, most: int
) -> int:
    """The tokens, up to `most`, of the longest request that a cache can hold.

    `num_blocks` counts the null block; at most `chunk` tokens at a time are computed.
    """
    # Made to count, it holds nothing.
    cache = PrefixCache(2, block_size, model="any", groups=groups)
    return bisect.bisect_right(
        range(1, most + 1), num_blocks - 1, key=lambda tokens: cache.most_blocks(tokens, chunk)
    )
