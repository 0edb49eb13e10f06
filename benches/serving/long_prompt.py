"""How long streams wait while a long prompt is computed beside them, and what that costs it.

    python benches/serving/long_prompt.py --output benches/record/DATE-long-prompt.json

Some answers are streamed, then the prompt arrives. A gap is the time between two tokens of a
stream; "alone" is the same prompt on an idle engine. Each row is an engine of its own, in a process
of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from prefixcache.config.engine_config import DEFAULT_MODEL, EngineConfig
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.tools.bench.machine import machine_facts
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams

ROWS: dict[str, dict[str, Any]] = {
    "chunks of 2,048, no limit": {"max_step_ms": 0.0, "max_num_batched_tokens": 2048},
    "chunks of 256, no limit": {"max_step_ms": 0.0, "max_num_batched_tokens": 256},
    "`--max-step-ms 500`": {"max_step_ms": 500.0},
    "`--max-step-ms 250`, the default": {},
    "`--max-step-ms 100`": {"max_step_ms": 100.0},
}


def request(name: str, num_tokens: int, max_tokens: int, seed: int) -> Request:
    choose = random.Random(seed)
    return Request(
        request_id=name,
        prompt_token_ids=[choose.randrange(1000, 40_000) for _ in range(num_tokens)],
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def run_until(engine: Engine, name: str) -> list[float]:
    """Seconds of each step until the request has ended."""
    seconds: list[float] = []
    ended = False
    while not ended:
        begun = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - begun)
        ended = any(output.request_id == name and output.finished for output in outputs)
    return seconds


def measure(model: str, num_tokens: int, num_streams: int, flags: dict[str, Any]) -> dict[str, Any]:
    engine = build(EngineConfig.from_flags(model=model, **flags)).engine
    engine.add_request(request("warm up", 600, 4, seed=1))
    run_until(engine, "warm up")
    engine.add_request(request("alone", num_tokens, 1, seed=2))
    alone = run_until(engine, "alone")
    for number in range(num_streams):
        engine.add_request(request(f"stream {number}", 20, 4000, seed=3 + number))
    for _ in range(30):
        engine.step()
    engine.add_request(request("beside", num_tokens, 1, seed=99))
    gaps = run_until(engine, "beside")
    return {
        "longest_gap": max(gaps),
        "median_gap": statistics.median(gaps),
        "steps": len(gaps),
        "beside": sum(gaps),
        "alone": sum(alone),
        "longest_step_alone": max(alone),
        "gaps": gaps,
    }


def main(
    model: Annotated[str, typer.Option(help="Alias, folder or hub id.")] = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 6000,
    streams: Annotated[int, typer.Option(help="Answers under way.")] = 4,
    output: Annotated[Path | None, typer.Option(help="JSON with every number.")] = None,
) -> None:
    results: dict[str, dict[str, Any]] = {}
    spawn = multiprocessing.get_context("spawn")
    for label, flags in ROWS.items():
        with spawn.Pool(1) as pool:
            results[label] = pool.apply(measure, (model, tokens, streams, flags))
        show(list(results.items())[-1:])
    show(list(results.items()))
    if output is not None:
        record = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine_facts(),
            "tokens": tokens,
            "streams": streams,
            "results": results,
        }
        output.write_text(json.dumps(record, indent=1))


def show(results: Sequence[tuple[str, dict[str, Any]]]) -> None:
    table = Table(box=MARKDOWN)
    for title in ("", "longest gap", "median gap", "prompt beside them", "prompt alone"):
        table.add_column(title, justify="left" if not title else "right")
    for label, numbers in results:
        table.add_row(
            label,
            f"{numbers['longest_gap']:.2f} s",
            f"{numbers['median_gap']:.2f} s",
            f"{numbers['beside']:.1f} s",
            f"{numbers['alone']:.1f} s",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
