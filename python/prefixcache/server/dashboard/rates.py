"""What happened between two looks at the engine's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from prefixcache.metrics import Histogram

if TYPE_CHECKING:
    from prefixcache.engine.stats import PrefixCacheStats
    from prefixcache.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of an engine's life at `time`, in seconds of `time.monotonic`."""

    time: float
    queried_tokens: int
    hit_tokens: int
    disk_cached_tokens: int
    generated_tokens: int
    evictions: int
    demotions: int
    ttft: list[int]

    @classmethod
    def read(cls, now: float, stats: PrefixCacheStats, metrics: Metrics) -> Counters:
        """The counters as they stand."""
        return cls(
            time=now,
            queried_tokens=stats.queried_tokens,
            hit_tokens=stats.hit_tokens,
            disk_cached_tokens=stats.disk_cached_tokens,
            generated_tokens=metrics.generation_tokens,
            evictions=stats.evictions,
            demotions=stats.demotions + stats.hints_demoted,
            ttft=metrics.time_to_first_token.counts,
        )


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


def rates(before: Counters, now: Counters, ttft: Histogram) -> Rates:
    """What happened from `before` to `now`, which is later; `ttft` says how TTFT is counted."""
    seconds = now.time - before.time
    queried = now.queried_tokens - before.queried_tokens
    on_disk = now.disk_cached_tokens - before.disk_cached_tokens
    in_memory = now.hit_tokens - before.hit_tokens
    # A preempted request that loads its blocks again was looked up once.
    saved = min(queried, in_memory + on_disk)
    counts = [later - earlier for later, earlier in zip(now.ttft, before.ttft, strict=True)]
    return Rates(
        hit_ratio=saved / queried if queried > 0 else None,
        ttft_p50=quantile(ttft.bounds, counts, 0.5),
        ttft_p90=quantile(ttft.bounds, counts, 0.9),
        memory_tokens=in_memory / seconds,
        disk_tokens=on_disk / seconds if now.disk_cached_tokens else None,
        computed_tokens=(queried - saved) / seconds,
        generated_tokens=(now.generated_tokens - before.generated_tokens) / seconds,
        evictions=(now.evictions - before.evictions) / seconds,
        demotions=(now.demotions - before.demotions) / seconds,
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
