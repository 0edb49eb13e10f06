"""Random schedules of requests, each answer compared bit for bit with its lone cold run.

`python tests/equality.py --schedules 200` runs many and prints what was compared.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from prefixcache.config import CacheConfig, EngineConfig, SchedulerConfig
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.request import CacheOptions, Request, TokenLogprobs
from prefixcache.sampling_params import SamplingParams
from prefixcache.step_plan import SequenceOutput, StepPlan
from tiny_models import VOCAB_SIZE, make_checkpoint

# Widths for which torch's own linears round differently with the number of rows.
WIDE = {
    "hidden_size": 192,
    "intermediate_size": 352,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MAX_LEN = 320

Answer = list[tuple[int, TokenLogprobs]]


@dataclass
class Counts:
    """What was compared, and what really happened meanwhile."""

    outputs: int = 0
    differences: int = 0
    hit_tokens: int = 0
    chunks: int = 0
    preemptions: int = 0
    evictions: int = 0

    def add(self, other: Counts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def __str__(self) -> str:
        return ", ".join(
            f"{getattr(self, f.name)} {f.name.replace('_', ' ')}" for f in fields(self)
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How requests meet: how many, when each arrives (in steps), and what the engine allows."""

    seed: int
    arrivals: tuple[int, ...]
    num_blocks: int = 200
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    enable_prefix_caching: bool = True

    def requests(self) -> list[Request]:
        """Prompts that share and branch, under two salts; greedy and seeded."""
        choose = random.Random(self.seed)
        stem = [choose.randrange(3, VOCAB_SIZE) for _ in range(160)]
        return [_request(f"{self.seed}-{i}", choose, stem) for i in range(len(self.arrivals))]


def _request(request_id: str, choose: random.Random, stem: Sequence[int]) -> Request:
    shared = choose.choice([0, 5, 16, 31, 32, 96, 144, 149, 160])
    tail = [choose.randrange(3, VOCAB_SIZE) for _ in range(choose.randrange(1, 40))]
    params = SamplingParams(
        temperature=choose.choice([0.0, 0.9]),
        seed=choose.randrange(1 << 32),
        top_p=choose.choice([1.0, 0.9]),
        max_tokens=choose.randrange(1, 40),
        logprobs=3,
        ignore_eos=True,
    )
    salt = choose.choice([None, None, "tenant"])
    return Request(
        request_id=request_id,
        prompt_token_ids=[*stem[:shared], *tail],
        params=params,
        cache=CacheOptions(salt=salt),
    )


def random_schedule(seed: int) -> Schedule:
    choose = random.Random(seed)
    return Schedule(
        seed=seed,
        arrivals=tuple(choose.randrange(12) for _ in range(choose.randrange(4, 10))),
        num_blocks=choose.choice([26, 30, 40, 200]),
        max_num_batched_tokens=choose.choice([8, 17, 50, 64, 256, 1024]),
        max_num_seqs=choose.choice([2, 4, 8]),
        enable_prefix_caching=choose.random() < 0.9,
    )


def make_engine(folder: Path, dtype: str, invariant: bool, schedule: Schedule) -> Engine:
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,  # type: ignore[arg-type]
        device="cpu",
        batch_invariant=invariant,
        cache=CacheConfig(
            num_blocks=schedule.num_blocks,
            enable_prefix_caching=schedule.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_num_seqs=schedule.max_num_seqs,
            max_model_len=MAX_LEN,
        ),
    )
    return build(config, folder).engine


class Bench:
    """One tiny model; lone cold runs against schedules."""

    def __init__(self, folder: Path, dtype: str, *, invariant: bool = True) -> None:
        self._folder = folder
        self._dtype = dtype
        self._invariant = invariant
        lone = Schedule(
            seed=0, arrivals=(0,), max_num_batched_tokens=1024, enable_prefix_caching=False
        )
        self._lone = make_engine(folder, dtype, invariant, lone)

    def compare(self, schedule: Schedule) -> Counts:
        """Runs the schedule and counts answers that differ from their lone cold run."""
        engine = make_engine(self._folder, self._dtype, self._invariant, schedule)
        chunks = _count_chunks(engine)
        requests = schedule.requests()
        answers = run(engine, requests, schedule.arrivals)
        expected = {r.request_id: run(self._lone, [r], [0])[r.request_id] for r in requests}
        gauges = engine._gauges()
        return Counts(
            outputs=len(requests),
            differences=sum(answers[r.request_id] != expected[r.request_id] for r in requests),
            hit_tokens=gauges.num_hit_tokens,
            chunks=sum(chunks),
            preemptions=gauges.num_preemptions,
            evictions=engine.stats()["evictions"],
        )


def _count_chunks(engine: Engine) -> list[int]:
    """A list that grows by the chunks of each step that do not reach their prompt's end."""
    chunks: list[int] = []
    execute = engine._runner.execute

    def counted(plan: StepPlan) -> list[SequenceOutput]:
        chunks.append(sum(sequence.sampling is None for sequence in plan.sequences))
        return execute(plan)

    engine._runner.execute = counted  # type: ignore[method-assign]
    return chunks


def run(engine: Engine, requests: Sequence[Request], arrivals: Sequence[int]) -> dict[str, Answer]:
    """Serves requests that arrive at given steps; their tokens with all log probabilities."""
    answers: dict[str, Answer] = {request.request_id: [] for request in requests}
    waiting = sorted(zip(arrivals, range(len(requests)), strict=True), reverse=True)
    step = 0
    while waiting or engine.has_unfinished():
        while waiting and waiting[-1][0] <= step:
            engine.add_request(requests[waiting.pop()[1]])
        for output in engine.step():
            assert output.error is None, output.error
            new = zip(output.token_ids, output.logprobs, strict=True)
            answers[output.request_id].extend(new)
        step += 1
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100, help="for each type and thread count")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    total = Counts()
    for dtype, torch_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder), "qwen3", dtype=torch_dtype, **WIDE)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                bench, counts = Bench(Path(folder), dtype), Counts()
                for seed in range(arguments.seed, arguments.seed + arguments.schedules):
                    counts.add(bench.compare(random_schedule(seed)))
                print(f"{dtype}, {threads} threads: {counts}", flush=True)
                total.add(counts)
    print(f"all: {total}")
    raise SystemExit(total.differences > 0)


if __name__ == "__main__":
    main()
