"""The command `prefixcache bench`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prefixcache.bench.options import BenchOptions
from prefixcache.command_line import Given
from prefixcache.config import EngineConfig
from prefixcache.exceptions import FieldError

if TYPE_CHECKING:
    from prefixcache.bench.report import Report


_PICTURES = (".png", ".svg", ".pdf")


def bench(given: Given) -> None:
    """Measure what the prefix cache saves: the same requests with the cache off and on."""
    given.make(EngineConfig)  # Checks what each variant's engine is started with.
    engine = given.of(EngineConfig)
    options = given.make(BenchOptions, flags=engine)
    _check_can_write(options.output, options.plot)
    _show(_run(options), options.output, options.plot)


def _check_can_write(output: Path | None, plot: Path) -> None:
    """Raises `FieldError` for what could not be written once all has been measured."""
    if plot.suffix.lower() not in _PICTURES:
        raise FieldError("--plot", f"draws {', '.join(_PICTURES)}, not {str(plot)!r}.")
    for flag, file in (("--output", output), ("--plot", plot)):
        if file is None:
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FieldError(flag, f"cannot write {file}: {error.strerror}.") from error
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise FieldError(flag, f"cannot write {file}.")


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

    from prefixcache.bench.run import run_bench, variant_names

    command = shlex.join(["prefixcache", *sys.argv[1:]])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        total = options.repeats * options.workload.num_requests
        tasks = {name: progress.add_task(name, total=total) for name in variant_names(options)}
        return asyncio.run(run_bench(options, command, lambda name: progress.advance(tasks[name])))


def _show(report: Report, output: Path | None, plot: Path) -> None:
    from rich.console import Console

    from prefixcache.bench.plots import draw
    from prefixcache.bench.report import heading, table, write_json

    console = Console()
    console.print(heading(report), highlight=False)
    console.print(table(report))
    if output is not None:
        write_json(report, output)
        console.print(f"Results: {output}")
    draw(report, plot)
    console.print(f"Picture: {plot}")
