"""A prompt a server has seen before, through HTTP: time to first token, cold and warm.

    python benches/serving/repeat.py 1024+0 1024+32 4032+32

KNOWN+NEW: a prompt of KNOWN tokens and NEW more is sent to a server with an empty cache (cold),
then the same KNOWN tokens with NEW others (warm; with +0 the very same prompt). Medians over
rounds, each with prompts of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from prefixcache.bench.client import HttpTarget, RequestRecord
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.targets import server_target
from prefixcache.bench.workloads import Prompt
from prefixcache.config import DEFAULT_MODEL


@dataclass(frozen=True)
class Row:
    """Medians of one KNOWN+NEW; `same_text` is None where the two prompts differ."""

    known: int
    new: int
    cold_ms: float
    warm_ms: float
    least_cached_tokens: int
    same_text: bool | None

    @property
    def ratio(self) -> float:
        return self.cold_ms / self.warm_ms


def main(
    lengths: Annotated[list[str], typer.Argument(metavar="KNOWN+NEW...")],
    model: str = DEFAULT_MODEL,
    dtype: str = "auto",
    batch_invariant: bool = True,
    output_len: int = 16,
    rounds: int = 5,
    output: Path | None = None,
) -> None:
    """Measure and print one table."""
    pairs = [_parse(text) for text in lengths]
    flags = {"model": model, "dtype": dtype, "batch_invariant": batch_invariant}
    rows = asyncio.run(_measure(pairs, flags, output_len, rounds))
    Console(width=120).print(_table(rows, rounds))
    if output is not None:
        facts = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine_facts(),
        }
        found = facts | flags | {"rounds": rounds, "rows": [asdict(row) for row in rows]}
        output.write_text(json.dumps(found, indent=1) + "\n")


def _parse(text: str) -> tuple[int, int]:
    known, _, new = text.partition("+")
    return int(known), int(new)


async def _measure(
    pairs: list[tuple[int, int]], flags: dict[str, object], output_len: int, rounds: int
) -> list[Row]:
    async with server_target(flags) as target:
        pool = await target.token_pool()
        draw = random.Random(0)
        rows = []
        for known, new in pairs:
            await _pair(target, draw, pool, (known, new, output_len))  # Warms the server up.
            rounds_of_pairs = [
                await _pair(target, draw, pool, (known, new, output_len)) for _ in range(rounds)
            ]
            rows.append(_row(known, new, rounds_of_pairs))
        return rows


async def _pair(
    target: HttpTarget, draw: random.Random, pool: list[int], lengths: tuple[int, int, int]
) -> tuple[RequestRecord, RequestRecord]:
    """The cold and the warm request of a fresh prompt, one after the other."""
    known, new, output_len = lengths
    await target.reset_cache()
    shared = draw.choices(pool, k=known)
    cold, warm = (Prompt((*shared, *draw.choices(pool, k=new)), output_len) for _ in range(2))
    return await target.send(cold), await target.send(warm)


def _row(known: int, new: int, pairs: list[tuple[RequestRecord, RequestRecord]]) -> Row:
    return Row(
        known=known,
        new=new,
        cold_ms=statistics.median(cold.ttft for cold, _ in pairs) * 1e3,
        warm_ms=statistics.median(warm.ttft for _, warm in pairs) * 1e3,
        least_cached_tokens=min(warm.cached_tokens for _, warm in pairs),
        same_text=None if new else all(cold.output == warm.output for cold, warm in pairs),
    )


def _table(rows: list[Row], rounds: int) -> Table:
    table = Table(
        title=f"TTFT through HTTP, median of {rounds}", title_justify="left", box=MARKDOWN
    )
    for name in ("prompt", "cold (ms)", "warm (ms)", "times sooner", "cached tokens", "same text"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for row in rows:
        table.add_row(
            f"{row.known:,} known + {row.new} new",
            f"{row.cold_ms:,.1f}",
            f"{row.warm_ms:,.1f}",
            f"{row.ratio:.1f}",
            f"{row.least_cached_tokens:,}",
            {True: "yes", False: "no", None: "-"}[row.same_text],
        )
    return table


if __name__ == "__main__":
    typer.run(main)
