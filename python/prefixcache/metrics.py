"""Counters of one engine, and their Prometheus form under vLLM's names.

The engine's thread adds to plain integers; prometheus-client's objects are made when somebody asks
for them. Nothing here is global: each engine has a registry of its own.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from prefixcache.types.modes import WeightsInfo
from prefixcache.types.request import FinishReason

PREFIX = "prefixcache:"
MetricsPrefix = Literal["prefixcache", "vllm"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_OVERHEAD_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 1e-1)
_TOKENS = tuple(2**power for power in range(15))
_REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGauges:
    """The memory of the KV cache and its resizes; `seconds` is the time that steps waited."""

    num_blocks: int
    reserved_bytes: int
    mapped_bytes: int
    held_bytes: int
    resizes: int
    blocks_moved: int
    blocks_lost: int
    blocks_released: int
    bytes_given_back: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCounts:
    """Blocks of a cache that outlives its process.

    At the start `restored` were found and `dropped` could not be used; since then `kept` were
    completed, and of the restored ones `checked` were read at their first hit and are sound,
    `failed` are not.
    """

    restored: int
    dropped: int
    kept: int
    checked: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounts:
    """Blocks of a disk tier, of which `stored` are there now.

    Of those that were evicted so far `written` went there, `dropped` found no room in the queue and
    `skipped` were used too seldom. Of those that came back `damaged` were not used. `failures`
    counts how often the disk failed.
    """

    stored: int
    written: int
    dropped: int
    skipped: int
    damaged: int
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCounts:
    """Loads of a disk tier, and the tokens that they brought.

    Of the loads that were possible `refused` were predicted to take longer than computing, and
    of those that were `started`, `late` ones did.
    """

    started: int
    refused: int
    late: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Guessed tokens by where they came from, and how often a request had any in a step."""

    drafts: int
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Values that are read at the moment somebody asks; the cache's are a share from 0 to 1."""

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_in_flight_waits: int = 0
    num_window_missed_tokens: int = 0
    num_cached_blocks: int = 0
    num_free_blocks: int = 0
    num_evictions: int = 0
    num_pinned_blocks: int = 0
    num_pins: int = 0
    num_demotions: int = 0
    num_pinned_evictions: int = 0
    num_pinned_hits: int = 0
    num_hinted_blocks: int = 0
    num_hints_demoted: int = 0
    num_hints_expired: int = 0
    num_below_threshold: Mapping[str, int] = field(default_factory=dict[str, int])
    num_stale_tokens: Mapping[int, int] = field(default_factory=dict[int, int])
    pool: PoolGauges | None = None
    file: FileCounts | None = None
    disk: DiskCounts | None = None
    loads: LoadCounts | None = None
    drafts: DraftCounts | None = None
    weights: WeightsInfo | None = None


class Histogram:
    """Counts of observations by upper bound, as Prometheus wants them.

    prometheus-client's own takes two locks for each observation and several times as long, which
    counts where each token is observed.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Adds one observation."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Adds many observations."""
        places = np.searchsorted(self._bounds, values, side="left")
        counts = np.bincount(places, minlength=len(self._counts)).tolist()
        self.replace(map(operator.add, self._counts, counts), self._sum + float(values.sum()))

    def replace(self, counts: Iterable[int], total: float) -> None:
        """Sets the counts by bound, the last those above all bounds, and the sum of the values."""
        self._counts, self._sum = list(counts), total

    @property
    def bounds(self) -> tuple[float, ...]:
        """The upper bounds, ascending; what is above the last one is counted too."""
        return self._bounds

    @property
    def counts(self) -> list[int]:
        """Observations so far by bound, the last those above all bounds. From any thread."""
        return self._counts.copy()

    def family(self) -> HistogramMetricFamily:
        """The histogram as it stands now."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, itertools.accumulate(self._counts), strict=True))
        return HistogramMetricFamily(
            PREFIX + self._name, self._documentation, buckets=buckets, sum_value=self._sum
        )


class Metrics(Collector):
    """What one engine counted; `registry` serves it to prometheus-client.

    `of_blocks` adds families, and `miss_counts` are requests by the reason of their miss, where
    somebody looks them up.
    """

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self.gauges = gauges
        self.of_blocks: Callable[[], Iterable[Metric]] = tuple
        self.of_recording: Callable[[], Iterable[Metric]] = tuple
        self.of_events: Callable[[], Iterable[Metric]] = tuple
        self.miss_counts: Mapping[str, int] | None = None
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.queue_full_refusals = 0
        self.key_limit_refusals = 0
        self.finished: Counter[FinishReason] = Counter()
        self._histograms: list[Histogram] = []
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _SECONDS
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a request.", _SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step of a request.", _SECONDS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _SECONDS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _SECONDS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _REQUEST_TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", _REQUEST_TOKENS
        )
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", _TOKENS
        )
        self.step_overhead = self._histogram(
            "step_overhead_seconds", "Time of a step outside the runner.", _OVERHEAD_SECONDS
        )
        self.resize_slice = self._histogram(
            "kv_cache_resize_slice_seconds", "What a step waits for a resize.", _SECONDS
        )
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All metric families, for prometheus-client."""
        gauges = self.gauges()
        yield from _gauge_families(gauges)
        if gauges.pool is not None:
            yield from _pool_families(gauges.pool)
        if gauges.file is not None:
            yield from _file_families(gauges.file)
        if gauges.disk is not None and gauges.loads is not None:
            yield from _disk_families(gauges.disk, gauges.loads)
        if gauges.drafts is not None:
            yield from _draft_families(gauges.drafts)
        yield from self._counter_families(gauges)
        yield from (histogram.family() for histogram in self._histograms)
        yield from self.of_blocks()
        yield from self.of_recording()
        yield from self.of_events()

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
        self._histograms.append(Histogram(name, documentation, bounds))
        return self._histograms[-1]

    def _counter_families(self, gauges: Gauges) -> Iterator[Metric]:
        yield from _families(
            CounterMetricFamily,
            ("num_preemptions", "Preemptions so far.", gauges.num_preemptions),
            ("prompt_tokens", "Prompt tokens processed.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("prefix_cache_queries", "Tokens looked up.", gauges.num_queried_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", gauges.num_hit_tokens),
            ("queue_full_refusals", "Refused: too many waited.", self.queue_full_refusals),
            ("key_limit_refusals", "Refused: too many of a key waited.", self.key_limit_refusals),
            ("in_flight_waits", "Waits for another's blocks.", gauges.num_in_flight_waits),
            (
                "window_missed_tokens",
                "Tokens that full attention had in the cache and sliding windows did not.",
                gauges.num_window_missed_tokens,
            ),
            ("evictions", "Cached blocks that were evicted.", gauges.num_evictions),
            ("pins", "Blocks pinned.", gauges.num_pins),
            ("demotions", "Pins that ended for younger ones.", gauges.num_demotions),
            ("pinned_evictions", "Pinned blocks evicted.", gauges.num_pinned_evictions),
            ("pinned_hits", "Hits on pinned blocks.", gauges.num_pinned_hits),
            ("hints_demoted", "Blocks demoted over a budget.", gauges.num_hints_demoted),
            ("hints_expired", "Blocks whose TTL ended.", gauges.num_hints_expired),
        )
        yield _labelled_counter(
            "request_success", "Requests that ended.", "finished_reason", self.finished
        )
        yield _labelled_counter(
            "cache_threshold_refusals",
            "Requests that ended below a cache hit threshold.",
            "source",
            gauges.num_below_threshold,
        )
        if gauges.num_stale_tokens:
            yield _labelled_counter(
                "prefix_cache_stale_hits",
                "Tokens hit that older weights had computed, by updates of the weights since.",
                "updates",
                {str(age): count for age, count in gauges.num_stale_tokens.items()},
            )
        if self.miss_counts is not None:
            yield _labelled_counter(
                "prefix_cache_misses",
                "Requests by why the first block that did not hit did not.",
                "reason",
                dict(self.miss_counts),
            )


class LabelledMetrics(Collector):
    """Metrics of one engine under labels that all of them get, its model's name for one.

    `prefix` takes the place of ours: under "vllm", with vLLM's label `engine` too, dashboards made
    for vLLM find what they ask for.
    """

    def __init__(
        self, metrics: Metrics, *, prefix: MetricsPrefix = "prefixcache", **labels: str
    ) -> None:
        self._metrics = metrics
        self._prefix = f"{prefix}:"
        self._labels = labels | ({"engine": "0"} if prefix == "vllm" else {})

    def collect(self) -> Iterable[Metric]:
        """All metric families, for prometheus-client."""
        for family in self._metrics.collect():
            family.name = self._named(family.name)
            family.samples = [
                sample._replace(name=self._named(sample.name), labels=self._labels | sample.labels)
                for sample in family.samples
            ]
            yield family

    def _named(self, name: str) -> str:
        return self._prefix + name.removeprefix(PREFIX)


def _labelled_counter(
    name: str,
    documentation: str,
    label: str,
    counts: Mapping[FinishReason, int] | Mapping[str, int],
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], *rows: tuple[str, str, float]
) -> Iterator[Metric]:
    """One family for each name, text and value."""
    for name, documentation, value in rows:
        yield kind(PREFIX + name, documentation, value=value)


def _gauge_families(gauges: Gauges) -> Iterator[Metric]:
    yield from _families(
        GaugeMetricFamily,
        ("num_requests_running", "Requests that hold blocks.", gauges.num_running),
        ("num_requests_waiting", "Requests not started.", gauges.num_waiting),
        ("kv_cache_usage_perc", "Share of blocks held, 0 to 1.", gauges.cache_usage),
        ("cached_blocks", "Blocks that can be hit, held or free.", gauges.num_cached_blocks),
        (
            "free_blocks",
            "Blocks that no request holds, cached ones included.",
            gauges.num_free_blocks,
        ),
        ("pinned_blocks", "Blocks that are evicted last.", gauges.num_pinned_blocks),
        ("hinted_blocks", "Blocks that a hint ranks.", gauges.num_hinted_blocks),
    )
    if (weights := gauges.weights) is not None:
        mapped = "Weights that the start mapped from a file."
        yield from _families(
            GaugeMetricFamily,
            ("weights_bytes", "Memory of the weights.", weights.bytes),
            ("weights_mapped_bytes", mapped, weights.mapped_bytes),
        )


def _pool_families(pool: PoolGauges) -> Iterator[Metric]:
    yield from _families(
        GaugeMetricFamily,
        ("kv_cache_blocks", "Blocks of the cache now.", pool.num_blocks),
        ("kv_cache_reserved_bytes", "Address space of the KV cache.", pool.reserved_bytes),
        ("kv_cache_mapped_bytes", "Memory that the system has given for it.", pool.mapped_bytes),
        ("kv_cache_held_bytes", "Memory of blocks that requests hold.", pool.held_bytes),
    )
    yield from _families(
        CounterMetricFamily,
        ("kv_cache_resizes", "Changes of the cache's size.", pool.resizes),
        ("kv_cache_blocks_moved", "Cached blocks moved by a shrink.", pool.blocks_moved),
        ("kv_cache_blocks_lost", "Cached blocks lost to a shrink.", pool.blocks_lost),
        ("kv_cache_blocks_released", "Blocks taken out of the cache.", pool.blocks_released),
        ("kv_cache_released_bytes", "Memory given back to the system.", pool.bytes_given_back),
        ("kv_cache_resize_seconds", "Time that steps waited for resizes.", pool.seconds),
    )


def _file_families(file: FileCounts) -> Iterator[Metric]:
    yield from _families(
        CounterMetricFamily,
        ("kv_file_restored_blocks", "Blocks found in the file at the start.", file.restored),
        ("kv_file_dropped_blocks", "Blocks of the file that could not be used.", file.dropped),
        ("kv_file_kept_blocks", "Blocks that the next process can find.", file.kept),
        ("kv_file_checked_blocks", "Restored blocks that are sound.", file.checked),
        ("kv_file_failed_checks", "Restored blocks that were damaged.", file.failed),
    )


def _disk_families(disk: DiskCounts, loads: LoadCounts) -> Iterator[Metric]:
    yield from _families(GaugeMetricFamily, ("disk_blocks", "Blocks on the disk.", disk.stored))
    yield from _families(
        CounterMetricFamily,
        ("disk_written_blocks", "Evicted blocks that went to the disk.", disk.written),
        ("disk_dropped_blocks", "Evicted blocks that the queue had no room for.", disk.dropped),
        ("disk_skipped_blocks", "Evicted blocks that were used too seldom.", disk.skipped),
        ("disk_damaged_blocks", "Blocks that were not as they were written.", disk.damaged),
        ("disk_failures", "Times that the disk failed.", disk.failures),
        ("disk_loads", "Loads from the disk.", loads.started),
        ("disk_refused_loads", "Loads predicted slower than computing.", loads.refused),
        ("disk_late_loads", "Loads that took longer than computing.", loads.late),
        ("disk_hits", "Tokens loaded from the disk.", loads.tokens),
    )


def _draft_families(counts: DraftCounts) -> Iterator[Metric]:
    yield from _families(
        CounterMetricFamily,
        ("spec_decode_num_drafts", "Times that tokens were guessed.", counts.drafts),
    )
    yield _labelled_counter(
        "spec_decode_num_draft_tokens", "Tokens that were guessed.", "source", counts.drafted
    )
    yield _labelled_counter(
        "spec_decode_num_accepted_tokens", "Guesses that were right.", "source", counts.accepted
    )
