"""The commands `prefixcache bench` and `prefixcache bench compare`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixcache.cli.command_line import Given
from prefixcache.config.engine_config import EngineConfig
from prefixcache.tools.bench.bench_options import BenchOptions
from prefixcache.tools.bench.records import BenchmarkError
from prefixcache.tools.output_files import check_can_write, check_picture

if TYPE_CHECKING:
    from rich.progress import Progress

    from prefixcache.tools.bench.reports.report import Report


def bench(given: Given) -> None:
    """Measure what the prefix cache saves, here or at any server that speaks OpenAI's API."""
    given.make(EngineConfig)  # Checks what each variant's engine is started with.
    engine = given.of(EngineConfig)
    options = given.make(BenchOptions, flags=engine)
    check_picture("--plot", options.plot)
    check_can_write({"--output": options.output, "--html": options.html, "--plot": options.plot})
    report = _run(options)
    _show(report, options)
    if report.errors:
        raise BenchmarkError("; ".join(report.errors))


def compare(given: Given) -> None:
    """Two results of `prefixcache bench --output` side by side, and how many times better B is."""
    from rich.console import Console

    from prefixcache.tools.bench.reports.compare import compare_files

    console = Console()
    for part in compare_files(Path(given.values["a"]), Path(given.values["b"])):
        console.print(part, highlight=False)


def _run(options: BenchOptions) -> Report:
    import asyncio

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from prefixcache.tools.bench.run import Work, run_bench

    work = Work.of(options.asked)
    command = shlex.join(["prefixcache", *_without_secrets(sys.argv[1:])])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        total = None if work.num_requests is None else options.repeats * work.num_requests
        bars = _Bars(progress, total)
        return asyncio.run(run_bench(options, work, command, bars.advance))


class _Bars:
    """A bar for each variant, from its first answer on."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress = progress
        self._total = total
        self._tasks = dict[str, Any]()

    def advance(self, name: str, count: int) -> None:
        """`count` more requests of a variant are over."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=self._total)
        self._progress.advance(self._tasks[name], count)


def _without_secrets(arguments: list[str]) -> list[str]:
    """The command line as it may stand in a report."""
    shown = list[str]()
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_key = before == "--api-key"
        option, equals, _ = argument.partition("=")
        hidden = f"{option}=..." if equals and option == "--api-key" else argument
        shown.append("..." if is_key else hidden)
    return shown


def _show(report: Report, options: BenchOptions) -> None:
    from rich.console import Console

    from prefixcache.tools.bench.reports.page import write_page
    from prefixcache.tools.bench.reports.plots import draw
    from prefixcache.tools.bench.reports.report import medians, write_json
    from prefixcache.tools.bench.reports.tables import heading, table

    console = Console()
    console.print(heading(report), highlight=False)
    if report.has_records:
        console.print(table([variant.name for variant in report.variants], medians(report)))
    for remark in report.remarks:
        console.print(remark, highlight=False)
    if options.output is not None:
        write_json(report, options.output)
        console.print(f"Results: {options.output}")
    if not report.has_records:
        return
    draw(report, options.plot)
    console.print(f"Picture: {options.plot}")
    if options.html is not None:
        write_page(report, options.html)
        console.print(f"Page: {options.html}")
