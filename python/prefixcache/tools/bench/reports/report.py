"""From timed requests to numbers, and to the JSON file that keeps them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from prefixcache.tools.bench.machine import machine_facts, now
from prefixcache.tools.bench.records import RequestRecord, Run, is_good

# Outputs by session and turn, with which others are compared.
Reference = Mapping[tuple[str, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run, or the median of several. Times in seconds; None is what nobody knows.

    `computed_tokens` are prompt tokens that went through the model, `cached_tokens` those that the
    cache saved, `hit_rate` their share; None where the server does not report it. `slo_attainment`
    is the share of all requests, failed ones too, that kept within the objectives, and `goodput`
    how many of them a second. `same_outputs` counts answers equal to the baseline's first run.
    """

    duration: float
    requests: float
    failed_requests: float
    requests_per_second: float | None
    output_tokens_per_second: float | None
    prompt_tokens: float
    computed_tokens: float | None
    cached_tokens: float | None
    hit_rate: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    inter_token_p50: float | None
    inter_token_p90: float | None
    inter_token_p99: float | None
    latency_p50: float | None
    latency_p99: float | None
    slo_attainment: float | None
    goodput: float | None
    same_outputs: float | None


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of serving, measured several times."""

    name: str
    runs: tuple[tuple[RequestRecord, ...], ...]
    summaries: tuple[Summary, ...]

    @property
    def median(self) -> Summary:
        """Field by field over the runs."""
        columns = {
            field.name: [getattr(summary, field.name) for summary in self.summaries]
            for field in fields(Summary)
        }
        return Summary(**{name: _median(column) for name, column in columns.items()})

    @property
    def typical_run(self) -> tuple[RequestRecord, ...]:
        """Of the runs with answers the one whose duration is the median; empty without any."""
        answered = (run for run, records in enumerate(self.runs) if records)
        order = sorted(answered, key=lambda run: self.summaries[run].duration)
        return self.runs[order[len(order) // 2]] if order else ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one `prefixcache bench` measured. The first variant is the baseline.

    `remarks` say what its reader must know of the numbers, `errors` what went wrong.
    """

    command: str
    date: str
    machine: dict[str, str | int]
    settings: dict[str, Any]
    variants: tuple[Variant, ...]
    remarks: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def has_records(self) -> bool:
        """Whether any request was answered."""
        return any(records for variant in self.variants for records in variant.runs)


def medians(report: Report) -> list[dict[str, Any]]:
    """The median of each variant, by field."""
    return [asdict(variant.median) for variant in report.variants]


def make_report(
    command: str,
    settings: dict[str, Any],
    runs: Mapping[str, Sequence[Run]],
    *,
    objectives: Mapping[str, float] | None = None,
    remarks: Sequence[str] = (),
    errors: Sequence[str] = (),
    compares_outputs: bool = True,
) -> Report:
    """`runs` holds the runs of every variant, the baseline first. Who has none is left out."""
    measured = {name: repeats for name, repeats in runs.items() if repeats}
    reference: Reference = _outputs(next(iter(measured.values()))[0]) if measured else {}
    variants = tuple(
        Variant(
            name,
            tuple(tuple(run.records) for run in repeats),
            tuple(
                summarize(run, objectives or {}, reference if compares_outputs else None)
                for run in repeats
            ),
        )
        for name, repeats in measured.items()
    )
    return Report(
        command,
        now(),
        dict(machine_facts()),
        settings,
        variants,
        (*remarks, *_length_remarks(measured)),
        (*errors, *_errors(measured)),
    )


def _outputs(run: Run) -> Reference:
    return {(record.session, record.turn): record.output for record in run.records}


def _length_remarks(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    too_long = max((run.too_long for repeats in runs.values() for run in repeats), default=0)
    if not too_long:
        return []
    return [f"{too_long} sessions of a run ended where prompts grew longer than the model takes."]


def _errors(runs: Mapping[str, Sequence[Run]]) -> tuple[str, ...]:
    """What ended runs, and how many requests failed, with the first reason of each variant."""
    problems = list[str]()
    for name, repeats in runs.items():
        problems += [f"{name}: {run.error}" for run in repeats if run.error is not None]
        failures = [failure for run in repeats for failure in run.failures]
        if failures:
            problems.append(f"{name}: {len(failures)} requests failed, the first: {failures[0]}")
    return tuple(problems)


def summarize(run: Run, objectives: Mapping[str, float], reference: Reference | None) -> Summary:
    """Numbers of one run; `reference` is what its answers are compared with."""
    records = run.records
    duration = _duration(records)
    ttft = [record.ttft for record in records]
    gaps = [gap for record in records for gap in record.inter_token]
    latency = [record.latency for record in records]
    prompt_tokens, cached = sum(record.prompt_tokens for record in records), _cached(records)
    good = sum(is_good(record, objectives) for record in records)
    asked = len(records) + len(run.failures)
    return Summary(
        duration=duration,
        requests=len(records),
        failed_requests=len(run.failures),
        requests_per_second=_ratio(len(records), duration),
        output_tokens_per_second=_ratio(sum(r.output_tokens for r in records), duration),
        prompt_tokens=prompt_tokens,
        computed_tokens=None if cached is None else prompt_tokens - cached,
        cached_tokens=cached,
        hit_rate=None if cached is None else _ratio(cached, prompt_tokens),
        ttft_p50=_percentile(ttft, 50),
        ttft_p90=_percentile(ttft, 90),
        ttft_p99=_percentile(ttft, 99),
        inter_token_p50=_percentile(gaps, 50),
        inter_token_p90=_percentile(gaps, 90),
        inter_token_p99=_percentile(gaps, 99),
        latency_p50=_percentile(latency, 50),
        latency_p99=_percentile(latency, 99),
        slo_attainment=_ratio(good, asked) if objectives else None,
        goodput=_ratio(good, duration) if objectives else None,
        same_outputs=None if reference is None else _count_same(records, reference),
    )


def _duration(records: Sequence[RequestRecord]) -> float:
    """From the first request to the last answer."""
    if not records:
        return 0.0
    return max(r.arrivals[-1] for r in records) - min(r.sent for r in records)


def _cached(records: Sequence[RequestRecord]) -> int | None:
    counts = [record.cached_tokens for record in records]
    reported = [count for count in counts if count is not None]
    return sum(reported) if len(reported) == len(counts) else None


def _count_same(records: Sequence[RequestRecord], reference: Reference) -> int:
    return sum(record.output == reference.get((record.session, record.turn)) for record in records)


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None


def _median(column: list[float | None]) -> Any:
    present = [value for value in column if value is not None]
    return statistics.median(present) if present else None


def _percentile(values: Iterable[float], rank: float) -> float | None:
    array = np.fromiter(values, dtype=np.float64)
    return float(np.percentile(array, rank)) if len(array) else None


def to_json(report: Report) -> dict[str, Any]:
    """What `--output` writes: facts, settings, medians, and each run with its requests."""
    return {
        "command": report.command,
        "date": report.date,
        "machine": report.machine,
        "settings": report.settings,
        "remarks": report.remarks,
        "errors": report.errors,
        "variants": [_variant_json(variant) for variant in report.variants],
    }


def _variant_json(variant: Variant) -> dict[str, Any]:
    runs = zip(variant.summaries, variant.runs, strict=True)
    return {
        "name": variant.name,
        "median": _rounded(asdict(variant.median)),
        "runs": [
            _rounded(asdict(summary)) | {"requests": _columns(records)} for summary, records in runs
        ],
    }


def _columns(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    start = min((record.sent for record in records), default=0.0)
    return {
        "session": [record.session for record in records],
        "turn": [record.turn for record in records],
        "sent": [round(record.sent - start, 6) for record in records],
        "ttft": [round(record.ttft, 6) for record in records],
        "latency": [round(record.latency, 6) for record in records],
        "prompt_tokens": [record.prompt_tokens for record in records],
        "cached_tokens": [record.cached_tokens for record in records],
        "output_tokens": [record.output_tokens for record in records],
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in values.items()}
