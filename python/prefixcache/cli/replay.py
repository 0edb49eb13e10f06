"""The command `prefixcache replay`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prefixcache.cli.command_line import Given
from prefixcache.exceptions import FieldError
from prefixcache.tools.pictures import check_picture
from prefixcache.tools.replay.replay_options import ReplayOptions
from prefixcache.tools.results import check_can_read, check_can_write, command_line, write_json

if TYPE_CHECKING:
    from prefixcache.tools.replay.run import Setting, TraceResult
    from prefixcache.tools.replay.sizes import Size
    from prefixcache.tools.replay.ttft_model import TtftModel


def replay(given: Given) -> None:
    """Run traces through the cache without a model.

    It shows what hits at any size, and what could.
    """
    options = given.make(ReplayOptions)
    if options.plot is not None:
        check_picture("--plot", options.plot)
    check_can_write({"--output": options.output, "--plot": options.plot})
    check_can_read("TRACE", *options.traces)
    _run(options)


def _run(options: ReplayOptions) -> None:
    from prefixcache.tools.replay.compare import verdict
    from prefixcache.tools.replay.report import Report, remarks, to_json

    model = _model(options)
    cells = _all_cells(options, model)
    traces = tuple(_replayed(options, cells))
    verdicts = () if options.compare is None else tuple(map(verdict, traces))
    report = Report(command_line(), traces, model, options.goodput, verdicts)
    for line in [*remarks(report), *verdicts]:
        click.echo(line)
    if options.output is not None:
        write_json(to_json(report), options.output)
        click.echo(f"Results: {options.output}")
    if options.plot is not None:
        from prefixcache.tools.replay.plots import draw

        draw(traces, options.plot)
        click.echo(f"Picture: {options.plot}")


def _model(options: ReplayOptions) -> TtftModel | None:
    from prefixcache.tools.replay.ttft_model import read_model

    if options.ttft_model is None:
        return None
    try:
        return read_model(options.ttft_model)
    except ValueError as error:
        raise FieldError("ttft_model", f"cannot be used: {error}.") from None


def _all_cells(options: ReplayOptions, model: TtftModel | None) -> list[tuple[Setting, Size]]:
    """What each trace is run with; two configurations where they are compared."""
    from prefixcache.tools.replay.compare import compared

    cells = _cells(options, model)
    if options.compare is None:
        return cells
    both = [cells, _cells(compared(options), model)]
    if any(len(axis) != 1 for axis in both):
        problem = "sets two caches side by side: --sizes and --eviction-policy take one value each."
        raise FieldError("compare", problem)
    return [cell for axis in both for cell in axis]


def _cells(options: ReplayOptions, model: TtftModel | None) -> list[tuple[Setting, Size]]:
    from prefixcache.tools.replay.run import Setting

    settings = [
        Setting(
            eviction_policy=policy,
            hints=options.parsed_hints(),
            model=model,
            objective_ms=options.objective_ms,
            scheduling_policy=options.scheduling_policy,
            max_queue_delay=options.max_queue_delay,
            snapshots=None if options.snapshot_tokens is None else snapshots,
            snapshot_tokens=options.snapshot_tokens or 0.0,
            disk=options.disk_size,
            disk_min_uses=options.disk_cache_min_uses,
        )
        for policy in dict.fromkeys(options.eviction_policy)
        for snapshots in dict.fromkeys(options.snapshots)
    ]
    return [(setting, size) for setting in settings for size in options.parsed_sizes()]


def _replayed(options: ReplayOptions, cells: list[tuple[Setting, Size]]) -> Iterator[TraceResult]:
    """Each trace's result, shown as soon as it is known."""
    from prefixcache.tools.replay.report import heading, infinite_line, recorded_line, tables

    for path in options.traces:
        trace = _replay_one(path, options, cells)
        shown = (heading(trace), *tables(trace, options.goodput))
        for line in (*shown, infinite_line(trace), recorded_line(trace)):
            if line is not None:
                click.echo(line)
        yield trace


def _replay_one(
    path: Path, options: ReplayOptions, cells: list[tuple[Setting, Size]]
) -> TraceResult:
    from tqdm import tqdm

    from prefixcache.tools.bench.machine import usable_cores
    from prefixcache.tools.replay.run import (
        num_passes,
        replay_as_recorded,
        replay_trace,
        trace_bytes,
    )

    total = trace_bytes(path) * num_passes(cells, options.bounds)
    with tqdm(
        desc=path.name, total=total, unit="B", unit_scale=True, leave=False, disable=None
    ) as bar:
        trace = replay_trace(
            path,
            cells,
            jobs=options.jobs or usable_cores(),
            bounds=options.bounds,
            cache_answers=options.cache_answers,
            progress=bar.update,
        )
    return replace(trace, as_recorded=replay_as_recorded(path))
