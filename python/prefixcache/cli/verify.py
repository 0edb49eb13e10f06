"""The command `prefixcache verify`."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prefixcache.cli.command_line import Given
from prefixcache.tools.results import check_can_write, command_line, write_json
from prefixcache.tools.verify.verify_options import VerifyOptions

if TYPE_CHECKING:
    from prefixcache.tools.verify.verify_report import Report


def verify(given: Given) -> None:
    """Check that cache hits change no answer.

    It asks any OpenAI-compatible server the same questions with and without hits. It fails where an
    answer differs, where the server could not be asked, and where no hit was seen.
    """
    from prefixcache.tools.verify.verify_run import check_url

    options = given.make(VerifyOptions)
    check_url(options.url)
    check_can_write({"--output": options.output})
    report = _run(options)
    _show(report, options.output)
    sys.exit(min(report.status, 1))


def _run(options: VerifyOptions) -> Report:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from prefixcache.tools.verify.verify_run import run_verify

    seed = secrets.randbits(31) if options.seed is None else options.seed
    columns = (SpinnerColumn(), TextColumn("{task.completed} answers"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        done = run_verify(options, seed, command_line(), lambda: progress.advance(task))
        return asyncio.run(done)


def _show(report: Report, output: Path | None) -> None:
    from rich.console import Console

    from prefixcache.tools.verify.verify_report import (
        differences_table,
        rounds_table,
        to_json,
        verdict,
    )

    console = Console()
    heading = f"{report.model} at {report.url}, {report.api}"
    console.print(heading, highlight=False, markup=False, soft_wrap=True)
    console.print(rounds_table(report))
    if (differences := differences_table(report)) is not None:
        console.print(differences)
    for sentence in verdict(report):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    if output is not None:
        write_json(to_json(report), output)
