"""First come, first served beside long hits first, at twice the rate that the engine can serve.

    python benches/serving/admission.py [--repeats 3] [--output benches/record/admission.json]

A fixed set of requests comes at fixed times; nothing is shed, and percentiles are over all of them.
Two workloads: prefixes that many requests share in random order, and conversations whose turns are
sent one after another with what was said before, all of them interleaved. The pool holds about half
of the prefixes. The rate is twice what fcfs serves when all requests wait from the beginning. Both
policies take turns in one process, each with an engine of its own whose cache is empty at the start
of a run; the engine alone is measured, without HTTP. The model is a tiny one of random weights.

Time is the processor time of this process, which computes with one thread, and leaps to the next
arrival where nothing is to be done: other work on the machine changes little. `--max-queue-delay`
alone counts in the engine's own clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from prefixcache.config.engine_config import EngineConfig, SchedulingPolicy
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.tools.bench.machine import machine_facts
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from tiny_models import make_checkpoint

RECORD = Path(__file__).parents[1] / "record" / "admission.json"
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
BLOCK = 16
POOL_TOKENS = 8192
OUTPUT_TOKENS = 4
POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "cache-aware")


@dataclass(frozen=True)
class Arrival:
    """A prompt, and when it comes in units of the mean time between two requests."""

    at: float
    prompt: list[int]


def tokens(choose: random.Random, count: int) -> list[int]:
    return [choose.randrange(5, 300) for _ in range(count)]


def shared_prefixes(seed: int, prefixes: int = 32, length: int = 512) -> list[Arrival]:
    """Prefixes, each asked for 10 times in random order with 32 tokens behind."""
    choose = random.Random(seed)
    prompts = [
        [*prefix, *tokens(choose, 32)]
        for prefix in [tokens(choose, length) for _ in range(prefixes)]
        for _ in range(10)
    ]
    choose.shuffle(prompts)
    times = itertools.accumulate(choose.expovariate(1) for _ in prompts)
    return [Arrival(at, prompt) for at, prompt in zip(times, prompts, strict=True)]


def conversations(seed: int, count: int = 64, length: int = 160) -> list[Arrival]:
    """Conversations of 5 turns, each of `length` tokens more; one system prompt for all.

    Of 64 a turn comes on average a hundred requests after the one before.
    """
    choose = random.Random(seed)
    system = tokens(choose, 128)
    arrivals: list[Arrival] = []
    for _ in range(count):
        at, prompt = choose.uniform(0, 200), system
        for _ in range(5):
            prompt = [*prompt, *tokens(choose, length)]
            arrivals.append(Arrival(at, prompt))
            at += choose.expovariate(1 / 30)
    span = max(arrival.at for arrival in arrivals)
    scale = len(arrivals) / span
    return sorted(
        (Arrival(arrival.at * scale, arrival.prompt) for arrival in arrivals), key=lambda a: a.at
    )


WORKLOADS: dict[str, Callable[[int], list[Arrival]]] = {
    "shared-prefix": shared_prefixes,
    "multi-turn": conversations,
}


class Clock:
    """Processor time of this process in seconds, from 0 on, and what was leapt over."""

    def __init__(self) -> None:
        self._begun = time.process_time()

    def now(self) -> float:
        return time.process_time() - self._begun

    def leap_to(self, seconds: float) -> None:
        self._begun -= max(0.0, seconds - self.now())


@dataclass(frozen=True)
class Outcome:
    ttft: list[float]
    seconds: float
    hit_rate: float


def serve(engine: Engine, arrivals: Sequence[Arrival], rate: float | None) -> Outcome:
    """All requests, `rate` in a second or all at once; times to the first token in seconds."""
    engine.control.reset_prefix_cache()
    before = engine.control.prefix_cache_stats()
    waiting = list(reversed(arrivals))
    clock = Clock()
    due = {str(i): (a.at / rate if rate else 0.0) for i, a in enumerate(arrivals)}
    ttft: dict[str, float] = {}
    while waiting or engine.has_unfinished():
        while waiting and due[name := str(len(arrivals) - len(waiting))] <= clock.now():
            engine.add_request(request(name, waiting.pop().prompt))
        if not engine.has_unfinished():
            clock.leap_to(due[str(len(arrivals) - len(waiting))])
            continue
        for output in engine.step():
            if output.token_ids and output.request_id not in ttft:
                ttft[output.request_id] = clock.now() - due[output.request_id]
    seconds = clock.now()
    assert len(ttft) == len(arrivals)
    after = engine.control.prefix_cache_stats()
    queried = after.queried_tokens - before.queried_tokens
    hits = after.hit_tokens - before.hit_tokens
    return Outcome(list(ttft.values()), seconds, hits / queried)


def request(name: str, prompt: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True),
    )


def make_engine(folder: Path, policy: SchedulingPolicy, max_queue_delay: float) -> Engine:
    config = EngineConfig.from_flags(
        model=str(folder),
        dtype="float32",
        device="cpu",
        cpu_threads=1,
        block_size=BLOCK,
        num_blocks=1 + POOL_TOKENS // BLOCK,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        max_model_len=2048,
        scheduling_policy=policy,
        max_queue_delay=max_queue_delay,
    )
    return build(config).engine


def summary(outcome: Outcome) -> dict[str, float]:
    p50, p90, p99 = np.percentile(outcome.ttft, [50, 90, 99])
    return {
        "hit_rate": round(outcome.hit_rate, 4),
        "ttft_p50_s": round(float(p50), 3),
        "ttft_p90_s": round(float(p90), 3),
        "ttft_p99_s": round(float(p99), 3),
        "seconds": round(outcome.seconds, 2),
    }


def measure(
    engines: dict[SchedulingPolicy, Engine], arrivals: list[Arrival], repeats: int, load: float
) -> dict[str, Any]:
    """Runs of all policies in turns at `load` times the rate of fcfs, and what they are to fcfs."""
    fastest = min(serve(engines["fcfs"], arrivals, None).seconds for _ in range(2))
    rate = load * len(arrivals) / fastest
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in engines}
    for number in range(repeats):
        order = list(engines) if number % 2 == 0 else list(reversed(engines))
        for policy in order:
            runs[policy].append(summary(serve(engines[policy], arrivals, rate)))
            print(policy, runs[policy][-1], flush=True)
    medians = {
        policy: {name: median(run[name] for run in found) for name in found[0]}
        for policy, found in runs.items()
    }
    ratios = {
        name: round(value / medians["cache-aware"][name], 2)
        for name, value in medians["fcfs"].items()
        if name != "hit_rate"
    }
    return {"rate": round(rate, 1), "medians": medians, "fcfs_to_cache_aware": ratios, "runs": runs}


def options(about: str | None, max_queue_delay: float, record: Path) -> argparse.ArgumentParser:
    """What both benches are asked; the last two are what is left out."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", type=float, default=2, help="times the rate that fcfs serves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-queue-delay", type=float, default=max_queue_delay)
    parser.add_argument("--output", type=Path, default=record)
    return parser


def facts(asked: argparse.Namespace, pool_tokens: int) -> dict[str, Any]:
    """What a record says of its run, before the results."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine_facts(),
        "load": asked.load,
        "max_queue_delay": asked.max_queue_delay,
        "pool_tokens": pool_tokens,
    }


def main() -> None:
    parser = options(__doc__, 30.0, RECORD)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    asked = parser.parse_args()
    found = {**facts(asked, POOL_TOKENS), "shape": SHAPE}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), **SHAPE)
        engines = {p: make_engine(Path(folder), p, asked.max_queue_delay) for p in POLICIES}
        for name in asked.workload or WORKLOADS:
            print(name, flush=True)
            found[name] = measure(engines, WORKLOADS[name](asked.seed), asked.repeats, asked.load)
            print(json.dumps({k: v for k, v in found[name].items() if k != "runs"}), flush=True)
    asked.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
