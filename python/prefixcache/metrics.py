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
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from prefixcache.types.modes import SleepState, WeightsInfo
from prefixcache.types.request import FinishReason

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PREFIX = "prefixcache:"
MetricsPrefix = Literal["prefixcache", "vllm"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_OVERHEAD_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 1e-1)
_TOKENS = tuple(2**power for power in range(15))
_REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


def _shown(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, documentation: str
) -> dict[str, Any]:
    return {"family": partial(kind, PREFIX + name, documentation)}


def _gauge(name: str, documentation: str, **default: Any) -> Any:
    """A field that is shown as a gauge of that name."""
    return field(metadata=_shown(GaugeMetricFamily, name, documentation), **default)


def _counter(name: str, documentation: str, **default: Any) -> Any:
    """A field that is shown as a counter of that name."""
    return field(metadata=_shown(CounterMetricFamily, name, documentation), **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks by state, and what became of them, by the core's names."""

    cached_blocks: int = _gauge("cached_blocks", "Blocks that can be hit, held or free.", default=0)
    free_blocks: int = _gauge(
        "free_blocks", "Blocks that no request holds, cached ones included.", default=0
    )
    evictions: int = _counter("evictions", "Cached blocks that were evicted.", default=0)
    pinned_blocks: int = _gauge("pinned_blocks", "Blocks that are evicted last.", default=0)
    pins: int = _counter("pins", "Blocks pinned.", default=0)
    demotions: int = _counter("demotions", "Pins that ended for younger ones.", default=0)
    pinned_evictions: int = _counter("pinned_evictions", "Pinned blocks evicted.", default=0)
    pinned_hits: int = _counter("pinned_hits", "Hits on pinned blocks.", default=0)
    hinted_blocks: int = _gauge("hinted_blocks", "Blocks that a hint ranks.", default=0)
    hints_demoted: int = _counter("hints_demoted", "Blocks demoted over a budget.", default=0)
    hints_expired: int = _counter("hints_expired", "Blocks whose TTL ended.", default=0)


def block_counts(core: Mapping[str, int]) -> dict[str, int]:
    """The fields of `BlockCounts`, out of all that the core counts."""
    return {field.name: core[field.name] for field in fields(BlockCounts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeCounts:
    """What resizes did over the engine's lifetime.

    Blocks that went back are counted as released, whether they were cached or not.
    """

    resizes: int = _counter("kv_cache_resizes", "Changes of the cache's size.", default=0)
    blocks_moved: int = _counter(
        "kv_cache_blocks_moved", "Cached blocks moved by a shrink.", default=0
    )
    blocks_lost: int = _counter(
        "kv_cache_blocks_lost", "Cached blocks lost to a shrink.", default=0
    )
    blocks_released: int = _counter(
        "kv_cache_blocks_released", "Blocks taken out of the cache.", default=0
    )
    bytes_given_back: int = _counter(
        "kv_cache_released_bytes", "Memory given back to the system.", default=0
    )
    seconds: float = _counter(
        "kv_cache_resize_seconds", "Time that steps waited for resizes.", default=0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGauges(ResizeCounts):
    """The memory of the KV cache and its resizes."""

    num_blocks: int = _gauge("kv_cache_blocks", "Blocks of the cache now.")
    reserved_bytes: int = _gauge("kv_cache_reserved_bytes", "Address space of the KV cache.")
    mapped_bytes: int = _gauge("kv_cache_mapped_bytes", "Memory that the system has given for it.")
    held_bytes: int = _gauge("kv_cache_held_bytes", "Memory of blocks that requests hold.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCounts:
    """Blocks of a cache that outlives its process, at the start and since then."""

    restored: int = _counter("kv_file_restored_blocks", "Blocks found in the file at the start.")
    dropped: int = _counter("kv_file_dropped_blocks", "Blocks of the file that could not be used.")
    kept: int = _counter("kv_file_kept_blocks", "Blocks that the next process can find.")
    checked: int = _counter("kv_file_checked_blocks", "Restored blocks that are sound.")
    failed: int = _counter("kv_file_failed_checks", "Restored blocks that were damaged.")
    failed_syncs: int = _counter("kv_file_failed_syncs", "Resets that the disk did not take.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounts:
    """Blocks of a disk tier. Those that were evicted so far were written, dropped or skipped."""

    stored: int = _gauge("disk_blocks", "Blocks on the disk.")
    written: int = _counter("disk_written_blocks", "Evicted blocks that went to the disk.")
    dropped: int = _counter("disk_dropped_blocks", "Evicted blocks that the queue had no room for.")
    skipped: int = _counter("disk_skipped_blocks", "Evicted blocks that were used too seldom.")
    damaged: int = _counter("disk_damaged_blocks", "Blocks that were not as they were written.")
    failures: int = _counter("disk_failures", "Times that the disk failed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCounts:
    """Loads of a disk tier that were possible, and the tokens that they brought."""

    started: int = _counter("disk_loads", "Loads from the disk.")
    refused: int = _counter("disk_refused_loads", "Loads predicted slower than computing.")
    late: int = _counter("disk_late_loads", "Loads that took longer than computing.")
    tokens: int = _counter("disk_hits", "Tokens loaded from the disk.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Guessed tokens by where they came from, and how often a request had any in a step."""

    drafts: int = _counter("spec_decode_num_drafts", "Times that tokens were guessed.")
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges(BlockCounts):
    """Values that are read at the moment somebody asks; the cache's are a share from 0 to 1."""

    num_running: int = _gauge("num_requests_running", "Requests that hold blocks.", default=0)
    num_waiting: int = _gauge("num_requests_waiting", "Requests not started.", default=0)
    cache_usage: float = _gauge("kv_cache_usage_perc", "Share of blocks held, 0 to 1.", default=0)
    num_preemptions: int = _counter("num_preemptions", "Preemptions so far.", default=0)
    num_queried_tokens: int = _counter("prefix_cache_queries", "Tokens looked up.", default=0)
    num_hit_tokens: int = _counter(
        "prefix_cache_hits", "Tokens found in the prefix cache.", default=0
    )
    num_in_flight_waits: int = _counter("in_flight_waits", "Waits for another's blocks.", default=0)
    num_window_missed_tokens: int = _counter(
        "window_missed_tokens",
        "Tokens that full attention had in the cache and sliding windows did not.",
        default=0,
    )
    num_below_threshold: Mapping[str, int] = field(default_factory=dict[str, int])
    num_stale_tokens: Mapping[int, int] = field(default_factory=dict[int, int])
    cache_config: Mapping[str, str] = field(default_factory=dict[str, str])
    sleep_state: SleepState = "awake"
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


def resize_slices() -> Histogram:
    """A histogram of how long slices of a resize take."""
    return Histogram("kv_cache_resize_slice_seconds", "What a step waits for a resize.", _SECONDS)


class Metrics(Collector):
    """What one engine counted; `registry` serves it to prometheus-client.

    Each of `more` adds families.
    """

    def __init__(self, gauges: Callable[[], Gauges], *histograms: Histogram) -> None:
        self.gauges = gauges
        self.more: list[Callable[[], Iterable[Metric]]] = []
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.queue_full_refusals = 0
        self.key_limit_refusals = 0
        self.finished: Counter[FinishReason] = Counter()
        self._histograms = list(histograms)
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
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "From the first step to the last token.", _SECONDS
        )
        self.time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens of a request.",
            _SECONDS,
        )
        self.request_max_tokens = self._histogram(
            "request_params_max_tokens",
            "Most tokens that a request might generate.",
            _REQUEST_TOKENS,
        )
        self.computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not cached.",
            _REQUEST_TOKENS,
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
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All metric families, for prometheus-client."""
        gauges = self.gauges()
        for part in (gauges, gauges.pool, gauges.file, gauges.disk, gauges.loads, gauges.drafts):
            yield from _families(part)
        if gauges.weights is not None:
            yield from _weights_families(gauges.weights)
        yield from self._counter_families()
        yield from _labelled_families(gauges)
        yield from _info_families(gauges)
        yield from (histogram.family() for histogram in self._histograms)
        for families in self.more:
            yield from families()

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
        self._histograms.append(Histogram(name, documentation, bounds))
        return self._histograms[-1]

    def _counter_families(self) -> Iterator[Metric]:
        rows = (
            ("prompt_tokens", "Prompt tokens processed.", self.prompt_tokens),
            ("prompt_tokens_cached", "Those that were cached.", self.cached_prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("queue_full_refusals", "Refused: too many waited.", self.queue_full_refusals),
            ("key_limit_refusals", "Refused: too many of a key waited.", self.key_limit_refusals),
        )
        for name, documentation, value in rows:
            yield CounterMetricFamily(PREFIX + name, documentation, value=value)
        yield labelled_counter(
            "request_success", "Requests that ended.", "finished_reason", self.finished
        )


class LabelledMetrics(Collector):
    """Metrics of one engine under labels that all of them get, its model's name for one, and those
    of its process under prometheus-client's own names.

    `prefix` takes the place of ours: under "vllm", with vLLM's label `engine` too, dashboards made
    for vLLM find what they ask for.
    """

    def __init__(
        self, metrics: Metrics, *, prefix: MetricsPrefix = "prefixcache", **labels: str
    ) -> None:
        self._metrics = metrics
        self._prefix = f"{prefix}:"
        self._labels = labels | ({"engine": "0"} if prefix == "vllm" else {})
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Metric]:
        """All metric families, for prometheus-client."""
        for family in (*self._metrics.collect(), *self._process.collect()):
            family.name = self._named(family.name)
            family.samples = [
                sample._replace(name=self._named(sample.name), labels=self._labels | sample.labels)
                for sample in family.samples
            ]
            yield family

    def _named(self, name: str) -> str:
        return name.replace(PREFIX, self._prefix, 1)


def labelled_counter(
    name: str,
    documentation: str,
    label: str,
    counts: Mapping[FinishReason, int] | Mapping[str, int],
) -> CounterMetricFamily:
    """A counter with a value for each of `counts`, by the label."""
    family = CounterMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _families(values: DataclassInstance | None) -> Iterator[Metric]:
    """Those of the fields that are shown."""
    for member in () if values is None else fields(values):
        if member.metadata:
            yield member.metadata["family"](value=getattr(values, member.name))


def _labelled_families(gauges: Gauges) -> Iterator[Metric]:
    yield labelled_counter(
        "cache_threshold_refusals",
        "Requests that ended below a cache hit threshold.",
        "source",
        gauges.num_below_threshold,
    )
    if gauges.num_stale_tokens:
        yield labelled_counter(
            "prefix_cache_stale_hits",
            "Tokens hit that older weights had computed, by updates of the weights since.",
            "updates",
            {str(age): count for age, count in gauges.num_stale_tokens.items()},
        )
    if (drafts := gauges.drafts) is not None:
        yield labelled_counter(
            "spec_decode_num_draft_tokens", "Tokens that were guessed.", "source", drafts.drafted
        )
        yield labelled_counter(
            "spec_decode_num_accepted_tokens", "Guesses that were right.", "source", drafts.accepted
        )


def _info_families(gauges: Gauges) -> Iterator[Metric]:
    """Gauges whose labels are the message."""
    name, documentation = PREFIX + "engine_sleep_state", "1 for the state that the engine is in."
    states = GaugeMetricFamily(name, documentation, labels=["sleep_state"])
    for state in get_args(SleepState):
        states.add_metric([state], state == gauges.sleep_state)
    yield states
    config = gauges.cache_config
    info = GaugeMetricFamily(
        PREFIX + "cache_config_info", "1; the cache as it is configured.", labels=[*config]
    )
    info.add_metric([*config.values()], 1)
    yield info


def _weights_families(weights: WeightsInfo) -> Iterator[Metric]:
    mapped = "Weights that the start mapped from a file."
    yield GaugeMetricFamily(PREFIX + "weights_bytes", "Memory of the weights.", value=weights.bytes)
    yield GaugeMetricFamily(PREFIX + "weights_mapped_bytes", mapped, value=weights.mapped_bytes)
