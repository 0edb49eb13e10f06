"""What snapshots of states cost, with random weights of Qwen3.5-0.8B's shape.

    python benches/kernels/states.py [--layers 24] [--turns 5]

*Warm*: 4,032 tokens are known, and 64 more are asked for. Next to it the last step of the first
request with these tokens, which computes as many with the state in its working block. *Steps*: a
prompt of 4,096 tokens in steps of several sizes, and the blocks that it takes. All in turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.kv.specs import STATE_BYTES, kv_layout
from prefixcache.models.hub import read_config
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from tiny_models import make_checkpoint

VOCAB = 4096
KNOWN, ASKED = 4032, 64
WARM_STEP = 504
"""Divides the known tokens, so that the first request's last step computes the others."""
STEPS = (512, 1024, 2048)
KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
}
_names = iter(range(1 << 30))


def engine_of(folder: Path, step: int) -> Engine:
    flags = {"dtype": "bfloat16", "kv_cache_memory": "2GiB", "max_model_len": 8192}
    config = EngineConfig.from_flags(
        model=str(folder), device="cpu", max_num_batched_tokens=step, max_step_ms=0.0, **flags
    )
    return build(config, folder).engine


def seconds_of_steps(engine: Engine, prompt: np.ndarray) -> tuple[list[float], int]:
    """Those of each step up to the first token, and the prompt tokens that were cached."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    name, seconds, cached = str(next(_names)), list[float](), 0
    begun = time.perf_counter()
    engine.add_request(Request(request_id=name, prompt_token_ids=prompt.tolist(), params=params))
    while engine.has_unfinished():
        for output in engine.step():
            cached = output.num_cached_tokens
        now = time.perf_counter()
        seconds.append(now - begun)
        begun = now
    return seconds, cached


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(next(_names)).integers(3, VOCAB, count)


def warm(folder: Path, turns: int) -> str:
    """The time to the first token of a hit, against that of the same step without one."""
    engine, pairs = engine_of(folder, WARM_STEP), list[tuple[float, float]]()
    for _ in range(turns):
        known = tokens(KNOWN)
        cold, _ = seconds_of_steps(engine, np.concatenate([known, tokens(ASKED)]))
        hit, cached = seconds_of_steps(engine, np.concatenate([known, tokens(ASKED)]))
        assert (len(hit), cached) == (1, KNOWN)
        pairs.append((hit[0], cold[-1]))
    ratio = statistics.median(one / other for one, other in pairs)
    one, other = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    return f"warm {one:.1f} ms, in the working block {other:.1f} ms, ratio {ratio:.3f}"


def by_step(folder: Path, turns: int) -> list[str]:
    """A cold prompt in steps of each size."""
    engines = {step: engine_of(folder, step) for step in STEPS}
    seconds: dict[int, list[float]] = {step: [] for step in STEPS}
    for _ in range(turns):
        for step, engine in engines.items():
            seconds[step].append(sum(seconds_of_steps(engine, tokens(KNOWN + ASKED))[0]))
    first = statistics.median(seconds[STEPS[0]])
    return [
        f"steps of {step}: {1e3 * statistics.median(seconds[step]):.0f} ms, "
        f"{statistics.median(seconds[step]) / first:.3f} of the first, "
        f"{engine.control.stats()['allocations'] // turns} blocks a prompt"
        for step, engine in engines.items()
    ]


def copied(folder: Path, turns: int) -> str:
    """A snapshot's bytes, copied between memory that is there."""
    states = kv_layout(read_config(str(folder), folder)).states
    num_bytes = STATE_BYTES * sum(part.numbers for part in states)
    source, target = np.ones((2, num_bytes), np.uint8)
    seconds = list[float]()
    for _ in range(20 * turns):
        begun = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begun)
    return f"{num_bytes / 1e6:.1f} MB copied in {1e3 * statistics.median(seconds):.2f} ms"


def main(
    layers: Annotated[int, typer.Option(help="A multiple of 4.")] = 24,
    turns: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Prints a line for each comparison."""
    with tempfile.TemporaryDirectory() as name:
        shape = SHAPE | {"num_hidden_layers": layers, "layer_types": KINDS * (layers // 4)}
        folder = make_checkpoint(
            Path(name), "qwen3.5", dtype=torch.bfloat16, max_position_embeddings=8192, **shape
        )
        print(f"{layers} layers: {warm(folder, turns)}", flush=True)
        print(*by_step(folder, turns), copied(folder, turns), sep="\n")


if __name__ == "__main__":
    typer.run(main)
