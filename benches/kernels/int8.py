"""Weights in blocks, exact and with activations of eight bits, beside bfloat16: one process.

`python benches/kernels/int8.py [--threads 1] [--formats Q4_1,Q4_K]`. Thousand million products of
a weight and a number a second of the processor's time, best of several; the ways take turns. Each
walks over enough copies of the weight that they do not stay in the cache. Blocks are random.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from prefixcache._core import Cpu
from prefixcache.config.engine_config import Activations
from prefixcache.ops.invariant import InvariantLinear, InvariantOps
from prefixcache.ops.quantized import QUANT_FORMATS, QuantizedTensor

SHAPES = ((768, 3072), (1536, 576))
ROWS = (1, 8, 1024)
COLD_BYTES = 64 << 20


def random_blocks(quant_format: str, inputs: int, outputs: int) -> QuantizedTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[quant_format]]
    blocks = torch.randint(0, 256, (outputs, inputs // numbers, size), dtype=torch.uint8)
    # The second byte of a scale or minimum: numbers of usual sizes.
    for place in {"Q6_K": [209], "Q4_0": [1], "Q5_0": [1], "Q8_0": [1]}.get(quant_format, [1, 3]):
        blocks[:, :, place] = blocks[:, :, place] % 4 + 0x20
    return QuantizedTensor(quant_format, (outputs, inputs), blocks.flatten(1))


def layers(
    cpu: Cpu, weight: Tensor | QuantizedTensor, copies: int, activations: Activations
) -> list[InvariantLinear]:
    ops = InvariantOps(cpu, torch.bfloat16, torch.device("cpu"), activations)
    made = [ops.linear(weight.shape[1], weight.shape[0]) for _ in range(copies)]
    for layer in made:
        if isinstance(weight, QuantizedTensor):
            layer.copy_blocks(0, weight)
        else:
            layer.copy_rows(0, weight)
    return made


def seconds(layers: list[InvariantLinear], x: Tensor) -> float:
    begun = time.process_time()
    for layer in layers:
        layer(x)
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--formats", default=",".join(sorted(QUANT_FORMATS)))
    arguments = parser.parse_args()
    cpu = Cpu(arguments.threads)
    print(f"{arguments.threads} threads, {cpu.instructions}")
    for inputs, outputs in SHAPES:
        copies = COLD_BYTES // (inputs * outputs)
        dense = layers(cpu, torch.randn(outputs, inputs).bfloat16(), copies, "exact")
        for quant_format in arguments.formats.split(","):
            blocks = random_blocks(quant_format, inputs, outputs)
            ways = {"bfloat16": dense}
            ways |= {way: layers(cpu, blocks, copies, way) for way in ("exact", "int8")}
            for rows in ROWS:
                used = copies if rows < 64 else 2
                x, best = torch.randn(rows, inputs).bfloat16(), dict.fromkeys(ways, float("inf"))
                for _ in range(arguments.repeats):
                    for way, made in ways.items():
                        best[way] = min(best[way], seconds(made[:used], x))
                speed = {w: used * inputs * outputs * rows / s / 1e9 for w, s in best.items()}
                line = "  ".join(
                    f"{way} {value:6.1f} ({value / speed['bfloat16']:.2f})"
                    for way, value in speed.items()
                )
                print(f"{quant_format} {inputs}x{outputs} {rows:5} rows: {line}", flush=True)


if __name__ == "__main__":
    main()
