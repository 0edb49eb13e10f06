"""What diagnostics cost the thread of the step loop, when nobody asks them anything.

What a request costs in the cache, from its start to its end, is timed with diagnostics and without,
in turns, in processor time of the one thread that does it. The pool is full, so each new block
evicts one, which is then told; remembering, the log's reader and the reasons run in other threads,
as in a server. With `--explains` another thread asks for explanations meanwhile. With
`--listener-alone` nothing is remembered between the requests, which a server does in another
thread, and which costs this one what it pushes out of the processor's caches.

    PYTHONPATH=python:tests python benches/serving/diagnostics.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time

import numpy as np

from fake_engine import make_engine
from prefixcache.diagnostics.history import RememberedPrompt
from prefixcache.diagnostics.reasons import Asked
from prefixcache.diagnostics.room import Admitted, CacheDiagnostics
from prefixcache.diagnostics.spans import PromptSource
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams

BLOCK = 16
MEMORY = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--requests", type=int, default=32, help="in a round, one after another")
    parser.add_argument("--hits", action="store_true", help="one prompt again and again")
    parser.add_argument("--explains", type=float, default=0, help="explanations a second")
    parser.add_argument("--listener-alone", action="store_true", help="the core's, no diagnostics")
    options = parser.parse_args()
    sides = [Side(options, with_diagnostics=on) for on in (False, True)]
    for side in sides:
        side.run(0)
    times: list[tuple[float, float]] = []
    for number in range(1, options.rounds + 1):
        order = sides if number % 2 else sides[::-1]
        found = {side.is_on: side.run(number) for side in order}
        times.append((found[False], found[True]))
    tell(options, times, sides[1])


class Side:
    """A cache, and what a server does around it."""

    def __init__(self, options: argparse.Namespace, *, with_diagnostics: bool) -> None:
        self.is_on = with_diagnostics
        self._options = options
        engine, _, self._cache = make_engine(
            num_blocks=4 * options.prompt_tokens // BLOCK,
            block_size=BLOCK,
            max_model_len=2 * options.prompt_tokens,
            max_num_batched_tokens=options.prompt_tokens,
        )
        self._engine = engine
        self._diagnostics = None
        if with_diagnostics and options.listener_alone:
            engine.listen_to_losses(lambda _: None)
        elif with_diagnostics:
            self._diagnostics = CacheDiagnostics(engine, MEMORY)
        self.num_explained = 0
        if self._diagnostics is not None and options.explains:
            threading.Thread(target=self._explain, daemon=True).start()

    def run(self, number: int) -> float:
        """Processor seconds of this thread in the cache for a round of requests."""
        random = np.random.default_rng(number)
        passed = 0.0
        for index in range(self._options.requests):
            random = np.random.default_rng(0) if self._options.hits else random
            request = self._request(random, f"{number}-{index}")
            self._begin(request)
            begun = time.thread_time()
            hits = self._serve(request)
            passed += time.thread_time() - begun
            if self._diagnostics is not None:
                told = Admitted(hit_tokens=hits, started_at=time.monotonic())
                self._diagnostics.end(request.request_id, told)
        # So many requests fill the log before its reader comes, twice a second.
        self._engine.read_losses()
        assert not self._cache.num_missed_evictions
        return passed

    def _serve(self, request: Request) -> int:
        """What the scheduler asks of the cache for a request."""
        name, size = request.request_id, len(request.prompt_token_ids)
        self._cache.start(request)
        hits = self._cache.count_hits(name, size - 1)
        self._cache.commit(name, hits, size + BLOCK - hits, size)
        self._cache.mark_filled([name], [size])
        self._cache.free([name])
        return hits

    def _request(self, random: np.random.Generator, name: str) -> Request:
        """A third of the prompt is a beginning that all share."""
        size = self._options.prompt_tokens
        tokens = random.integers(0, 90, size, np.int32)
        tokens[: size // 3] = np.arange(size // 3) % 90
        params = SamplingParams(max_tokens=1, temperature=0)
        return Request(request_id=name, prompt_token_ids=tokens, params=params)

    def _begin(self, request: Request) -> None:
        if self._diagnostics is None:
            return
        ids = request.prompt_token_ids
        prompt = RememberedPrompt(
            request_id=request.request_id,
            time=time.time(),
            owner=None,
            salt=None,
            model="m",
            api="chat",
            token_ids=ids,
            source=PromptSource("x" * (4 * len(ids))),
            prompt_tokens=len(ids),
            cached_tokens=0,
            miss=None,
            arrival=time.monotonic(),
        )
        self._diagnostics.begin(request.request_id, prompt)

    def _explain(self) -> None:
        random = np.random.default_rng(1 << 20)
        while self._diagnostics is not None:
            ids = self._request(random, "x").prompt_token_ids
            self._diagnostics.settle()
            self._diagnostics.explain(Asked(token_ids=ids, owner=None, salt=None), sees_all=False)
            self.num_explained += 1
            time.sleep(1 / self._options.explains)


def tell(options: argparse.Namespace, times: list[tuple[float, float]], side: Side) -> None:
    micros = [[one / options.requests * 1e6 for one in row] for row in zip(*times, strict=True)]
    for name, row in zip(("without", "with"), micros, strict=True):
        low, middle, high = statistics.quantiles(row, n=4)
        print(f"{name} diagnostics: {low:.2f}, {middle:.2f}, {high:.2f} us a request (quartiles)")
    more = [b - a for a, b in zip(*micros, strict=True)]
    low, middle, high = statistics.quantiles(more, n=4)
    print(f"more: {low:.2f}, {middle:.2f}, {high:.2f} us a request; least of each: ", end="")
    print(f"{min(micros[1]) - min(micros[0]):.2f}; {side.num_explained} explained")


if __name__ == "__main__":
    sys.exit(main())
