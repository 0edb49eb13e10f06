"""Quantized matrices of GGUF: rows of quant blocks, which are integers and their scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from prefixcache.models.arrays import Array, new_array

QuantFormat = Literal[
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q2_K",
    "Q3_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]
"""The quantized formats that linear layers compute with, by GGUF's names."""
QUANT_FORMATS: tuple[QuantFormat, ...] = get_args(QuantFormat)

INT8_FORMATS: frozenset[QuantFormat] = frozenset(
    {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS"}
)
"""Those of which log probabilities with int8 activations were measured to be as near to float64 as
llama.cpp's: see benches/results/weights.md. Others are exact unless int8 is asked for."""

_CHUNK_NUMBERS = 1 << 20
# Those of the gguf package, whose import takes longer than a small model's loading.
_BLOCK_SIZES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}
# The largest exponent of MXFP4 whose largest number float32 holds; the kernels refuse others too.
_MOST_E8M0 = 252


def quant_block_size(quant_format: str) -> tuple[int, int]:
    """How many numbers a quant block of this format holds, and in how many bytes."""
    return _BLOCK_SIZES[quant_format]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Rows of quant blocks of one format. `shape` counts numbers, outputs and inputs.

    `blocks` are the file's bytes, uint8 [outputs, bytes of a row]; their rows are in the order of a
    checkpoint of Hugging Face. Raises `ValueError` where the format is none of `QUANT_FORMATS`, or
    the bytes are not those of the shape.
    """

    format: str
    shape: tuple[int, int]
    blocks: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        if self.format not in QUANT_FORMATS:
            raise ValueError(f"format must be one of {', '.join(QUANT_FORMATS)}, not {self.format}")
        outputs, inputs = self.shape
        wanted = (outputs, row_bytes(self.format, inputs))
        if self.blocks.dtype != np.uint8 or self.blocks.shape != wanted:
            raise ValueError(
                f"blocks must be uint8 {list(wanted)}, "
                f"not {self.blocks.dtype} {list(self.blocks.shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the quant blocks."""
        return self.blocks.nbytes

    def dequantized(self, dtype: np.dtype[Any]) -> Array:
        """The numbers [outputs, inputs], computed in float32 and rounded once to `dtype`.

        Raises `ValueError` where a scale is not a finite number.
        """
        out = new_array(self.shape, dtype)
        for start, rows in self.float32_rows():
            out[start : start + len(rows)] = rows
        return out

    def float32_rows(self) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """The numbers, a few rows at a time, each part with the number of its first row.

        Raises `ValueError` where a scale is not a finite number.
        """
        from gguf import GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType[self.format]
        count = max(1, _CHUNK_NUMBERS // self.shape[1])
        for start in range(0, self.shape[0], count):
            blocks = np.ascontiguousarray(self.blocks[start : start + count])
            with np.errstate(invalid="ignore", over="ignore"):  # reported below, with the row
                rows = dequantize(blocks, kind)
            finite = np.isfinite(rows).all(axis=1)
            if self.format == "MXFP4":
                finite &= (blocks[:, :: quant_block_size("MXFP4")[1]] <= _MOST_E8M0).all(axis=1)
            if not finite.all():
                row = start + int(finite.argmin())
                raise ValueError(f"blocks: row {row} has a scale that is not a number")
            yield start, rows


def row_bytes(quant_format: str, inputs: int) -> int:
    """Bytes of a row. Raises `ValueError` where it is not made of whole quant blocks."""
    numbers, size = quant_block_size(quant_format)
    if inputs % numbers:
        raise ValueError(f"inputs must be a multiple of {numbers} for {quant_format}")
    return inputs // numbers * size
