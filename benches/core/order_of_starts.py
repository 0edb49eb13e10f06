"""What the order of starts costs: thread CPU time with a number of requests that wait.

    python benches/core/order_of_starts.py [--waiting 10000]

Prompts of 512 tokens, of which 496 are one of 8 cached prefixes. A request is added, and one starts
in each step; nothing is computed. Beside it a step in which no request may start. Medians, policies
in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from prefixcache.config.engine_config import SchedulerConfig
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SequenceOutput

BLOCK_SIZE, PREFIXES, SHARED, OWN = 16, 8, 496, 16
PARAMS = SamplingParams(max_tokens=8)


class Desk:
    """A scheduler with requests that wait, of which one at a time may run."""

    def __init__(self, **rules: Any) -> None:
        cache = CacheManager(4096, BLOCK_SIZE)
        config = SchedulerConfig(max_num_seqs=1, **rules)
        self._scheduler = Scheduler(config, cache, max_model_len=1024)
        self._random = np.random.default_rng(0)
        self._stems = [self._tokens(SHARED) for _ in range(PREFIXES)]
        self._count = 0
        for _ in range(PREFIXES):
            self.add()
            self.start_one()

    def _tokens(self, count: int) -> np.ndarray[Any, Any]:
        return self._random.integers(0, 49_152, count, dtype=np.int32)

    def add(self) -> int:
        """Nanoseconds of one more request that waits."""
        prompt = np.concatenate([self._stems[self._count % PREFIXES], self._tokens(OWN)])
        request = Request(request_id=str(self._count), prompt_token_ids=prompt, params=PARAMS)
        self._count += 1
        return _timed(lambda: self._scheduler.add(request, seed=0))

    def start_one(self) -> int:
        """Nanoseconds of a step that starts a request, which then ends."""
        plans: list[Any] = []
        elapsed = _timed(lambda: plans.append(self._scheduler.schedule()))
        outputs = [SequenceOutput(token_id=1)]
        self._scheduler.complete(plans[0], outputs)
        self._scheduler.finish([plans[0].sequences[0].request_id])
        return elapsed

    def decode(self, steps: int) -> list[int]:
        """Nanoseconds of steps in which one answer goes on and no request may start."""
        times: list[int] = []
        for _ in range(steps):
            plan = self._scheduler.schedule()
            self._scheduler.complete(plan, [SequenceOutput(token_id=1)])
            plans: list[Any] = []
            times.append(_timed(lambda: plans.append(self._scheduler.schedule())))  # noqa: B023
            self._scheduler.complete(plans[0], [SequenceOutput(token_id=1)])
            self._scheduler.finish([plan.sequences[0].request_id])
        return times


def _timed(call: Callable[[], Any]) -> int:
    begun = time.thread_time_ns()
    call()
    return time.thread_time_ns() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--policies", nargs="*", default=["fcfs", "cache-aware"])
    asked = parser.parse_args()
    desks = {policy: Desk(scheduling_policy=policy) for policy in asked.policies}
    added = {p: [desk.add() for _ in range(asked.waiting)] for p, desk in desks.items()}
    started: dict[str, list[int]] = {policy: [] for policy in desks}
    decoded: dict[str, list[int]] = {policy: [] for policy in desks}
    for _ in range(asked.starts // 50):
        for policy, desk in desks.items():
            started[policy] += [desk.start_one() for _ in range(50)]
            decoded[policy] += desk.decode(10)
            for _ in range(60):
                desk.add()
    print("| policy | add | step with a start | step of a decode |\n|---|---|---|---|")
    for policy in desks:
        medians = [statistics.median(one[policy]) / 1000 for one in (added, started, decoded)]
        print(f"| {policy} | " + " | ".join(f"{value:.1f} us" for value in medians) + " |")


if __name__ == "__main__":
    main()
