"""From timed requests to numbers, a table and a JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from prefixcache.bench.client import RequestRecord
from prefixcache.bench.machine import machine_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run, or the median of several. Times in seconds; inter-token None for one-token outputs.

    `computed_tokens` are prompt tokens that went through the model, `cached_tokens` those that the
    cache saved. `same_outputs` counts answers equal to those of the first variant's first run.
    """

    duration: float
    requests_per_second: float
    output_tokens_per_second: float
    computed_tokens: float
    cached_tokens: float
    ttft_p50: float
    ttft_p99: float
    inter_token_p50: float | None
    inter_token_p99: float | None
    latency_p50: float
    same_outputs: float


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


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one `prefixcache bench` measured. The first variant is the baseline."""

    command: str
    date: str
    machine: dict[str, str | int]
    settings: dict[str, Any]
    variants: tuple[Variant, ...]


def make_report(
    command: str,
    settings: dict[str, Any],
    runs: dict[str, list[list[RequestRecord]]],
) -> Report:
    """`runs` holds the records of every run of every variant, the baseline first."""
    reference = [record.output for record in next(iter(runs.values()))[0]]
    variants = tuple(
        Variant(
            name,
            tuple(tuple(records) for records in repeats),
            tuple(summarize(records, reference) for records in repeats),
        )
        for name, repeats in runs.items()
    )
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Report(command, date, dict(machine_facts()), settings, variants)


def summarize(
    records: Sequence[RequestRecord], reference: Sequence[tuple[int, ...] | str]
) -> Summary:
    """Numbers of one run; `reference` are the outputs its answers are compared with."""
    duration = max(r.arrivals[-1] for r in records) - min(r.sent for r in records)
    ttft = [record.ttft for record in records]
    gaps = [gap for record in records for gap in record.inter_token]
    cached = sum(record.cached_tokens for record in records)
    return Summary(
        duration=duration,
        requests_per_second=len(records) / duration,
        output_tokens_per_second=sum(record.output_tokens for record in records) / duration,
        computed_tokens=sum(record.prompt_tokens for record in records) - cached,
        cached_tokens=cached,
        ttft_p50=_percentile(ttft, 50),
        ttft_p99=_percentile(ttft, 99),
        inter_token_p50=_percentile(gaps, 50) if gaps else None,
        inter_token_p99=_percentile(gaps, 99) if gaps else None,
        latency_p50=_percentile([record.latency for record in records], 50),
        same_outputs=sum(
            record.output == expected for record, expected in zip(records, reference, strict=True)
        ),
    )


def _median(column: list[float | None]) -> Any:
    present = [value for value in column if value is not None]
    return statistics.median(present) if present else None


def _percentile(values: Iterable[float], rank: float) -> float:
    return float(np.percentile(np.fromiter(values, dtype=np.float64), rank))


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the table. `better` names the side a ratio is counted towards."""

    label: str
    field: str
    scale: float = 1.0
    digits: int = 1
    better: str = ""


_ROWS = (
    _Row("requests/s", "requests_per_second", digits=2, better="high"),
    _Row("output tokens/s", "output_tokens_per_second", better="high"),
    _Row("prompt tokens computed", "computed_tokens", digits=0, better="low"),
    _Row("prompt tokens from cache", "cached_tokens", digits=0),
    _Row("TTFT p50 (ms)", "ttft_p50", 1e3, better="low"),
    _Row("TTFT p99 (ms)", "ttft_p99", 1e3, better="low"),
    _Row("inter-token p50 (ms)", "inter_token_p50", 1e3, better="low"),
    _Row("inter-token p99 (ms)", "inter_token_p99", 1e3, better="low"),
    _Row("answers equal to baseline", "same_outputs", digits=0),
)


def table(report: Report) -> Table:
    """Medians of every variant; in brackets how many times better than the baseline it is."""
    medians = [variant.median for variant in report.variants]
    made = Table()
    made.add_column("")
    for variant in report.variants:
        made.add_column(variant.name, justify="right")
    for row in _ROWS:
        made.add_row(row.label, *_cells(row, medians))
    return made


def heading(report: Report) -> str:
    """The line above the table."""
    runs = len(report.variants[0].runs)
    return f"{describe(report.settings)}; median of {runs} run{'s' if runs > 1 else ''}"


def describe(settings: dict[str, Any]) -> str:
    """The workload in one line."""
    return (
        f"{settings['num_requests']} requests, {settings['prefix_len']:,} shared + "
        f"{settings['suffix_len']:,} own prompt tokens, {settings['output_len']:,} output tokens"
    )


def _cells(row: _Row, medians: Sequence[Summary]) -> list[str]:
    values = [getattr(median, row.field) for median in medians]
    cells = ["-" if v is None else f"{v * row.scale:,.{row.digits}f}" for v in values]
    better = ["", *(_times_better(row, values[0], value) for value in values[1:])]
    return [cell + times for cell, times in zip(cells, better, strict=True)]


def _times_better(row: _Row, base: float | None, value: float | None) -> str:
    if not row.better or not base or not value:
        return ""
    return f" ({value / base if row.better == 'high' else base / value:.2f}x)"


def to_json(report: Report) -> dict[str, Any]:
    """What `--output` writes: facts, settings, medians, and each run with its requests."""
    return {
        "command": report.command,
        "date": report.date,
        "machine": report.machine,
        "settings": report.settings,
        "variants": [_variant_json(variant) for variant in report.variants],
    }


def write_json(report: Report, path: Path) -> None:
    """Writes the report, its parents made where needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(report), indent=1) + "\n", encoding="utf-8")


def _variant_json(variant: Variant) -> dict[str, Any]:
    runs = zip(variant.summaries, variant.runs, strict=True)
    return {
        "name": variant.name,
        "median": _rounded(asdict(variant.median)),
        "runs": [
            _rounded(asdict(summary)) | {"requests": _columns(records)} for summary, records in runs
        ],
    }


def _columns(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        "ttft": [round(record.ttft, 6) for record in records],
        "latency": [round(record.latency, 6) for record in records],
        "cached_tokens": [record.cached_tokens for record in records],
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in values.items()}
