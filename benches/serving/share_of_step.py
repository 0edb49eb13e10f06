"""How much of a step is linears: decode of eight sequences and prefill of 1,056 tokens.

`python benches/serving/share_of_step.py [--model MODEL] [--context 128]`. A model of GGUF blocks is
served exact, with activations of eight bits, and dequantized to bfloat16, by one thread each, in
turns in one process. A step is the engine's, in processor time; between two of them the same layers
multiply as many rows alone. "Layers" is what a step takes in its layers beside linears: attention,
norms, rotations; "rest" is the scheduler, the sampler and Python. From the share of the linears
follows what a step can gain from them at most, whatever their kernels do. It means something with
a release build alone (`make setup`), and takes about a minute.
"""

# ruff: noqa: SLF001 -- it takes an engine apart.
from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders.ours import Contender

from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.models.conversion import dequantize_folder
from prefixcache.models.hub import resolve_model

PREFILL = 1056
BATCH = 8


class Way:
    """An engine, and the time that its model's two calls took."""

    def __init__(self, **flags: object) -> None:
        self.contender = Contender(
            threads=1, max_tokens=16384, max_seqs=BATCH, dtype="bfloat16", **flags
        )
        self.model: Any = self.contender._engine._runner.steps._model  # type: ignore[attr-defined]
        self.in_model = 0.0
        for name in ("forward", "compute_logits"):
            setattr(self.model, name, self._timed(getattr(self.model, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.process_time()
            result = call(*arguments)
            self.in_model += time.process_time() - begun
            return result

        return timed

    def linears(self, rows: int, sampled: int) -> float:
        """Seconds of all linears of a step, alone."""
        decoder = self.model._model
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        calls = [
            (linear, linear.__call__, rows)
            for layer in decoder._layers
            for w in [layer.weights]
            for linear in (w.qkv, w.out, w.gate_up, w.down)
        ]
        calls.append((decoder._head, decoder._head.wide, sampled))
        for linear, _, count in calls:
            shape = (count, linear.in_features)
            inputs.setdefault(shape, torch.randn(shape).bfloat16())
        begun = time.process_time()
        for linear, call, count in calls:
            call(inputs[count, linear.in_features])
        return time.process_time() - begun

    def step(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds of a step, and of the model in it."""
        self.in_model = 0.0
        begun = time.process_time()
        run()
        return time.process_time() - begun, self.in_model


Step = Callable[[Way, int], None]


def measure(ways: dict[str, Way], rounds: int, rows: int, sampled: int, step: Step) -> None:
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            whole, model = way.step(partial(step, way, number))
            linears = way.linears(rows, sampled)
            if number:
                times[name].append((whole, model, linears))
    medians = {
        name: [statistics.median(each) * 1e3 for each in zip(*of, strict=True)]
        for name, of in times.items()
    }
    for name, (whole, model, linears) in medians.items():
        share, dequantized = linears / whole, medians["dequantized"]
        print(
            f"| {name} | {whole:.1f} | {linears:.1f} | {model - linears:.1f} | {whole - model:.1f} "
            f"| {100 * share:.0f} % | {dequantized[0] / whole:.2f} "
            f"| {dequantized[2] / linears:.2f} | {1 / (1 - share + share / 1.5):.2f} "
            f"| {1 / (1 - share):.2f} |"
        )


def head(title: str) -> None:
    print(f"\n{title}, ms of a processor\n")
    print(
        "| | step | linears | layers | rest | linears of step | times dequantized "
        "| its linears | step, were they 1.5 times as fast | were they free |\n" + "|---" * 10 + "|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=128, help="tokens before decoding")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        dequantized = Path(scratch)
        dequantize_folder(resolve_model(arguments.model), dequantized, torch.bfloat16)
        ways = {
            "exact": Way(model=arguments.model),
            "int8": Way(model=arguments.model, cpu_activations="int8"),
            "dequantized": Way(model=str(dequantized)),
        }

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, 20_000) for _ in range(length)]

    def decode(way: Way, _: int) -> None:
        way.contender.go_on(1)

    prompts = [prompt(arguments.context) for _ in range(BATCH)]
    for way in ways.values():
        way.contender.begin(prompts, 200)
    head(f"Decode of {BATCH} at {arguments.context}")
    measure(ways, arguments.rounds, BATCH, BATCH, decode)
    for way in ways.values():
        way.contender.end()
    head(f"Prefill of {PREFILL:,}")

    def prefill(way: Way, number: int) -> None:
        way.contender._first_token(fresh[number])  # pyright: ignore[reportPrivateUsage]

    rounds = max(3, arguments.rounds // 5)
    fresh = [prompt(PREFILL) for _ in range(rounds + 1)]
    measure(ways, rounds, PREFILL, 1, prefill)


if __name__ == "__main__":
    main()
