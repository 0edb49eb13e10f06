"""The report: what was done and what was found, for who operates such a server."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from soak.options import Options
from soak.tally import Asked, Tally
from soak.verdict import Check
from soak.watch import Rest, Sample, Watch, longest_life

_MIB = 2**20
# Of the table of memory.
_NUM_COLUMNS = 6


def write_report(options: Options, tally: Tally, watch: Watch, checks: Sequence[Check]) -> None:
    """`report.md`, and `record.json` with the samples over time."""
    folder = options.report
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "outcomes": tally.outcomes,
        "commands": tally.commands,
        "events": tally.events,
        "violations": tally.violations,
        "rests": [_without_census(rest) for rest in watch.rests],
        "samples": [dataclasses.asdict(sample) for sample in watch.samples],
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
        + (" --kv-cache-dir" if options.kv_cache_dir else "")
        + (" --disk-cache" if options.disk_cache else "")
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
        *(f"- {name}: {count:,}" for name, count in watch.kept.disk_counts().items()),
        "",
    ]
    return "\n".join(lines)


def _violations(tally: Tally) -> list[str]:
    if not tally.violations:
        return []
    shown = [f"- `{violation[:400].replace('`', chr(39))}`" for violation in tally.violations]
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
