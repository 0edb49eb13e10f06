"""The numbers of a report, side by side: rows of text that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixcache.tools.bench.reports.report import Report
from prefixcache.tools.boxes import boxed

UNKNOWN = "not reported"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `better` names the side a ratio is counted towards.

    `unless_known` is shown where the value is None; a row without is left out where all are.
    """

    label: str
    field: str
    scale: float = 1.0
    digits: int = 1
    better: str = ""
    unless_known: str = ""
    unit: str = ""


ROWS = (
    Row("requests", "requests", digits=0),
    Row("failed requests", "failed_requests", digits=0),
    Row("requests/s", "requests_per_second", digits=2, better="high"),
    Row("output tokens/s", "output_tokens_per_second", better="high"),
    Row("prompt tokens computed", "computed_tokens", 1, 0, "low", UNKNOWN),
    Row("prompt tokens from cache", "cached_tokens", 1, 0, "", UNKNOWN),
    Row("hit rate", "hit_rate", 100, 1, "", UNKNOWN, "%"),
    Row("TTFT p50 (ms)", "ttft_p50", 1e3, better="low"),
    Row("TTFT p90 (ms)", "ttft_p90", 1e3, better="low"),
    Row("TTFT p99 (ms)", "ttft_p99", 1e3, better="low"),
    Row("inter-token p50 (ms)", "inter_token_p50", 1e3, better="low"),
    Row("inter-token p90 (ms)", "inter_token_p90", 1e3, better="low"),
    Row("inter-token p99 (ms)", "inter_token_p99", 1e3, better="low"),
    Row("latency p50 (ms)", "latency_p50", 1e3, better="low"),
    Row("within the SLO", "slo_attainment", 100, unit="%"),
    Row("goodput (requests/s)", "goodput", digits=2, better="high"),
    Row("answers equal to baseline", "same_outputs", digits=0),
)
# Rows that say nothing where they are 0.
_ONLY_IF_ANY = frozenset({"failed_requests"})


def lines(columns: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Label and cells of every row: medians by field, the first column's being the baseline."""
    made = list[tuple[str, list[str]]]()
    for row in ROWS:
        values = [column.get(row.field) for column in columns]
        if _says_something(row, values):
            made.append((row.label, _cells(row, values)))
    return made


def _says_something(row: Row, values: Sequence[float | None]) -> bool:
    if row.field in _ONLY_IF_ANY:
        return any(values)
    return bool(row.unless_known) or any(value is not None for value in values)


def _cells(row: Row, values: Sequence[float | None]) -> list[str]:
    cells = [_cell(row, value) for value in values]
    better = ["", *(_times_better(row, values[0], value) for value in values[1:])]
    return [cell + times for cell, times in zip(cells, better, strict=True)]


def _cell(row: Row, value: float | None) -> str:
    if value is None:
        return row.unless_known or "-"
    return f"{value * row.scale:,.{row.digits}f}{row.unit}"


def _times_better(row: Row, base: float | None, value: float | None) -> str:
    if not row.better or not base or not value:
        return ""
    return f" ({value / base if row.better == 'high' else base / value:.2f}x)"


def table(names: Sequence[str], columns: Sequence[dict[str, Any]]) -> str:
    """The lines for a terminal."""
    return boxed(["", *names], [[label, *cells] for label, cells in lines(columns)])


def heading(report: Report) -> str:
    """The line above the table."""
    runs = len(report.variants[0].runs) if report.variants else 0
    return f"{describe(report.settings)}; median of {runs} run{'' if runs == 1 else 's'}"


def describe(settings: dict[str, Any]) -> str:
    """The workload in one line."""
    name = settings.get("workload", "shared-prefix")
    if name == "trace":
        return f"trace {settings['trace']}{_scale(settings)}"
    prefix = f"{settings['prefix_len']:,}"
    lengths = (
        f"{settings['suffix_len']:,} own prompt tokens, {settings['output_len']:,} output tokens"
    )
    if name == "shared-prefix":
        text = f"{settings['num_requests']} requests, {prefix} shared + {lengths}"
    elif name == "documents":
        text = (
            f"{settings['num_requests']} questions to {settings['num_documents']} documents of "
            f"{prefix} tokens, {lengths}"
        )
    elif name == "multi-turn":
        text = (
            f"{settings['num_sessions']} dialogues of {settings['turns']} turns, {prefix} shared "
            f"+ {lengths} a turn"
        )
    else:
        text = (
            f"{settings['num_sessions']} agents, median {settings['turns']} turns, {prefix} shared "
            f"+ {lengths} a turn in the median"
        )
    return text + _scale(settings)


def _scale(settings: dict[str, Any]) -> str:
    scale = settings.get("scale_lengths", 1.0)
    return "" if scale == 1.0 else f", lengths times {scale:g}"
