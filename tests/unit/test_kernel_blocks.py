"""Linears over GGUF blocks: their numbers are those of the `gguf` package; bad ones are refused."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from prefixcache._core import Cpu, PackedLinear

CPU = Cpu(2)
FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
HALVES = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}
INPUTS, OUTPUTS = 512, 96


def sizes(name: str) -> tuple[int, int]:
    """Numbers and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def random_blocks(name: str, outputs: int = OUTPUTS, inputs: int = INPUTS) -> np.ndarray[Any, Any]:
    """Rows of valid blocks; every finite float16 may be a scale."""
    rng = np.random.default_rng(FORMATS.index(name))
    numbers, size = sizes(name)
    blocks = rng.integers(0, 256, (outputs, inputs // numbers, size), np.uint8)
    for at in HALVES.get(name, [0, 2]):
        finite = np.arange(1 << 16, dtype=np.uint16)
        finite = finite[np.isfinite(finite.view(np.float16))]
        scales = rng.choice(finite, blocks.shape[:2])
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def layer_of(name: Any, blocks: np.ndarray[Any, Any], dtype: Any = "float32") -> PackedLinear:
    layer = PackedLinear(CPU, INPUTS, len(blocks), dtype)
    layer.copy_blocks(0, blocks.ctypes.data, len(blocks), name)
    return layer


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_gguf_package(name: str) -> None:
    blocks = random_blocks(name)
    wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    wanted = torch.from_numpy(np.ascontiguousarray(wanted))
    ids = torch.arange(OUTPUTS)
    for dtype, integers in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        layer = layer_of(name, blocks, str(dtype)[6:])
        assert layer.formats == [name]
        rows = torch.full((OUTPUTS, INPUTS), 7, dtype=dtype)
        layer.read_rows(ids.data_ptr(), OUTPUTS, rows.data_ptr())
        assert torch.equal(rows.view(integers), wanted.to(dtype).view(integers))
