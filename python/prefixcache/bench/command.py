"""The command `prefixcache bench`."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prefixcache.config import DEFAULT_MODEL
from prefixcache.exceptions import ConfigError, PrefixCacheError

if TYPE_CHECKING:
    from prefixcache.bench.report import Report
    from prefixcache.bench.run import BenchOptions


_PICTURES = (".png", ".svg", ".pdf")


def bench(
    model: Annotated[str, typer.Option(help="Alias, folder, GGUF file or hub id.")] = DEFAULT_MODEL,
    num_requests: Annotated[int, typer.Option(help="Requests of each run.")] = 16,
    prefix_len: Annotated[int, typer.Option(help="Prompt tokens that all requests share.")] = 1024,
    suffix_len: Annotated[int, typer.Option(help="Prompt tokens of each request's own.")] = 64,
    output_len: Annotated[int, typer.Option(help="Tokens generated for each request.")] = 32,
    concurrency: Annotated[int, typer.Option(help="Requests at once; 0: all.")] = 4,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second on average (Poisson); 0: no limit.")
    ] = 0.0,
    repeats: Annotated[int, typer.Option(help="Runs of each variant; medians are shown.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    http: Annotated[
        bool, typer.Option("--http", help="Start servers on loopback and measure through HTTP.")
    ] = False,
    base_url: Annotated[
        str | None, typer.Option(help="Measure the server that runs at this address, as it is.")
    ] = None,
    sharing: Annotated[
        bool, typer.Option("--sharing", help="Also with no request waiting for another's blocks.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Tokens of a cache block.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Cache blocks; by default enough for all that runs at once.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences of a step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of a step.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the results (JSON).")] = None,
    plot: Annotated[Path, typer.Option(help="Where to draw the picture (png, svg or pdf).")] = Path(
        "prefixcache-bench.png"
    ),
) -> None:
    """Measure what the prefix cache saves: the same requests with the cache off and on."""
    from prefixcache.bench.run import SHARING_VARIANTS, VARIANTS, BenchOptions
    from prefixcache.bench.workloads import LoadConfig, WorkloadConfig

    try:
        _check_can_write(output, plot)
        options = BenchOptions(
            model=model,
            workload=WorkloadConfig(
                num_requests=num_requests,
                prefix_len=prefix_len,
                suffix_len=suffix_len,
                output_len=output_len,
                seed=seed,
            ),
            load=LoadConfig(
                concurrency=concurrency or None, request_rate=request_rate or None, seed=seed
            ),
            repeats=repeats,
            http=http,
            base_url=base_url,
            variants=SHARING_VARIANTS if sharing else VARIANTS,
            flags={
                "dtype": dtype,
                "device": device,
                "block_size": block_size,
                "num_blocks": num_blocks,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
            },
        )
        _show(_run(options), output, plot)
    except PrefixCacheError as error:
        raise typer.Exit(_complain(error)) from error


def _check_can_write(output: Path | None, plot: Path) -> None:
    """Raises `ConfigError` for what could not be written once all has been measured."""
    if plot.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--plot draws {', '.join(_PICTURES)}, not {str(plot)!r}.")
    for flag, file in (("--output", output), ("--plot", plot)):
        if file is None:
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag} cannot write {file}: {error.strerror}.") from error
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"{flag} cannot write {file}.")


def _run(options: BenchOptions) -> Report:
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


def _complain(error: PrefixCacheError) -> int:
    Console(stderr=True).print(f"error: {error}", markup=False)
    return 1
