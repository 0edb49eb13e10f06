"""Time to the first token of a prompt that was evicted to a disk, next to computed and in memory.

    python benches/serving/disk.py [--tokens 256 1024 4000] [--dir ON_A_DISK /dev/shm]

The default model, in a pool that holds one such prompt. Each round: a new prompt, the same again
with other last tokens, then others that push it out, then the same from the disk. The system's own
cache of the file is dropped before (`posix_fadvise`), so that the disk itself is read. A folder on
a tmpfs shows what the tier costs without a disk.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx
import psutil

from prefixcache.kv.tiers.disk_store import FILE_NAME
from prefixcache.tools.bench.machine import write_record

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.server_process import PREFIXCACHE, ServerProcess, server_process

LAST = 32
"""Tokens of each prompt that no other one has."""
BLOCK = 16


def prompt_of(known: int, number: int, tokens: int) -> list[int]:
    """`tokens` of the known text, and the last ones."""
    text = random.Random(known)
    prompt = [text.randrange(1000, 40000) for _ in range(tokens)]
    return prompt + [1000 + number * LAST + i for i in range(LAST)]


class Timed:
    """A server, and the time of requests to it."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._number = 0

    def ms(self, known: int, tokens: int) -> tuple[float, int, int]:
        """Of one token after a prompt; with the prompt's cached tokens, and those from the disk."""
        self._number += 1
        prompt = prompt_of(known, self._number, tokens)
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        begun = time.perf_counter()
        answer = httpx.post(f"{self._server.address}/v1/completions", json=body, timeout=600)
        took = (time.perf_counter() - begun) * 1000
        details = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]
        return took, details["cached_tokens"], details.get("disk_cached_tokens", 0)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self._server.address}/metrics").text
        lines = (line for line in text.splitlines() if line.startswith(f"prefixcache:{name}"))
        return float(next(lines).rsplit(" ", 1)[1])


def measure(timed: Timed, tokens: int, known: int, folder: Path) -> dict[str, float]:
    """Milliseconds of one round."""
    times = dict[str, float]()
    times["computed"], cached, _ = timed.ms(known, tokens)
    assert cached == 0
    times["memory"], cached, from_disk = timed.ms(known, tokens)
    assert cached >= tokens // BLOCK * BLOCK, cached
    assert from_disk == 0
    before = timed.metric("disk_written_blocks_total")
    timed.ms(known + 1, tokens)
    timed.ms(known + 2, tokens)
    while timed.metric("disk_written_blocks_total") < before + tokens // BLOCK:
        timed.ms(known + 3, BLOCK)
        time.sleep(0.1)
    forget_pages(folder / FILE_NAME)
    times["disk"], _, from_disk = timed.ms(known, tokens)
    times["from disk, share"] = from_disk / tokens
    return times


def forget_pages(path: Path) -> None:
    """Writes a file to its disk and lets the system forget its pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def kind_of(folder: Path) -> str:
    """Whether the folder's files are on a disk."""
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one[1])]
    return "tmpfs" if max(mounts, key=lambda one: len(one[1]))[2] == "tmpfs" else "disk"


def rounds_of(tokens: int, count: int, parent: Path) -> dict[str, list[float]]:
    """Of a server whose pool holds one prompt of that many tokens: each round's times."""
    rounds: dict[str, list[float]] = defaultdict(list)
    num_blocks = 2 + -(-(tokens + LAST + 1) // BLOCK) * 5 // 4
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        folder = Path(scratch) / "disk"
        command = [*PREFIXCACHE, "serve", "--port", "0", "--num-blocks", str(num_blocks)]
        command += ["--disk-cache-memory", "4GiB", "--disk-cache-dir", str(folder)]
        with server_process(command, Path(scratch) / "log") as server:
            timed = Timed(server)
            for number in range(count):
                for name, value in measure(timed, tokens, 10 * number, folder).items():
                    rounds[name].append(value)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4000, 8000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, nargs="+", default=[Path(tempfile.gettempdir())])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    values: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(dict)
    for parent in given.dir:
        for tokens in given.tokens:
            rounds = rounds_of(tokens, given.rounds, parent)
            medians = {name: statistics.median(times) for name, times in rounds.items()}
            print(f"{kind_of(parent)}, {tokens} tokens (ms): {medians}", flush=True)
            values[kind_of(parent)][str(tokens)] = rounds
    write_record(given.output, values=values)


if __name__ == "__main__":
    main()
