"""The command `prefixcache verify`."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

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

    from tqdm import tqdm

    from prefixcache.tools.verify.verify_run import run_verify

    seed = secrets.randbits(31) if options.seed is None else options.seed
    with tqdm(unit=" answers", leave=False, disable=None) as bar:
        return asyncio.run(run_verify(options, seed, command_line(), bar.update))


def _show(report: Report, output: Path | None) -> None:
    from prefixcache.tools.verify.verify_report import (
        differences,
        rounds_table,
        to_json,
        verdict,
    )

    click.echo(f"{report.model} at {report.url}, {report.api}")
    for line in (rounds_table(report), *differences(report), *verdict(report)):
        click.echo(line)
    if output is not None:
        write_json(to_json(report), output)
