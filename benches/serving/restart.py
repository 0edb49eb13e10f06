"""Time to the first token after `kill -9` of a server with `--kv-cache-dir`, next to cold and warm.

    python benches/serving/restart.py [--tokens 1024 8000] [--output FILE.json]

The default model. Each round: a cold prompt, the same prompt three times more, a kill, a new
server, the same prompt. The time until the new server is ready is a number of its own. A tmpfs or
disk folder can be given by `--folder`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx

from prefixcache.tools.bench.machine import machine_facts

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from server_process import PREFIXCACHE, ServerProcess, server_process

LAST = 32
"""Tokens of the prompt that no earlier prompt has."""


def first_token_ms(server: ServerProcess, known: list[int], number: int) -> float:
    """Of the known tokens and some that are new each time."""
    new = [1000 + number * LAST + i for i in range(LAST)]
    body = {"prompt": known + new, "max_tokens": 1, "temperature": 0}
    begun = time.perf_counter()
    httpx.post(f"{server.address}/v1/completions", json=body, timeout=600).raise_for_status()
    return (time.perf_counter() - begun) * 1000


def measure(tokens: int, kept: Path, log: Path) -> dict[str, float]:
    """Milliseconds of each way, of one round."""
    known = [random.Random(tokens).randrange(1000, 40000) for _ in range(tokens)]
    command = [*PREFIXCACHE, "serve", "--port", "0", "--kv-cache-dir", str(kept)]
    command += ["--kv-cache-memory", "1GiB"]
    with server_process(command, log) as server:
        cold = first_token_ms(server, known, 0)
        warm = statistics.median(first_token_ms(server, known, n) for n in (1, 2, 3))
        time.sleep(1)  # Checksums are computed at a low priority.
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    begun = time.perf_counter()
    with server_process(command, log) as server:
        ready = (time.perf_counter() - begun) * 1000
        after = first_token_ms(server, known, 4)
        again = first_token_ms(server, known, 5)
    return {"cold": cold, "warm": warm, "after": after, "again": again, "ready": ready}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8000])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for tokens in arguments.tokens:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            place = Path(scratch)
            found[str(tokens)] = times = measure(tokens, place / "kv", place / "log")
        line = ", ".join(f"{name} {value:,.0f} ms" for name, value in times.items())
        print(f"{tokens} known tokens + {LAST}: {line}", flush=True)
    if arguments.output is not None:
        record = {
            "command": " ".join(["python", "benches/serving/restart.py", *sys.argv[1:]]),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "machine": machine_facts(),
            "milliseconds": found,
        }
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
