"""Two servers share a budget of memory under alternating load.

    python benches/serving/elastic.py [--seconds 15] [--phases 4]

Each may grow to 70 % of the budget, a gigabyte for both caches together. A file tells both what is
left of it, written from what their caches have mapped; `--min-free-memory` and
`--kv-cache-idle-release` do the rest. One server is busy and the other idle, in turns; each asks
for the same prefixes again and again. The record has memory and hit rate over time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from prefixcache.tools.bench.machine import write_record

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.server_process import PREFIXCACHE, server_process
from support.tiny_models import make_checkpoint

MIB = 1 << 20
BUDGET = 1 << 30
MIN_FREE = 96 * MIB
IDLE_SECONDS = 15
# 2 MiB a block of 16 tokens, so that a gigabyte fills within seconds.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
}
PREFIXES, PREFIX_TOKENS = 16, 400
RECORD = Path(__file__).parents[1] / "record" / "elastic.json"
SAMPLE_SECONDS = 0.25


class Load:
    """Asks one server for its prefixes while it is on."""

    def __init__(self, address: str, seed: int) -> None:
        self.client = httpx.Client(base_url=address, timeout=60)
        self.on = threading.Event()
        self.ended = False
        self.failures: list[str] = []
        choose = random.Random(seed)
        self._choose = choose
        self._prefixes = [
            [choose.randrange(5, 300) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)
        ]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, Any]:
        return self.client.get("/prefix_cache/stats").json()

    def end(self) -> None:
        self.ended = True
        self.on.set()
        self._thread.join()

    def _run(self) -> None:
        client = httpx.Client(base_url=self.client.base_url, timeout=60)
        while True:
            self.on.wait()
            if self.ended:
                return
            prompt = [*self._choose.choice(self._prefixes), self._choose.randrange(5, 300)]
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            if answer.status_code != httpx.codes.OK:
                self.failures.append(answer.text)


def run(seconds: float, phases: int, folder: Path) -> dict[str, Any]:
    available = folder / "available"
    available.write_text(str(BUDGET))
    make_checkpoint(folder / "model", "qwen3", **SHAPE)
    flags = [
        *("--model", folder / "model", "--port", "0", "--dtype", "float32"),
        *("--kv-cache-memory", str(int(0.7 * BUDGET)), "--kv-cache-min-memory", "32MiB"),
        *("--min-free-memory", str(MIN_FREE), "--available-memory-file", available),
        *("--kv-cache-idle-release", str(IDLE_SECONDS)),
    ]
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                server_process([*PREFIXCACHE, "serve", *map(str, flags)], folder / f"log-{name}")
            )
            for name in "ab"
        ]
        loads = [Load(server.address, seed) for seed, server in enumerate(servers)]
        begun, before = time.monotonic(), [load.stats() for load in loads]
        while (now := time.monotonic() - begun) < seconds * phases:
            busy = int(now // seconds) % 2
            for number, load in enumerate(loads):
                (load.on.set if number == busy else load.on.clear)()
            stats = [load.stats() for load in loads]
            mapped = [one["memory"]["mapped_bytes"] for one in stats]
            available.write_text(str(max(0, BUDGET - sum(mapped))))
            samples.append(
                {
                    "seconds": round(now, 2),
                    "mapped_mib": [round(one / MIB, 1) for one in mapped],
                    "blocks": [one["num_blocks"] for one in stats],
                    "hit_rate": [_rate(*pair) for pair in zip(before, stats, strict=True)],
                }
            )
            if len(samples) % 8 == 0:
                before = stats
            time.sleep(SAMPLE_SECONDS)
        for load in loads:
            load.end()
        failures = [text for load in loads for text in load.failures]
        final = [load.stats()["memory"] for load in loads]
    return {"samples": samples, "failures": failures, "memory": final}


def _rate(before: dict[str, Any], now: dict[str, Any]) -> float | None:
    """Hit rate of the last two seconds; None without requests."""
    queried = now["queried_tokens"] - before["queried_tokens"]
    return round((now["hit_tokens"] - before["hit_tokens"]) / queried, 3) if queried else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25, help="of a phase")
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RECORD)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(asked.seconds, asked.phases, Path(folder))
    most = max(sum(sample["mapped_mib"]) for sample in found["samples"])
    about = {"budget_mib": BUDGET // MIB, "most_mib": most, "under_budget": most <= BUDGET / MIB}
    write_record(asked.output, **about, **found)
    print(json.dumps(about | {"failures": len(found["failures"])}))


if __name__ == "__main__":
    main()
