"""What open pages of the dashboard cost the loop of the steps: thread CPU a step, in alternation.

`python benches/serving/dashboard.py --model FOLDER --pages 1`; windows of a few seconds with the
stream read by as many scripts, and without, while requests that share prefixes are served.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import threading
import time
from contextlib import nullcontext

import httpx

from prefixcache.config.engine_config import EngineConfig
from prefixcache.diagnostics.room import CacheDiagnostics
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.build import build
from prefixcache.server.app import create_app
from prefixcache.server.dashboard.view import View
from prefixcache.server.jobs.context import Lifecycle
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.serve import ServeOptions, Server


class Traffic:
    """Clients that ask one question after the other."""

    def __init__(self, address: str, clients: int) -> None:
        self._address = address
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        chosen = random.Random(seed)
        with httpx.Client(base_url=self._address, timeout=120) as client:
            while not self._stop.is_set():
                prompt = f"Rule {chosen.randrange(6)}. " * 20 + f"Question {chosen.random()}."
                body = {"model": "bench", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()


class Pages:
    """Scripts that read the stream, as open pages do."""

    def __init__(self, address: str, count: int) -> None:
        self._address, self._stop = address, threading.Event()
        self._threads = [threading.Thread(target=self._read) for _ in range(count)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        with httpx.stream("GET", f"{self._address}/dashboard/events", timeout=30) as answer:
            for _ in answer.iter_bytes():
                if self._stop.is_set():
                    return


def event_cost(view: View) -> float:
    """Thread CPU milliseconds of what all open pages together are told, once a second."""
    begun = time.thread_time_ns()
    for _ in range(20):
        view.take()
        time.sleep(0.3)
    return (time.thread_time_ns() - begun) / 20 / 1e6


def window(engine: AsyncEngine, clock: int, seconds: float) -> float:
    """Thread CPU microseconds of the loop a step."""
    counts = engine.metrics.iteration_tokens
    steps, begun = sum(counts.counts), time.clock_gettime_ns(clock)
    time.sleep(seconds)
    used, taken = time.clock_gettime_ns(clock) - begun, sum(counts.counts) - steps
    return used / taken / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--num-blocks", type=int, default=4000)
    options = parser.parse_args()
    config = EngineConfig.from_flags(
        model=options.model, dtype="float32", device="cpu", num_blocks=options.num_blocks
    )
    built = build(config)
    engine = AsyncEngine(built.engine)
    served = ServedModel(names=("bench",), tokenizer=built.tokenizer)
    diagnostics = CacheDiagnostics(built.engine, 16 << 20, keeps_text=True)
    app = create_app(engine, served, diagnostics=diagnostics)
    server = Server(app, ServeOptions(), Lifecycle())
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        with Traffic(address, 4):
            time.sleep(3)
            measure(engine, _loop_clock(), address, options)
            print(f"an event: {event_cost(View(engine, served, '', diagnostics.history)):.2f} ms")
    finally:
        server.stop()
        thread.join()
        engine.close()


def _loop_clock() -> int:
    """The CPU clock of the thread that runs the steps."""
    loop = next(one for one in threading.enumerate() if one.name == "prefixcache-engine")
    return time.pthread_getcpuclockid(loop.ident or 0)


def measure(engine: AsyncEngine, clock: int, address: str, options: argparse.Namespace) -> None:
    """Pairs of windows, the first of which is the other one each time."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(options.pairs):
        for is_open in (False, True) if pair % 2 else (True, False):
            with Pages(address, options.pages) if is_open else nullcontext():
                time.sleep(0.5)
                found[is_open].append(window(engine, clock, options.seconds))
    changes = [on / off - 1 for off, on in zip(found[False], found[True], strict=True)]
    without, with_pages = (statistics.median(found[is_open]) for is_open in (False, True))
    print(
        f"{without:.1f} us a step without, {with_pages:.1f} us with {options.pages} page(s); "
        f"change of a pair: median {statistics.median(changes):+.2%}, "
        f"quartiles {', '.join(f'{q:+.2%}' for q in statistics.quantiles(changes)[::2])}"
    )


if __name__ == "__main__":
    main()
