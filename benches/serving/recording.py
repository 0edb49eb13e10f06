"""What `--record-trace` costs the step loop: thread CPU time of a step, with and without.

    python benches/serving/recording.py --streams 64

Two engines whose runners compute nothing step in turn, one of them recorded: as many requests as
`--streams` run at once, and whenever one ends the next comes, a turn that goes on from an earlier
answer or a new prompt. Shown are a step's CPU time in the loop's thread (mean, and the median of
the differences of steps that did the same), the share that this is of a step of `--step-ms` with a
model, and what the writing thread computes a step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fake_engine import make_engine
from fake_runner import FakeRunner
from plain_runner import KnownStep
from prefixcache._core import replay_recording
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.recording import RecordedCacheManager
from prefixcache.kv.trace_writer import TraceWriter
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SequenceOutput, StepPlan, StepResult

BLOCK_SIZE = 16


class IdleRunner(FakeRunner):
    """Computes nothing: each token is the one that follows its sequence's length."""

    def submit(self, plan: StepPlan) -> KnownStep:
        rows = plan.sequences
        tokens = [(one.start + one.num_tokens) % 90 if one.sampling else None for one in rows]
        outputs = [SequenceOutput(token_id=token) for token in tokens]
        return KnownStep(StepResult(outputs))


class Loop:
    """An engine that always has so many requests; the same ones for the same seed."""

    def __init__(
        self, streams: int, prompt: int, policy: str, make_cache: Callable[..., CacheManager]
    ) -> None:
        pages = 8 * prompt // BLOCK_SIZE
        budget = streams + prompt
        sizes = {"max_tokens": budget, "max_seqs": streams, "max_pages": pages}
        blocks = streams * pages
        self._engine, _, _ = make_engine(
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=streams,
            max_num_batched_tokens=budget,
            max_model_len=pages * BLOCK_SIZE,
            merge_twins=True,
            runner=IdleRunner(blocks, BLOCK_SIZE, **sizes),
            make_cache=partial(make_cache, eviction_policy=policy),
        )
        self._random = random.Random(0)
        self._length = prompt
        self._prompts = [[] for _ in range(streams)]
        self._count = 0
        for _ in range(streams):
            self._add()

    def _add(self) -> None:
        prompt = self._prompts[self._count % len(self._prompts)]
        if len(prompt) + self._length > 6 * self._length:
            prompt.clear()
        prompt += [self._random.randrange(90) for _ in range(self._length)]
        params = SamplingParams(max_tokens=self._random.randrange(32, 128), ignore_eos=True)
        name = str(self._count)
        self._engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))
        self._count += 1

    def step(self) -> int:
        """Nanoseconds of thread CPU time of a step and of what follows its answers' ends."""
        begun = time.thread_time_ns()
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                self._add()
        return time.thread_time_ns() - begun

    def end(self) -> None:
        self._engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a recording costs a step.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="new ones of each turn")
    parser.add_argument("--eviction-policy", default="lru")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--step-ms", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder) / "trace.jsonl", 1 << 30)
        recorded = partial(RecordedCacheManager, writer=writer)
        sizes = arguments.streams, arguments.prompt_tokens, arguments.eviction_policy
        loops = Loop(*sizes, CacheManager), Loop(*sizes, recorded)
        thread = next(one for one in threading.enumerate() if one.name == "trace-recording")
        before = cpu_ns_of(thread)
        steps = [in_turn(loops, number) for number in range(arguments.steps)]
        written = cpu_ns_of(thread) - before
        loops[1].end()
        found = replay_recording(writer.path)
        size = writer.path.stat().st_size
    print(f"{arguments.streams} streams, {arguments.steps} steps; agrees: {found['agrees']}")
    plain, with_it = (statistics.mean(one) / 1000 for one in zip(*steps, strict=True))
    added = statistics.median(b - a for a, b in steps) / 1000
    print(f"step without {plain:.1f} us, with {with_it:.1f} us, median difference {added:.1f} us")
    share = added / (1000 * arguments.step_ms + plain)
    print(f"of a step with a model of {arguments.step_ms:g} ms: {share:.2%}")
    print(f"writing thread: {written / 1000 / arguments.steps:.1f} us a step", end=", ")
    print(f"{size / arguments.steps:.0f} bytes a step, {size / found['requests']:.0f} a request")


def in_turn(loops: tuple[Loop, Loop], number: int) -> tuple[int, int]:
    """A step of each, the other one first every time: the second finds its code in the caches."""
    first = number % 2
    times = {one: loops[one].step() for one in (first, 1 - first)}
    return times[0], times[1]


def cpu_ns_of(thread: threading.Thread) -> int:
    """CPU nanoseconds of another thread so far."""
    assert thread.ident is not None
    return time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))


if __name__ == "__main__":
    main()
