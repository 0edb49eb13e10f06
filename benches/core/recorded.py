"""A bench of Rust as a record and a picture."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from prefixcache.tools.bench.machine import machine_facts

INK, QUIET, RULE = "#1f2933", "#7b8794", "#e4e7eb"

Rows = list[dict[str, Any]]


def read(lines: Iterable[str]) -> Rows:
    """The rows among the lines that a bench prints."""
    return [json.loads(line) for line in lines if line.startswith("{")]


def record_and_draw(
    about: str | None,
    command: str,
    draw: Callable[[dict[str, Any]], Figure],
    record: Path,
    plot: Path,
) -> None:
    """Runs the command, and writes its rows and the picture that `draw` makes of them.

    The paths are what `--record` and `--plot` leave out; a picture's ending chooses its format.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--record", type=Path, default=record)
    parser.add_argument("--plot", type=Path, default=plot)
    arguments = parser.parse_args()
    bench = subprocess.run(command.split(), check=True, stdout=subprocess.PIPE, text=True)
    made = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "rows": read(bench.stdout.splitlines()),
    }
    for path in (arguments.record, arguments.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    arguments.record.write_text(json.dumps(made, indent=1) + "\n")
    draw(made).savefig(arguments.plot)
    print(f"wrote {arguments.record} and {arguments.plot}")
