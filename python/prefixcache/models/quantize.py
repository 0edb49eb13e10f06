"""Matrices to a quantized GGUF format, by the gguf package."""

from __future__ import annotations

import numpy as np

from prefixcache.exceptions import ModelLoadError
from prefixcache.models.arrays import Array
from prefixcache.models.quantized import QuantizedTensor, row_bytes

QUANTIZABLE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
"""The formats that the gguf package writes; it only reads the K and IQ formats."""

_SLICE_NUMBERS = 4 << 20
# Scales and minimums of blocks are float16.
_MOST = float(np.finfo(np.float16).max)


def quantized(name: str, weight_OI: Array, quant_format: str) -> QuantizedTensor:
    """The weight in one of `QUANTIZABLE`, converted some rows at a time.

    Raises `ModelLoadError` with the tensor's name where a number is not finite or beyond float16.
    """
    from gguf import GGMLQuantizationType, quantize

    outputs, inputs = weight_OI.shape
    blocks = np.empty((outputs, row_bytes(quant_format, inputs)), np.uint8)
    step = max(1, _SLICE_NUMBERS // inputs)
    for start in range(0, outputs, step):
        rows = weight_OI[start : start + step].astype(np.float32)
        if not (np.abs(rows) <= _MOST).all():
            raise ModelLoadError(
                f"{name} holds NaN or numbers beyond {_MOST:,.0f}, which a quantized format cannot."
            )
        with np.errstate(over="ignore", invalid="ignore"):  # where the scale is 0 in float16
            part = quantize(rows, GGMLQuantizationType[quant_format])
        blocks[start : start + step] = part
    return QuantizedTensor(quant_format, (outputs, inputs), blocks)
