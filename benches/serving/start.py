"""How long a server takes to start with a model's file, and how much memory that takes.

    python benches/serving/random_gguf.py q4_k_m MODEL.gguf --shape llama-7b
    python benches/serving/start.py MODEL.gguf

The first start finds neither the folder made of the file, nor its digests, nor a page of it in
memory; the others find all of them. Times are until the server tells its address, and of
processors: the program's own and the system's, which gives new memory. `anonymous` is the most
memory of that kind at any time until then, above what the server says of weights and KV.
Before that the system is asked for new memory as large as the file, in large pages, twice: the
first time it may have to get it back from its host or to move other pages.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.tools.bench.servers import run_server

_LARGE_PAGE = 2 << 20
_SAMPLE_SECONDS = 0.01


class Peak(threading.Thread):
    """Watches the most anonymous memory that the child of this process has had, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = 0
        self.processor = (0.0, 0.0)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            for child in psutil.Process().children():
                self._look(child)

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _look(self, child: psutil.Process) -> None:
        try:
            memory, times = child.memory_info(), child.cpu_times()
        except psutil.NoSuchProcess:
            return
        self.anonymous = max(self.anonymous, memory.rss - memory.shared)
        self.processor = times.user, times.system


@contextmanager
def watched() -> Iterator[Peak]:
    peak = Peak()
    peak.start()
    try:
        yield peak
    finally:
        peak.stop()


async def start(flags: dict[str, str | int | None]) -> str:
    """One line about one start."""
    begun = time.perf_counter()
    with watched() as peak:
        async with run_server(flags) as address:
            seconds = time.perf_counter() - begun
            peak.stop()
            async with httpx.AsyncClient(base_url=address) as client:
                page = (await client.get("/metrics")).text
    user, system = peak.processor
    weights, kv = gauge(page, "weights_bytes"), gauge(page, "kv_cache_mapped_bytes")
    return (
        f"{seconds:5.1f} s, processors {user:5.1f} s and the system's {system:5.1f} s, "
        f"weights {weights / 1e6:,.0f} MB, KV {kv / 1e6:,.0f} MB, "
        f"anonymous at most {peak.anonymous / 1e6:,.0f} MB"
    )


def gauge(page: str, name: str) -> float:
    """The sum of a metric's samples."""
    families = text_string_to_metric_families(page)
    return sum(s.value for f in families for s in f.samples if s.name.endswith(name))


def drop_from_memory(file: Path) -> None:
    """Takes the file's pages out of the page cache."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def new_memory(num_bytes: int) -> float:
    """Seconds of the system for that many bytes of new memory in large pages, returned at once."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    for page in range(0, num_bytes, _LARGE_PAGE):
        memory[page] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime - before


def main(
    model: Annotated[Path, typer.Argument(help="A GGUF file.")],
    cpu_activations: Annotated[str, typer.Option()] = "auto",
    starts: Annotated[int, typer.Option(min=1)] = 3,
    num_blocks: Annotated[int, typer.Option(help="Of the KV cache.")] = 64,
) -> None:
    """Print a line for each start."""
    size = model.stat().st_size
    for _ in range(2):
        print(f"{size / 1e6:,.0f} MB of new memory: {new_memory(size):.1f} s of the system")
    with tempfile.TemporaryDirectory() as home:
        os.environ["PREFIXCACHE_HOME"] = home
        flags = {
            "model": str(model),
            "dtype": "bfloat16",
            "cpu_activations": cpu_activations,
            "num_blocks": num_blocks,
            "max_model_len": 512,
        }
        drop_from_memory(model)
        for number in range(1, starts + 1):
            print(f"start {number}: {asyncio.run(start(flags))}", flush=True)


if __name__ == "__main__":
    typer.run(main)
