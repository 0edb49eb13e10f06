"""A linear layer four ways, interleaved in one process: time of the processor, best of several.

`python benches/kernels/linear.py [--threads 1]`, on the shapes of SmolLM2-135M. "packed" is
oneDNN's packed weight in one call, "tiles" the same in calls of exactly 32 or 64 rows, which is how
torch's kernels could be made independent of the batch. Each route walks over enough copies of the
weight that they do not stay in the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache._core import Cpu
from prefixcache.ops.invariant import InvariantOps

SHAPES = {"qkv": (576, 960), "out": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)}
ROWS = (1, 8, 64, 128, 1024)
COLD_BYTES = 48 << 20

Route = Callable[[Tensor, int], Tensor]


def routes(cpu: Cpu, weights: list[Tensor]) -> dict[str, Route]:
    outputs, inputs = weights[0].shape
    onednn = torch.ops.mkldnn
    packed = [onednn._reorder_linear_weight(w, 1) for w in weights]  # noqa: SLF001
    ops = InvariantOps(cpu, weights[0].dtype, torch.device("cpu"))
    ours = [ops.linear(inputs, outputs) for _ in weights]
    for layer, weight in zip(ours, weights, strict=True):
        layer.copy_rows(0, weight)

    def one_call(x: Tensor, i: int) -> Tensor:
        return onednn._linear_pointwise(x, packed[i], None, "none", [], "")  # noqa: SLF001

    def tiles(height: int) -> Route:
        def run(x: Tensor, i: int) -> Tensor:
            padded = F.pad(x, (0, 0, 0, -len(x) % height))
            return torch.cat([one_call(tile, i) for tile in padded.split(height)])[: len(x)]

        return run

    return {
        "ours": lambda x, i: ours[i](x),
        "F.linear": lambda x, i: F.linear(x, weights[i]),
        "packed": one_call,
        "tiles of 32": tiles(32),
        "tiles of 64": tiles(64),
    }


def microseconds(route: Route, x: Tensor, copies: int) -> float:
    begun = time.process_time()
    for i in range(copies):
        route(x, i)
    return (time.process_time() - begun) / copies * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cpu = Cpu(arguments.threads)
    print(
        f"{arguments.threads} threads, {cpu.instructions}, torch {torch.__version__}; microseconds"
    )
    for dtype in (torch.bfloat16, torch.float32):
        for name, (inputs, outputs) in SHAPES.items():
            copies = max(2, COLD_BYTES // (inputs * outputs * dtype.itemsize))
            weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(copies)]
            ways = routes(cpu, weights)
            for rows in ROWS:
                x, calls = torch.randn(rows, inputs).to(dtype), copies if rows < 64 else 2
                best = dict.fromkeys(ways, float("inf"))
                for _ in range(arguments.repeats):
                    for way, route in ways.items():
                        best[way] = min(best[way], microseconds(route, x, calls))
                line = "  ".join(f"{way} {value:8.1f}" for way, value in best.items())
                print(f"{str(dtype)[6:]:9} {name:8} {rows:5} rows: {line}", flush=True)


if __name__ == "__main__":
    main()
