"""The record of a run: JSON objects, one a line, each written to the end as soon as it is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# What of a section can fail alone: its name, and what measures its rows.
Part = tuple[str, Callable[[], Iterator[Row]]]


def append_row(record: Path, row: Row) -> None:
    """Adds one line."""
    with record.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def read_rows(record: Path) -> list[Row]:
    """All whole lines: the last one is left out where its writer was killed."""
    lines = record.read_text().splitlines(keepends=True) if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
