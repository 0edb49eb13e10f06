"""What happened between two looks at the engine's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixcache.engine.stats import PrefixCacheStats


@dataclass(frozen=True, slots=True)
class Look:
    """Counts of an engine's life at `time`, in seconds of `time.monotonic`."""

    time: float
    stats: PrefixCacheStats
    generated_tokens: int
    ttft: Sequence[int]


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened in a while: tokens and blocks a second, TTFT in seconds.

    `hit_ratio` is the cached share of the prompts' tokens, 0 to 1: those of `memory_tokens` and of
    `disk_tokens`, if any ever came from a disk. None where there was nothing to tell of.
    """

    hit_ratio: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    memory_tokens: float
    disk_tokens: float | None
    computed_tokens: float
    generated_tokens: float
    evictions: float
    demotions: float


def rates(before: Look, now: Look, ttft: Sequence[float]) -> Rates:
    """What happened from `before` to `now`, which is later; `ttft` are the bounds of its counts."""
    seconds, was, stats = now.time - before.time, before.stats, now.stats
    queried = stats.queried_tokens - was.queried_tokens
    on_disk = stats.disk_cached_tokens - was.disk_cached_tokens
    in_memory = stats.hit_tokens - was.hit_tokens
    demotions = stats.demotions + stats.hints_demoted - was.demotions - was.hints_demoted
    # A preempted request that loads its blocks again was looked up once.
    saved = min(queried, in_memory + on_disk)
    counts = [later - earlier for later, earlier in zip(now.ttft, before.ttft, strict=True)]
    return Rates(
        hit_ratio=saved / queried if queried > 0 else None,
        ttft_p50=quantile(ttft, counts, 0.5),
        ttft_p90=quantile(ttft, counts, 0.9),
        memory_tokens=in_memory / seconds,
        disk_tokens=on_disk / seconds if stats.disk_cached_tokens else None,
        computed_tokens=(queried - saved) / seconds,
        generated_tokens=(now.generated_tokens - before.generated_tokens) / seconds,
        evictions=(stats.evictions - was.evictions) / seconds,
        demotions=demotions / seconds,
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the observations lie, between the bounds as Prometheus does.

    The last bound for what lies above it; None without observations.
    """
    wanted = share * sum(counts)
    if wanted <= 0:
        return None
    lower = 0.0
    for upper, count, total in zip(bounds, counts, accumulate(counts), strict=False):
        if total >= wanted:
            return upper - (upper - lower) * (total - wanted) / count
        lower = upper
    return lower
