"""How fast blocks are laid out for the kernels when a GGUF file is loaded.

python benches/kernels/lay_out.py --activations int8 --threads 2
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from prefixcache._core import Cpu, PackedLinear
from prefixcache.ops.quantized import QUANT_FORMATS, QuantFormat, row_bytes

_OUTPUTS, _INPUTS = 2048, 4096
_REPEATS = 7


def main(
    activations: Annotated[Literal["exact", "int8"], typer.Option()] = "exact",
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Print bytes of the file a second of the processor's time, the best of a few times."""
    cpu = Cpu(threads)
    for name in QUANT_FORMATS:
        # Zeros: any bytes take as long, and their scales are numbers.
        blocks = np.zeros((_OUTPUTS, row_bytes(name, _INPUTS)), np.uint8)
        layer = PackedLinear(cpu, _INPUTS, _OUTPUTS, "bfloat16", activations=activations)
        best = min(_seconds(layer, blocks, name) for _ in range(_REPEATS))
        print(f"{name:5} {blocks.nbytes / best / 1e9:6.2f} GB/s")


def _seconds(layer: PackedLinear, blocks: NDArray[np.uint8], name: QuantFormat) -> float:
    start = time.process_time()
    layer.copy_blocks(0, blocks.ctypes.data, _OUTPUTS, name)
    return time.process_time() - start


if __name__ == "__main__":
    typer.run(main)
