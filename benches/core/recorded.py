"""Runs a bench of Rust and records its rows.

    python benches/core/recorded.py fleet       # routers over 64 and 1,024 simulated replicas
    python benches/core/recorded.py evictions   # what an eviction costs, by the number of blocks

The record is benches/record/NAME.json, or the file of `--record`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from prefixcache.tools.bench.machine import write_record

COMMANDS = {
    "fleet": "cargo bench --package prefixcache-replay --bench replicas -- --as-json",
    "evictions": "cargo bench --package prefixcache-oracle --bench latency -- --evictions-as-json",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=COMMANDS)
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    command = COMMANDS[asked.name]
    bench = subprocess.run(command.split(), check=True, stdout=subprocess.PIPE, text=True)
    lines = [line for line in bench.stdout.splitlines() if line.startswith("{")]
    record = asked.record or Path("benches/record") / f"{asked.name}.json"
    write_record(record, command, rows=[json.loads(line) for line in lines])
    print(f"wrote {record}")


if __name__ == "__main__":
    main()
