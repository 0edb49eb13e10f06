"""What happened between two looks at the engine's counters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.stats import PrefixCacheStats


@dataclass(frozen=True, slots=True)
class Look:
    """Counts of an engine's life at `time`, in seconds of `time.monotonic`.

    Requests were `answered`, `failed` or `refused` since too many waited; `running` and `waiting`
    are those of this moment.
    """

    time: float
    stats: PrefixCacheStats
    generated_tokens: int
    ttft: Sequence[int]
    answered: int = 0
    failed: int = 0
    refused: int = 0
    running: int = 0
    waiting: int = 0


def look_at(engine: AsyncEngine) -> Look:
    """The counts now. Raises `EngineDeadError`."""
    metrics = engine.metrics
    gauges = metrics.gauges()
    return Look(
        time.monotonic(),
        engine.control.prefix_cache_stats(),
        metrics.generation_tokens,
        metrics.time_to_first_token.counts,
        answered=metrics.finished["stop"] + metrics.finished["length"],
        failed=metrics.finished["error"],
        refused=metrics.queue_full_refusals + metrics.key_limit_refusals,
        running=gauges.num_running,
        waiting=gauges.num_waiting,
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened in a while: tokens, blocks and requests a second, TTFT in seconds.

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
    answered: float
    failed: float
    refused: float


POINT_FIELDS = ("time", "running", "waiting", *(field.name for field in fields(Rates)))


def point(before: Look, now: Look, ttft: Sequence[float]) -> dict[str, float | None]:
    """The `POINT_FIELDS` of charts: `rates` at this time of day, in seconds of `time.time`."""
    moment = {"time": time.time(), "running": now.running, "waiting": now.waiting}
    return moment | asdict(rates(before, now, ttft))


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
        answered=(now.answered - before.answered) / seconds,
        failed=(now.failed - before.failed) / seconds,
        refused=(now.refused - before.refused) / seconds,
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
