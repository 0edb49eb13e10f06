"""What snapshots of states cost, with random weights of Qwen3.5-0.8B's shape.

    python benches/kernels/states.py [--layers 24] [--turns 5] [--output FILE]

*Warm*: 4,032 tokens are known, and 64 more are asked for. Next to it the last step of the first
request with these tokens, which computes as many with the state in its working block. *Cold*: a
prompt of 4,096 tokens with the cache and without, and in steps of several sizes, with the blocks
that it takes. All in turns.
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
from prefixcache.tools.bench.machine import write_record
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.tiny_models import make_checkpoint

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


Values = dict[str, dict[str, list[float]]]
"""Milliseconds of each turn, by what is compared."""


def engine_of(folder: Path, step: int, *, caches: bool = True) -> Engine:
    flags = {"dtype": "bfloat16", "kv_cache_memory": "2GiB", "max_model_len": 8192}
    flags |= {"enable_prefix_caching": caches}
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


def warm(folder: Path, turns: int) -> dict[str, list[float]]:
    """The time to the first token of a hit, against that of the same step without one."""
    engine = engine_of(folder, WARM_STEP)
    values: dict[str, list[float]] = {"a hit": [], "working block": []}
    for _ in range(turns):
        known = tokens(KNOWN)
        cold, _ = seconds_of_steps(engine, np.concatenate([known, tokens(ASKED)]))
        hit, cached = seconds_of_steps(engine, np.concatenate([known, tokens(ASKED)]))
        assert (len(hit), cached) == (1, KNOWN)
        values["a hit"].append(1e3 * hit[0])
        values["working block"].append(1e3 * cold[-1])
    return values


def cold(folder: Path, turns: int) -> dict[str, list[float]]:
    """A cold prompt without the cache, and with it in steps of each size."""
    engines = {f"steps of {step}": engine_of(folder, step) for step in STEPS}
    engines["cache off"] = engine_of(folder, STEPS[0], caches=False)
    values: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(turns):
        for name, engine in engines.items():
            prompt = tokens(KNOWN + ASKED)
            values[name].append(1e3 * sum(seconds_of_steps(engine, prompt)[0]))
    for name, engine in engines.items():
        print(f"{name}: {engine.control.stats()['allocations'] // turns} blocks a prompt")
    return values


def copied(folder: Path, turns: int) -> dict[str, list[float]]:
    """A snapshot's bytes, copied between memory that is there."""
    states = kv_layout(read_config(str(folder), folder)).states
    num_bytes = STATE_BYTES * sum(part.numbers for part in states)
    source, target = np.ones((2, num_bytes), np.uint8)
    values = list[float]()
    for _ in range(20 * turns):
        begun = time.perf_counter()
        np.copyto(target, source)
        values.append(1e3 * (time.perf_counter() - begun))
    return {f"{num_bytes / 1e6:.1f} MB": values}


def main(
    layers: Annotated[int, typer.Option(help="A multiple of 4.")] = 24,
    turns: Annotated[int, typer.Option(min=1)] = 5,
    output: Annotated[Path | None, typer.Option(help="Where to write the record.")] = None,
) -> None:
    """Prints the median of each comparison's milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        shape = SHAPE | {"num_hidden_layers": layers, "layer_types": KINDS * (layers // 4)}
        folder = make_checkpoint(
            Path(name), "qwen3.5", dtype=torch.bfloat16, max_position_embeddings=8192, **shape
        )
        values: Values = {
            "warm": warm(folder, turns), "cold": cold(folder, turns), "copy": copied(folder, turns)
        }  # fmt: skip
    for compared, times in values.items():
        for name, ms in times.items():
            print(f"{compared}, {name}: {statistics.median(ms):.1f} ms")
    write_record(output, values=values)


if __name__ == "__main__":
    typer.run(main)
