"""What a window saves in a long prompt on the CPU: time of the processor for each chunk.

`python benches/kernels/windows.py [--threads 1] [--length 8192]`. A small model of Gemma 3's layers
(five with a window of 128, then one without) beside the same model with no window at all; random
weights, bfloat16, chunks of 1,024 tokens. The two take turns, chunk by chunk.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from prefixcache._core import Cpu
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.decoder import Builder, DecoderModel
from prefixcache.ops.sets import make_ops

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from paged_driver import PagedDriver

CHUNK = 1024
WINDOW = 128
LAYERS = 6
VOCAB = 512


def driver(cpu: Cpu, windows: tuple[int | None, ...], length: int) -> PagedDriver:
    config = ModelConfig(
        architecture="Gemma3ForCausalLM",
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        max_position_embeddings=length,
        qk_norm=True,
        layer_windows=windows,
        norm_offset=1.0,
        sandwich_norms=True,
        activation="gelu_tanh",
        embedding_scale=16.0,
        tie_word_embeddings=True,
    )
    ops = make_ops(torch.bfloat16, torch.device("cpu"), cpu)
    model = DecoderModel(config, Builder(ops), length)
    for slot in model.slots.values():
        slot.write(torch.randn(slot.shape) * 0.05)
    return PagedDriver(model, attention="cpu", cpu=cpu, max_tokens=length)


def seconds(prefilled: PagedDriver, tokens: list[int], start: int) -> float:
    begun = time.process_time()
    prefilled.hidden([(0, start, tokens[start : start + CHUNK])])
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cpu, length = Cpu(arguments.threads), arguments.length
    hybrid = (WINDOW,) * (LAYERS - 1) + (None,)
    models = {"windows": driver(cpu, hybrid, length), "full": driver(cpu, (), length)}
    tokens = torch.randint(VOCAB, (length,)).tolist()
    print(f"{arguments.threads} threads, {cpu.instructions}; ms of the processor for a chunk")
    for start in range(0, length, CHUNK):
        best = dict.fromkeys(models, float("inf"))
        for _ in range(arguments.repeats):
            for name, model in models.items():
                best[name] = min(best[name], seconds(model, tokens, start))
        line = "  ".join(f"{name} {value * 1e3:8.1f}" for name, value in best.items())
        print(f"tokens from {start:5}: {line}  {best['full'] / best['windows']:.2f}x", flush=True)


if __name__ == "__main__":
    main()
