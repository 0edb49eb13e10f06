"""The report: what was done, what was found, and plots, for who operates such a server."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from soak.options import Options
from soak.tally import Asked, Tally
from soak.verdict import Check
from soak.watch import Rest, Sample, Watch, longest_life

_MIB = 2**20
_BUCKETS = 120
# Of the table of memory.
_NUM_COLUMNS = 6


def write_report(options: Options, tally: Tally, watch: Watch, checks: Sequence[Check]) -> None:
    """`report.md`, its plots, and `record.json` with what they were made of."""
    folder = options.report
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Axes], None]] = {
        "memory": lambda axes: _plot_memory(axes, watch),
        "queue": lambda axes: _plot_queue(axes, watch.samples),
        "latency": lambda axes: _plot_latency(axes, tally.asked, watch.samples),
        "outcomes": lambda axes: _plot_outcomes(axes, tally.asked),
        "hits": lambda axes: _plot_hits(axes, watch.samples),
    }
    for name, draw in plots.items():
        _save(folder / f"{name}.svg", draw, tally)
    record = {
        "outcomes": tally.outcomes,
        "commands": tally.commands,
        "events": tally.events,
        "violations": tally.violations,
        "rests": [_without_census(rest) for rest in watch.rests],
    }
    censuses = [{"at": rest.at, **rest.census} for rest in (*watch.rests, watch.trimmed) if rest]
    (folder / "census.json").write_text(json.dumps(censuses))
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "report.md").write_text(_text(options, tally, watch, checks))


def _without_census(rest: Rest) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(rest).items() if name != "census"}


def _text(options: Options, tally: Tally, watch: Watch, checks: Sequence[Check]) -> str:
    total = sum(tally.outcomes.values())
    command = (
        f"python -m soak --minutes {options.minutes:g} --clients {options.clients} "
        f"--rate {options.rate:g} --seed {options.seed}"
    )
    lives = len({sample.life for sample in watch.samples})
    lines = [
        "# Soak report",
        "",
        _when_and_where(watch.samples),
        "",
        f"`PYTHONPATH=tests {command}`: {options.minutes:g} minutes, {total:,} requests of up to",
        f"{options.clients:,} clients, {lives} processes of the server one after the other,",
        f"a random {options.architecture} model of two tiny sets of weights.",
        "",
        "## Findings",
        "",
        "| | claim | found |",
        "|---|---|---|",
        *(f"| {'holds' if c.holds else '**FAILS**'} | {c.claim} | {c.found} |" for c in checks),
        "",
        *_violations(tally),
        "## What became of the requests",
        "",
        "| outcome | requests |",
        "|---|---:|",
        *(f"| {outcome} | {count:,} |" for outcome, count in sorted(tally.outcomes.items())),
        "",
        *_memory_table(watch),
        *_latency_table(tally.asked),
        "## What was done to the server",
        "",
        "| command or fault | times |",
        "|---|---:|",
        *(f"| {command} | {count:,} |" for command, count in sorted(tally.commands.items())),
        "",
        *(f"- {at / 60:.1f} min: {event}" for at, event in tally.events),
        "",
        "## Over time",
        "",
        "Lines across the plots are those events.",
        "",
        *_pictures(),
        "",
    ]
    return "\n".join(lines)


def _violations(tally: Tally) -> list[str]:
    if not tally.violations:
        return []
    shown = [f"- `{told[:400].replace('`', chr(39))}`" for told in tally.violations]
    return ["## Violations", "", *shown, ""]


def _memory_table(watch: Watch) -> list[str]:
    """Whom the memory of the longest life belongs to, at looks a quarter of its time apart."""
    rests = longest_life(watch.rests)
    if watch.trimmed is not None:
        rests = [*rests, watch.trimmed]
    places = sorted({*np.linspace(0, len(rests) - 1, _NUM_COLUMNS).round().astype(int).tolist()})
    shown = [rests[place] for place in places]
    titles = [f"{rest.at / 60:.0f} min" for rest in shown]
    if shown[-1] is watch.trimmed:
        titles[-1] += ", trimmed"
    rows = [
        "## Whom the memory belongs to",
        "",
        f"| MiB of an idle server | {' | '.join(titles)} |",
        f"|---|{'---:|' * len(shown)}",
    ]
    for title, size in _HOLDERS.items():
        rows.append(f"| {title} | {' | '.join(f'{size(rest) / _MIB:.1f}' for rest in shown)} |")
    counts = " | ".join(f"{rest.census['python']['objects']:,}" for rest in shown)
    return [*rows, f"| Python's objects (number) | {counts} |", ""]


def _in_mappings(rest: Rest, prefix: str) -> int:
    sizes: dict[str, int] = rest.census["resident"]
    return sum(size for name, size in sizes.items() if name.startswith(prefix))


_HOLDERS: dict[str, Callable[[Rest], float]] = {
    "resident": lambda rest: rest.rss,
    "of it huge pages": lambda rest: sum(rest.census["huge"].values()),
    "the cache's own pages": lambda rest: rest.mapped,
    "files: programs, libraries, weights": lambda rest: _in_mappings(rest, "files"),
    "C's allocator: in use in arenas": lambda rest: rest.census["malloc"]["uordblks"],
    "C's allocator: free in arenas": lambda rest: rest.census["malloc"]["fordblks"],
    "C's allocator: mappings of their own": lambda rest: rest.census["malloc"]["hblkhd"],
    "resident in its arenas": lambda rest: (
        _in_mappings(rest, "arena") + _in_mappings(rest, "[heap]")
    ),
    "Python's allocator: in use": lambda rest: rest.census["python"]["bytes_in_blocks"],
    "Python's allocator: free": lambda rest: rest.census["python"]["bytes_free"],
}


def _latency_table(asked: Sequence[Asked]) -> list[str]:
    """Of those that were answered whole, and of those refused."""
    rows = ["| seconds | p50 | p90 | p99 | most |", "|---|---:|---:|---:|---:|"]
    served = [one for one in asked if one.outcome == "equal"]
    for title, values in (
        ("to the first byte of an answer", [a.first_token for a in served if a.first_token]),
        ("to the end of an answer", [a.seconds for a in served]),
        ("to a refusal", [a.seconds for a in asked if a.outcome.startswith("refused")]),
    ):
        if values:
            numbers = [*np.percentile(values, [50, 90, 99]), max(values)]
            rows.append(f"| {title} | {' | '.join(f'{number:.3f}' for number in numbers)} |")
    return [*rows, ""]


def _pictures() -> list[str]:
    captions = {
        "memory": "Resident memory; dots are an idle server with its cache reset and at its usual "
        "size, which the slope is measured by.",
        "queue": "Requests that run and wait, and the share of the cache that they hold.",
        "latency": "Seconds to the first byte and to the end of answers, and of a health check.",
        "outcomes": "Requests a second by what became of them.",
        "hits": "Share of prompt tokens found in the cache.",
    }
    return [
        line for name, text in captions.items() for line in (f"![{name}]({name}.svg)", "", text, "")
    ]


def _save(file: Path, draw: Callable[[Axes], None], tally: Tally) -> None:
    figure, axes = plt.subplots(figsize=(10, 3.2), layout="constrained")
    draw(axes)
    for at, _ in tally.events:
        axes.axvline(at / 60, color="0.75", linewidth=0.8, zorder=0)
    axes.set_xlabel("minutes")
    axes.grid(alpha=0.2)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", fontsize=8)
    figure.savefig(file)
    plt.close(figure)


def _plot_memory(axes: Axes, watch: Watch) -> None:
    for life in sorted({sample.life for sample in watch.samples}):
        samples = [sample for sample in watch.samples if sample.life == life]
        axes.plot([s.at / 60 for s in samples], [s.rss / _MIB for s in samples], linewidth=0.8)
    rests = watch.rests
    axes.plot([r.at / 60 for r in rests], [r.rss / _MIB for r in rests], "k.", label="idle")
    axes.set_ylabel("MiB resident")


def _plot_queue(axes: Axes, samples: Sequence[Sample]) -> None:
    minutes = [s.at / 60 for s in samples]
    axes.plot(minutes, [s.waiting for s in samples], label="waiting", linewidth=0.8)
    axes.plot(minutes, [s.running for s in samples], label="running", linewidth=0.8)
    axes.set_ylabel("requests")
    share = axes.twinx()
    share.plot(minutes, [100 * s.usage for s in samples], color="C2", linewidth=0.6, alpha=0.6)
    share.set_ylabel("% of blocks held", color="C2")


def _plot_latency(axes: Axes, asked: Sequence[Asked], samples: Sequence[Sample]) -> None:
    served = [one for one in asked if one.outcome == "equal" and one.first_token]
    for title, values in (
        ("first byte", [one.first_token or 0 for one in served]),
        ("end", [one.seconds for one in served]),
    ):
        for percent, style in ((50, "-"), (99, ":")):
            points = _percentiles([one.at for one in served], values, percent)
            color = "C0" if title == "end" else "C1"
            label = f"{title}, p{percent}"
            axes.plot(*points, style, color=color, label=label, linewidth=1)
    minutes, seconds = [s.at / 60 for s in samples], [s.health_seconds for s in samples]
    axes.plot(minutes, seconds, label="health", color="C2", linewidth=0.5)
    axes.set_yscale("log")
    axes.set_ylabel("seconds")


def _percentiles(
    at: Sequence[float], values: Sequence[float], percent: float
) -> tuple[list[float], list[float]]:
    """The percentile of each bucket of time that has values, in minutes."""
    if not at:
        return [], []
    edges = np.linspace(0, max(at) + 1e-9, _BUCKETS + 1)
    places = np.digitize(at, edges)
    points = [
        (edges[place] / 60, float(np.percentile(np.array(values)[places == place], percent)))
        for place in np.unique(places)
    ]
    return [point[0] for point in points], [point[1] for point in points]


def _plot_outcomes(axes: Axes, asked: Sequence[Asked]) -> None:
    groups = {
        "answered": ("equal",),
        "refused": ("refused",),
        "failed by a fault": ("failed",),
        "cut or restarted": ("cut", "restarted", "aborted"),
    }
    last = max((one.at for one in asked), default=1.0)
    edges = np.linspace(0, last + 1e-9, _BUCKETS + 1)
    width = edges[1] - edges[0]
    for title, prefixes in groups.items():
        times = [one.at for one in asked if one.outcome.startswith(prefixes)]
        counts, _ = np.histogram(times, edges)
        axes.plot(edges[:-1] / 60, counts / width, label=title, linewidth=1, drawstyle="steps-post")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylabel("requests a second")


def _plot_hits(axes: Axes, samples: Sequence[Sample]) -> None:
    """Of each time between two samples of one process, smoothed over ten."""
    span = 10
    pairs = [
        (new.at / 60, (new.hits - old.hits) / (new.queried - old.queried))
        for old, new in zip(samples, samples[span:], strict=False)
        if old.life == new.life and new.queried > old.queried
    ]
    axes.plot([p[0] for p in pairs], [100 * p[1] for p in pairs], linewidth=0.9)
    axes.set_ylabel("% of prompt tokens hit")


def _when_and_where(samples: Sequence[Sample]) -> str:
    loads = [sample.load_average for sample in samples] or [0.0]
    return (
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, commit `{_commit()}`, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores. The load average of the whole "
        f"machine, other work included, was {min(loads):.1f} to {max(loads):.1f}."
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
