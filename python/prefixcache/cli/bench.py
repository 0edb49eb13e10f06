"""The commands `prefixcache bench` and `prefixcache bench compare`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prefixcache.cli.command_line import Given
from prefixcache.config.engine_config import EngineConfig
from prefixcache.exceptions import FieldError
from prefixcache.tools.bench.bench_options import DEFAULT_PICTURE, BenchOptions
from prefixcache.tools.bench.records import BenchmarkError
from prefixcache.tools.pictures import NEEDS_MATPLOTLIB, can_draw, check_picture
from prefixcache.tools.results import check_can_read, check_can_write, command_line, write_json

if TYPE_CHECKING:
    from prefixcache.tools.bench.reports.report import Report


def bench(given: Given) -> None:
    """Measure what the prefix cache saves.

    It starts a server here, with the cache on and off, or asks any OpenAI-compatible server.
    """
    given.make(EngineConfig)  # Checks what each variant's engine is started with.
    engine = given.of(EngineConfig)
    options = given.make(BenchOptions, flags=engine)
    if options.asked.trace is not None:
        check_can_read("--trace", options.asked.trace)
    if options.plot is not None:
        check_picture("--plot", options.plot)
    if options.html is not None and not can_draw():
        raise FieldError("--html", NEEDS_MATPLOTLIB)
    picture = options.plot or DEFAULT_PICTURE
    check_can_write({"--output": options.output, "--html": options.html, "--plot": picture})
    report = _run(options)
    _show(report, options, picture)
    if report.errors:
        raise BenchmarkError("; ".join(report.errors))


def compare(given: Given) -> None:
    """Compare two results of `bench --output`.

    Ratios above 1 are in favour of B.
    """
    from prefixcache.tools.bench.reports.compare import compare_files

    a, b = Path(given.values["a"]), Path(given.values["b"])
    check_can_read("A", a)
    check_can_read("B", b)
    for part in compare_files(a, b):
        click.echo(part)


def _run(options: BenchOptions) -> Report:
    import asyncio

    from prefixcache.tools.bench.run import Work, run_bench

    work = Work.of(options.asked)
    total = None if work.num_requests is None else options.repeats * work.num_requests
    with closing(_Bars(total)) as bars:
        return asyncio.run(run_bench(options, work, command_line(), bars.advance))


class _Bars:
    """A bar for each variant, from its first answer on."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._bars = dict[str, Any]()

    def advance(self, name: str, count: int) -> None:
        """`count` more requests of a variant are over."""
        from tqdm import tqdm

        if name not in self._bars:
            place = len(self._bars)
            self._bars[name] = tqdm(
                desc=name, total=self._total, position=place, leave=False, disable=None
            )
        self._bars[name].update(count)

    def close(self) -> None:
        """Takes the bars away."""
        for bar in self._bars.values():
            bar.close()


def _show(report: Report, options: BenchOptions, picture: Path) -> None:
    from prefixcache.tools.bench.reports.page import write_page
    from prefixcache.tools.bench.reports.plots import draw
    from prefixcache.tools.bench.reports.report import medians, to_json
    from prefixcache.tools.bench.reports.tables import heading, table

    click.echo(heading(report))
    if report.has_records:
        click.echo(table([variant.name for variant in report.variants], medians(report)))
    for remark in report.remarks:
        click.echo(remark)
    if options.output is not None:
        write_json(to_json(report), options.output)
        click.echo(f"Results: {options.output}")
    if not report.has_records:
        return
    if can_draw():
        draw(report, picture)
        click.echo(f"Picture: {picture}")
    else:
        click.echo(f"No picture: it {NEEDS_MATPLOTLIB}")
    if options.html is not None:
        write_page(report, options.html)
        click.echo(f"Page: {options.html}")
