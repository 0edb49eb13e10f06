"""Time to the first token after `kill -9` of a server with `--kv-cache-dir`, next to cold and warm.

    python benches/serving/restart.py [--tokens 1024 8000] [--llama-python VENV/bin/python]

The default model. Each round: a cold prompt, the same prompt three times more, a kill, a new
server, the same prompt. With `--llama-python` llama.cpp does the same with the same weights at its
lowest level: its slot saved to a file and restored by another process, and kept in memory. The time
until a server is ready is a number of its own. Then what the folder costs a server that computes,
in turns with one without, and what the start costs that restores 100,000 blocks of a tiny model.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from compare import Entry, Worker, started

from prefixcache._core import PrefixCache
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.kv.kv_folder import FileLayout, open_kept_file
from prefixcache.models.hub import resolve_model
from prefixcache.tools.bench.machine import usable_cores, write_record

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.server_process import PREFIXCACHE, ServerProcess, server_process

LAST = 32
"""Tokens of the prompt that no earlier prompt has."""
NUM_BLOCKS = 100_000
COST_TOKENS = 240
"""Prompt of a request of `cost`: 11 MiB of blocks."""
COMMAND = [*PREFIXCACHE, "serve", "--port", "0", "--kv-cache-memory", "1GiB"]

Times = dict[str, float]


def known_tokens(count: int) -> list[int]:
    return [random.Random(count).randrange(1000, 40000) for _ in range(count)]


def new_tokens(number: int) -> list[int]:
    return [1000 + number * LAST + i for i in range(LAST)]


def request_ms(server: ServerProcess, prompt: list[int], most: int = 1) -> float:
    """Until the whole answer, of `most` tokens, is there."""
    body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
    begun = time.perf_counter()
    httpx.post(f"{server.address}/v1/completions", json=body, timeout=600).raise_for_status()
    return (time.perf_counter() - begun) * 1000


def restarted(tokens: int, folder: Path) -> Times:
    """Milliseconds of each way, of one round of ours."""
    known = known_tokens(tokens)

    def first_token_ms(number: int) -> float:
        return request_ms(server, known + new_tokens(number))

    command = [*COMMAND, "--kv-cache-dir", str(folder / "kv")]
    with server_process(command, folder / "log") as server:
        cold = first_token_ms(0)
        warm = statistics.median(first_token_ms(n) for n in (1, 2, 3))
        time.sleep(1)  # Checksums are computed at a low priority.
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    begun = time.perf_counter()
    with server_process(command, folder / "log") as server:
        ready = (time.perf_counter() - begun) * 1000
        after, again = first_token_ms(4), first_token_ms(5)
    return {"cold": cold, "warm": warm, "after": after, "again": again, "ready": ready}


def restarted_llama(python: str, tokens: int, folder: Path) -> Times:
    """The same of llama.cpp: the second process restores a slot."""
    model = str(next(resolve_model(DEFAULT_MODEL).glob("*.gguf")))
    entry = Entry("llama.cpp", "with_llama_cpp", {"model": model}, python)
    file, known = str(folder / "slot"), known_tokens(tokens)
    with llama(entry, tokens) as worker:
        new = {"first": new_tokens(0), "second": new_tokens(1)}
        saved: Times = worker("save", file=file, prompt=known, **new)
    with llama(entry, tokens) as worker:
        found: Times = worker("restore", file=file, length=tokens, second=new_tokens(4))
    return {name: seconds * 1000 for name, seconds in (saved | found).items()}


@contextmanager
def llama(entry: Entry, tokens: int) -> Generator[Worker]:
    """A process that has loaded the model."""
    shared = {"threads": usable_cores(), "max_tokens": tokens + LAST, "max_seqs": 1}
    with started(entry, shared, 600) as worker:
        yield worker


def cost(pairs: int, folder: Path) -> dict[str, list[float]]:
    """Requests with the folder over the same without it: time of each, and all seconds computed.

    Requests of `COST_TOKENS` new tokens and 16 generated go to both servers, in changing order. The
    first `pairs` fill the pool: their blocks have never been written. Of the next ones each block
    was evicted before. "KiB a token" is what the folder makes the system write to the disk.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    computed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    memory = pairs * (COST_TOKENS + 16) * 45 // 1024
    command = [*PREFIXCACHE, "serve", "--port", "0", "--kv-cache-memory", f"{memory}MiB"]
    kept = ["--kv-cache-dir", str(folder / "kv")]
    with (
        server_process([*command, *kept], folder / "log-with") as one,
        server_process(command, folder / "log-without") as other,
    ):
        process = psutil.Process(one.process.pid)
        before = process.io_counters().write_bytes
        for server in (one, other):
            request_ms(server, [1] * 64)  # Warms up.
        for number in range(2 * pairs):
            rng = random.Random(number)
            prompt = [rng.randrange(1000, 40000) for _ in range(COST_TOKENS)]
            turns = (one, other) if number % 2 else (other, one)
            spent = {server.address: _spent(server, prompt) for server in turns}
            stage = "filling" if number < pairs else "full"
            with_it, without = spent[one.address], spent[other.address]
            ratios[f"{stage}, time"].append(with_it[0] / without[0])
            computed[stage].append((with_it[1], without[1]))
        written = process.io_counters().write_bytes - before
    for stage, seconds in computed.items():
        with_it, without = map(sum, zip(*seconds, strict=True))
        ratios[f"{stage}, processor"] = [with_it / without]
    return ratios | {"KiB a token": [written / 1024 / (2 * pairs) / (COST_TOKENS + 15)]}


def _spent(server: ServerProcess, prompt: list[int]) -> tuple[float, float]:
    """Milliseconds of a request, and those that its server's threads computed."""
    times = psutil.Process(server.process.pid).cpu_times
    before = times()
    elapsed = request_ms(server, prompt, 16)
    after = times()
    return elapsed, (after.user - before.user + after.system - before.system) * 1000


def interval(ratios: list[float]) -> str:
    """The median, and between which two of the ratios it lies with 95 %."""
    in_order, count = sorted(ratios), len(ratios)
    low = max(0, int((count - 1.96 * count**0.5) / 2))
    return f"{statistics.median(ratios):.3f} ({in_order[low]:.3f} to {in_order[-1 - low]:.3f})"


def restore_ms(folder: Path) -> Times:
    """Of 100,000 blocks of 8 KiB: the file opened, index and LRU list restored, events ready."""
    layout = FileLayout(
        facts={"bench": 1},
        num_tensors=2,
        block_bytes=4096,
        max_blocks=NUM_BLOCKS + 1,
        block_tokens=16,
    )
    times: Times = {}
    restored = 0
    for _ in range(2):
        begun = time.perf_counter()
        file = open_kept_file(folder, layout, NUM_BLOCKS + 1, None)
        assert file is not None
        cache = PrefixCache(NUM_BLOCKS + 1, 16, weights="blake3:bench", model="m")
        restored, _ = cache.keep_in(file.core)
        times["restore"] = (time.perf_counter() - begun) * 1000
        cache.keep_events()
        times["with events"] = (time.perf_counter() - begun) * 1000
        for first in range(0, NUM_BLOCKS, 1000) if restored == 0 else ():
            tokens = np.arange(first * 16, (first + 1000) * 16, dtype=np.uint32)
            sequence = cache.new_sequence(tokens)
            cache.commit_prefix_plan(sequence, 0, len(tokens))
            cache.mark_blocks_filled([sequence], [len(tokens)])
            cache.release([sequence])
        while file.core.counts()["kept"] + restored < NUM_BLOCKS:
            time.sleep(0.1)
        del cache
        file.close()
    assert restored == NUM_BLOCKS
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8000])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cost-pairs", type=int, default=80)
    parser.add_argument("--llama-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        for tokens in given.tokens:
            sides: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
            for number in range(given.rounds):
                place = Path(scratch) / f"{tokens}-{number}"
                place.mkdir()
                found = {"prefixcache": restarted(tokens, place)}
                if given.llama_python is not None:
                    found["llama.cpp"] = restarted_llama(given.llama_python, tokens, place)
                for side, times in found.items():
                    for name, milliseconds in times.items():
                        sides[side][name].append(milliseconds)
                    line = ", ".join(f"{name} {x:,.0f}" for name, x in times.items())
                    print(f"{tokens} known tokens + {LAST}, {side} (ms): {line}", flush=True)
            values[str(tokens)] = sides
        (Path(scratch) / "cost").mkdir()
        values["cost"] = cost(given.cost_pairs, Path(scratch) / "cost")
        for name, ratios in values["cost"].items():
            print(f"a request with the folder, over one without, {name}: {interval(ratios)}")
        values["100,000 blocks"] = restore_ms(Path(scratch) / "many")
        print(f"100,000 blocks (ms): {values['100,000 blocks']}", flush=True)
    write_record(given.output, values=values)


if __name__ == "__main__":
    main()
