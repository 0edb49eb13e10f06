"""Linears over GGUF blocks next to dense ones, interleaved in one process: best of several times.

`python benches/kernels/low_bit.py [--shape 2048x8192] [--threads 2] [--dtype float32]`. Each
format walks over enough copies of a layer that they do not stay in the cache. "read" is the C
library's memchr over as many bytes as the weights take: what the memory gives to a thread that
does nothing but read. With one thread the thread's own time counts, so that others on the machine
change little; with more it is the clock's.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import torch

from prefixcache._core import Cpu, PackedLinear
from prefixcache.models.quantized import QUANT_FORMATS

FORMATS = QUANT_FORMATS
HALVES = dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)) | {
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "MXFP4": (),
}
COLD_BYTES = 128 << 20


def random_blocks(name: str, outputs: int, inputs: int) -> np.ndarray:
    """Rows of blocks with scales of about a hundredth."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (outputs, inputs // numbers, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for at in HALVES.get(name, (0, 2)):
        blocks[:, :, at : at + 2] = scale
    if name == "MXFP4":
        blocks[:, :, 0] = 120
    return blocks.reshape(outputs, -1)


def layers(cpu: Cpu, name: str, dtype: str, inputs: int, outputs: int) -> list[PackedLinear]:
    """As many copies as the cache does not hold."""

    def layer() -> PackedLinear:
        made = PackedLinear(cpu, inputs, outputs, dtype)  # pyright: ignore[reportArgumentType]
        if name == dtype:
            made.copy_rows(0, weight.data_ptr(), outputs)
        else:
            made.copy_blocks(0, blocks.ctypes.data, outputs, name)  # pyright: ignore[reportArgumentType]
        return made

    weight = torch.randn(outputs, inputs).to(getattr(torch, dtype))
    blocks = np.zeros(0) if name == dtype else random_blocks(name, outputs, inputs)
    first = layer()
    return [first, *(layer() for _ in range(COLD_BYTES // first.num_bytes))]


def multiply(
    ours: list[PackedLinear], dtype: str, rows: int, inputs: int, outputs: int
) -> Callable[[], None]:
    x = torch.randn(rows, inputs).to(getattr(torch, dtype))
    out = torch.empty(rows, outputs).to(getattr(torch, dtype))

    def run() -> None:
        for layer in ours:
            layer.forward(x.data_ptr(), rows, inputs, out.data_ptr())

    return run


def read(num_bytes: int, threads: int) -> Callable[[], None]:
    """Reads that many bytes, each thread its share."""
    memory = np.full(num_bytes, 2, np.uint8)
    find = ctypes.CDLL(None).memchr
    find.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    share = num_bytes // threads
    pool = ThreadPoolExecutor(threads)

    def run() -> None:
        if threads == 1:
            find(memory.ctypes.data, 1, num_bytes)
            return
        starts = [memory.ctypes.data + i * share for i in range(threads)]
        list(pool.map(lambda start: find(start, 1, share), starts))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="2048x8192", help="inputs x outputs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 1024])
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--instructions")
    arguments = parser.parse_args()
    inputs, outputs = map(int, arguments.shape.split("x"))
    cpu = Cpu(arguments.threads, arguments.instructions)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print(f"{arguments.threads} threads, {cpu.instructions}, {inputs} to {outputs}")
    dtype = arguments.dtype
    kept = {name: layers(cpu, name, dtype, inputs, outputs) for name in (dtype, *arguments.formats)}
    for rows in arguments.rows:
        ways = {}
        for name, ours in kept.items():
            used = ours if rows < 64 else ours[:1]
            ways[name] = multiply(used, dtype, rows, inputs, outputs), len(used)
            if rows == 1:
                num_bytes = sum(layer.num_bytes for layer in used)
                ways[f"read {name}"] = read(num_bytes, arguments.threads), len(used)
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(arguments.repeats):
            for way, (run, copies) in ways.items():
                begun = clock()
                run()
                best[way] = min(best[way], (clock() - begun) / copies)
        for name, ours in kept.items():
            seconds, num_bytes = best[name], ours[0].num_bytes
            line = f"{rows:5} rows {name:8}: {rows * inputs * outputs / seconds / 1e9:7.1f} G/s"
            line += f", {best[dtype] / seconds:5.2f} of {dtype}"
            if rows == 1:
                share = best[f"read {name}"] / seconds
                line += f", {num_bytes / seconds / 1e9:5.1f} GB/s, {share:5.2f} of a plain read"
            print(line, flush=True)


if __name__ == "__main__":
    main()
