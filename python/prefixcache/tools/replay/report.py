"""From a replay's results to a table and a JSON file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from prefixcache.tools.bench.machine import now
from prefixcache.tools.boxes import boxed
from prefixcache.tools.replay.run import Row, TraceResult
from prefixcache.tools.replay.ttft_model import TtftModel


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one `prefixcache replay` found."""

    command: str
    traces: tuple[TraceResult, ...]
    model: TtftModel | None
    goodput: str | None
    verdicts: tuple[str, ...] = ()


def heading(trace: TraceResult) -> str:
    """The line above a trace's table."""
    parts = [
        f"{trace.name}: {trace.requests:,} requests",
        f"{trace.input_tokens:,} prompt tokens",
        f"blocks of {trace.block_size}",
    ]
    if trace.unique_blocks is not None:
        parts.append(f"{trace.unique_blocks:,} different ones")
    return ", ".join(parts)


def infinite_line(trace: TraceResult) -> str | None:
    """What a cache without a bound hits."""
    if trace.infinite is None or trace.infinite_requests is None:
        return None
    return (
        f"An infinite cache hits {_percent(trace.infinite)} % of the tokens, and something for "
        f"{_percent(trace.infinite_requests)} % of the requests."
    )


def recorded_line(trace: TraceResult) -> str | None:
    """Whether a recording's own calls, made again, count what the live server counted."""
    recorded = trace.as_recorded
    if recorded is None:
        return None
    live, again = recorded["live"], recorded["replayed"]
    text = (
        f"As recorded ({recorded['num_blocks'] - 1:,} blocks, {recorded['eviction_policy']}): "
        f"the server counted {live['hits']:,} of {live['queries']:,} tokens as hits, its calls "
        f"made again {again['hits']:,} of {again['queries']:,}"
    )
    return (
        f"{text}; the first difference: {recorded['difference']}."
        if recorded["difference"]
        else text + "."
    )


def tables(trace: TraceResult, goodput: str | None) -> list[str]:
    """Hits by policy and size and what they could be; those of a disk, or predicted waits."""
    hits = _table(trace, ("blocks", "tokens %", "optimum", "requests %", "evictions"), _cells)
    if any(row.setting.disk for row in trace.rows):
        return [hits, _table(trace, ("disk", "from use", "tokens %", "written"), _disk_cells)]
    if not any(row.latency for row in trace.rows):
        return [hits]
    columns = ["TTFT p50 ms", "p90 ms", "p99 ms"]
    if goodput:
        columns += [f"{goodput} %", "goodput/s"]
    return [hits, _table(trace, columns, _latency_cells)]


def _table(
    trace: TraceResult, columns: Sequence[str], cells: Callable[[Row], Sequence[str]]
) -> str:
    sections = [
        [[row.setting.name, str(row.size), *cells(row)] for row in rows]
        for _, rows in groupby(trace.rows, attrgetter("setting"))
    ]
    return boxed(["policy", "size", *columns], *sections)


def remarks(report: Report) -> list[str]:
    """What has to be known to read the numbers."""
    lines = list[str]()
    if report.model is not None:
        lines.append(
            f"TTFT (p50, p90, p99) and goodput are predictions: {report.model}, prompts one after "
            "the other, decoding left out."
        )
    if any(trace.as_recorded for trace in report.traces):
        lines.append(
            "The rows of a recording are predictions, at its own size and policy too: requests one "
            "after the other, so that no two hold blocks at once."
        )
    return lines


def _cells(row: Row) -> list[str]:
    return [
        f"{row.blocks:,}",
        _percent(row.hit_rate),
        "-" if row.optimum is None else _percent(row.optimum),
        _percent(row.request_hit_rate),
        f"{row.evictions:,}",
    ]


def _disk_cells(row: Row) -> list[str]:
    setting = row.setting
    if setting.disk is None:
        return []
    written = f"{row.disk_writes:,}"
    return [str(setting.disk), str(setting.disk_min_uses), _percent(row.disk_hit_rate), written]


def _latency_cells(row: Row) -> list[str]:
    latency = row.latency
    if latency is None:
        return []
    cells = [f"{value:,.0f}" for value in latency.ttft_ms.values()]
    if latency.good_share is not None:
        cells.append(_percent(latency.good_share))
        cells.append("-" if latency.goodput is None else f"{latency.goodput:,.2f}")
    return cells


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def to_json(report: Report) -> dict[str, Any]:
    """What `--output` writes; rates from 0 to 1, times in milliseconds."""
    return {
        "command": report.command,
        "date": now(),
        "ttft_model": None if report.model is None else asdict(report.model),
        "goodput": report.goodput,
        "remarks": remarks(report),
        "verdicts": list(report.verdicts),
        "traces": [_trace_json(trace) for trace in report.traces],
    }


def _trace_json(trace: TraceResult) -> dict[str, Any]:
    made = asdict(trace) | {"path": str(trace.path)}
    made["rows"] = [_row_json(row) for row in trace.rows]
    return made


def _row_json(row: Row) -> dict[str, Any]:
    setting = asdict(row.setting)
    del setting["model"]
    setting["disk"] = None if row.setting.disk is None else str(row.setting.disk)
    return setting | asdict(row) | {"setting": row.setting.name, "size": str(row.size)}
