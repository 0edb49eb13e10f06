"""The prefix cache in numbers, for one look."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.metrics import BlockCounts, PoolGauges


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHashInfo:
    """What others need to compute hashes of the cache's blocks (docs/reference/hashing.md).

    `root_hash` is `h_0` of requests without a salt, in hexadecimal; it changes with
    `weights_name`, what it calls the weights. `arithmetic` is what the model computes with.
    """

    format: str
    block_size: int
    root_hash: str
    weights_name: str
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats(BlockCounts):
    """The cache now. Read while a step runs, one number may be older than another by that step.

    Counted over the engine's lifetime, whatever becomes of weights and cache: `queries` and `hits`
    are requests looked up and those with a hit, `queried_tokens` and `hit_tokens` their tokens,
    `disk_cached_tokens` those that were read from a disk, `evictions` blocks whose content was
    overwritten. `recent_hit_ratio` is the cached share, 0 to 1, of the tokens of the last
    `recent_queries` requests, at most 1000. Blocks are `blocks_in_use` by requests or
    `free_blocks`; `cached_blocks` of both can be hit, and `pinned_blocks` of both are evicted last.
    `num_blocks` counts them all and the null block, which pads tables and is neither.

    `memory` is what the blocks take of it, and what resizes did; None where the cache keeps its
    size.

    Where layers have a sliding window: `window_missed_tokens` were there for full attention, and
    their windows were lost; `pins` counts blocks pinned, `demotions` pins that ended for younger
    ones, `pinned_evictions` and `pinned_hits` the pinned ones among blocks evicted and hit.

    `hinted_blocks` have another priority than the default now; `hints_demoted` lost it since their
    owner was over its budget, `hints_expired` at the end of their TTL.
    """

    enabled: bool
    queries: int
    hits: int
    queried_tokens: int
    hit_tokens: int
    disk_cached_tokens: int
    recent_queries: int
    recent_hit_ratio: float
    window_missed_tokens: int
    preemptions: int
    num_blocks: int
    blocks_in_use: int
    block_size: int
    weight_version: int
    is_sleeping: bool
    is_paused: bool
    memory: PoolGauges | None
