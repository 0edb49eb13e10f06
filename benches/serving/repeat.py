"""A prompt a server has seen before, through HTTP: time to first token, cold and warm.

    python benches/serving/repeat.py 1024+0 1024+32 4032+32

KNOWN+NEW: a prompt of KNOWN tokens and NEW more is sent to a server with an empty cache (cold),
then the same KNOWN tokens with NEW others (warm; with +0 the very same prompt), then once more
under the cache salt of somebody else, whom the time must tell nothing (foreign salt). Medians over
rounds, each with prompts of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.tools.bench.machine import machine_facts
from prefixcache.tools.bench.prompts import Prompt, TokenForm
from prefixcache.tools.bench.records import RequestRecord
from prefixcache.tools.bench.servers import server_target
from prefixcache.tools.bench.targets import HttpTarget

_COLUMNS = (
    "cold (ms)",
    "warm (ms)",
    "times sooner",
    "foreign salt (ms)",
    "cached, own / foreign",
    "same text",
)


@dataclass(frozen=True)
class Row:
    """Medians of one KNOWN+NEW; `same_text` is None where the two prompts differ."""

    known: int
    new: int
    cold_ms: float
    warm_ms: float
    foreign_salt_ms: float
    least_cached_tokens: int
    most_cached_for_foreign_salt: int
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
        assert isinstance(target.form, TokenForm)
        pool = target.form.pool.tolist()
        draw = random.Random(0)
        rows = []
        for known, new in pairs:
            await _visit(target, draw, pool, (known, new, output_len))  # Warms the server up.
            visits = [
                await _visit(target, draw, pool, (known, new, output_len)) for _ in range(rounds)
            ]
            rows.append(_row(known, new, visits))
        return rows


@dataclass(frozen=True)
class Visit:
    """One fresh prompt, asked for three times in turn."""

    cold: RequestRecord
    warm: RequestRecord
    foreign: RequestRecord


async def _visit(
    target: HttpTarget, draw: random.Random, pool: list[int], lengths: tuple[int, int, int]
) -> Visit:
    known, new, output_len = lengths
    await target.reset_cache()
    shared = draw.choices(pool, k=known)
    cold, warm = (
        Prompt.of_tokens([*shared, *draw.choices(pool, k=new)], output_len) for _ in range(2)
    )
    foreign = replace(warm, cache_salt="somebody else")
    return Visit(await target.send(cold), await target.send(warm), await target.send(foreign))


def _row(known: int, new: int, visits: list[Visit]) -> Row:
    return Row(
        known=known,
        new=new,
        cold_ms=_median_ms(visit.cold for visit in visits),
        warm_ms=_median_ms(visit.warm for visit in visits),
        foreign_salt_ms=_median_ms(visit.foreign for visit in visits),
        least_cached_tokens=min(visit.warm.cached_tokens or 0 for visit in visits),
        most_cached_for_foreign_salt=max(visit.foreign.cached_tokens or 0 for visit in visits),
        same_text=None if new else all(v.cold.output == v.warm.output for v in visits),
    )


def _median_ms(records: Iterable[RequestRecord]) -> float:
    return statistics.median(record.ttft for record in records) * 1e3


def _table(rows: list[Row], rounds: int) -> Table:
    table = Table(
        title=f"TTFT through HTTP, median of {rounds}", title_justify="left", box=MARKDOWN
    )
    for name in ("prompt", *_COLUMNS):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for row in rows:
        table.add_row(
            f"{row.known:,} known + {row.new} new",
            f"{row.cold_ms:,.1f}",
            f"{row.warm_ms:,.1f}",
            f"{row.ratio:.1f}",
            f"{row.foreign_salt_ms:,.1f}",
            f"{row.least_cached_tokens:,} / {row.most_cached_for_foreign_salt:,}",
            {True: "yes", False: "no", None: "-"}[row.same_text],
        )
    return table


if __name__ == "__main__":
    typer.run(main)
