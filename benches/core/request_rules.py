"""What a hit threshold and a cache salt cost a request: thread CPU time from arrival to start.

    python benches/core/request_rules.py

Requests of a known prompt come one at a time, each kind in turn; medians. A request is added,
scheduled and finished; nothing is computed. The threshold is one that every request passes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict

import numpy as np

from prefixcache.config.engine_config import SchedulerConfig
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SequenceOutput

BLOCK_SIZE = 16
PARAMS = SamplingParams(max_tokens=1)
KINDS = {
    "neither": {},
    "threshold": {"hit_threshold": 0.5},
    "salt": {"salt": "one of two tenants"},
    "both": {"hit_threshold": 0.5, "salt": "one of two tenants"},
}


class Desk:
    """A scheduler at which requests of one prompt come and go."""

    def __init__(self, prompt_tokens: int) -> None:
        blocks = 4 * prompt_tokens // BLOCK_SIZE
        cache = CacheManager(blocks, BLOCK_SIZE)
        config = SchedulerConfig(max_num_batched_tokens=prompt_tokens)
        self._scheduler = Scheduler(config, cache, max_model_len=prompt_tokens + 1)
        self._prompt = np.random.default_rng(0).integers(0, 49_152, prompt_tokens, dtype=np.int32)
        self._numbers = itertools.count()

    def fill(self, kind: str) -> None:
        """Makes the prompt known."""
        self._scheduler.add(self._request(kind), seed=0)
        plan = self._scheduler.schedule()
        self._scheduler.complete(plan, [SequenceOutput(token_id=1)])
        self._scheduler.finish([plan.sequences[0].request_id])

    def serve(self, kind: str) -> int:
        """Thread CPU nanoseconds of one request that hits."""
        begun = time.thread_time_ns()
        request = self._request(kind)
        self._scheduler.add(request, seed=0)
        plan = self._scheduler.schedule()
        self._scheduler.finish([request.request_id])
        elapsed = time.thread_time_ns() - begun
        if plan.sequences[0].start == 0:
            raise RuntimeError(f"{kind}: the prompt was not found")
        return elapsed

    def _request(self, kind: str) -> Request:
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=self._prompt,  # type: ignore[arg-type]
            params=PARAMS,
            cache=CacheOptions(**KINDS[kind]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=5000, help="of each kind")
    arguments = parser.parse_args()
    desk, times = Desk(arguments.prompt_tokens), defaultdict[str, list[int]](list)
    for kind in KINDS:
        desk.fill(kind)
    for _ in range(arguments.requests):
        for kind in KINDS:
            times[kind].append(desk.serve(kind))
    plain = statistics.median(times["neither"])
    for kind in KINDS:
        median = statistics.median(times[kind])
        print(f"{kind:10} {median / 1e3:7.2f} us   {(median - plain) / 1e3:+6.2f} us")


if __name__ == "__main__":
    main()
