"""Linears over GGUF blocks: their numbers are those of the `gguf` package; bad ones are refused."""

from __future__ import annotations

from typing import Any, get_args

import gguf
import numpy as np
import pytest
import torch

from prefixcache._core import Cpu, PackedLinear
from prefixcache.models.arrays import FLOAT32
from prefixcache.models.quantized import QuantFormat, QuantizedTensor

CPU = Cpu(2)
FORMATS = [*get_args(QuantFormat)]
ONE_SCALE = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")
HALVES = {
    **{name: [0] for name in ONE_SCALE},
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "MXFP4": list[int](),
}
INPUTS, OUTPUTS = 512, 96


def sizes(name: str) -> tuple[int, int]:
    """Numbers and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def random_blocks(name: str, outputs: int = OUTPUTS, inputs: int = INPUTS) -> np.ndarray[Any, Any]:
    """Rows of valid blocks; every finite scale may be one, and the smallest exponents are."""
    rng = np.random.default_rng(FORMATS.index(name))
    numbers, size = sizes(name)
    blocks = rng.integers(0, 256, (outputs, inputs // numbers, size), np.uint8)
    for at in HALVES.get(name, [0, 2]):
        finite = np.arange(1 << 16, dtype=np.uint16)
        finite = finite[np.isfinite(finite.view(np.float16))]
        scales = rng.choice(finite, blocks.shape[:2])
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = np.arange(outputs * inputs // numbers).reshape(outputs, -1) % 253
    return blocks.reshape(outputs, -1)


def layer_of(name: Any, blocks: np.ndarray[Any, Any], dtype: Any = "float32") -> PackedLinear:
    layer = PackedLinear(CPU, INPUTS, len(blocks), dtype)
    layer.copy_blocks(0, blocks.ctypes.data, len(blocks), name)
    return layer


def bits_of(layer: PackedLinear, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Its weight as it reads it, as integers: the signs of zeros count."""
    ids, rows = torch.arange(OUTPUTS), torch.full((OUTPUTS, INPUTS), 7, dtype=dtype)
    layer.read_rows(ids.data_ptr(), OUTPUTS, rows.data_ptr())
    return rows.view(torch.int32 if dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_gguf_package(name: str) -> None:
    blocks = random_blocks(name)
    wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    wanted = torch.from_numpy(np.ascontiguousarray(wanted))
    for dtype in (torch.float32, torch.bfloat16):
        layer = layer_of(name, blocks, str(dtype)[6:])
        assert layer.format_at(0) == name
        integers = bits_of(layer, dtype)
        assert torch.equal(integers, wanted.to(dtype).view(integers.dtype))


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_is_no_number_is_refused_and_the_weight_stays(
    name: Any, activations: Any
) -> None:
    blocks = random_blocks(name)
    layer = PackedLinear(CPU, INPUTS, OUTPUTS, "float32", activations=activations)
    layer.copy_blocks(0, blocks.ctypes.data, OUTPUTS, name)
    before = bits_of(layer)
    # NaN and both infinities; exponents of NaN and of what float32 cannot hold.
    bad_scales = [
        (at, b"\0" + bytes([high]))
        for at in HALVES.get(name, [0, 2])
        for high in (0x7E, 0x7C, 0xFC)
    ]
    for at, scale in bad_scales or [(0, bytes([exponent])) for exponent in (253, 254, 255)]:
        bad = np.roll(blocks, 1, axis=0)
        last = bad.shape[1] - sizes(name)[1] + at
        bad[71, last : last + len(scale)] = [*scale]
        with pytest.raises(ValueError, match=r"^blocks: row 71 has a scale that is no number$"):
            layer.copy_blocks(0, bad.ctypes.data, OUTPUTS, name)
        with pytest.raises(ValueError, match="row 71 has a scale that is not a number"):
            QuantizedTensor(name, (OUTPUTS, INPUTS), bad).dequantized(FLOAT32)
    assert torch.equal(bits_of(layer), before)


def test_what_blocks_and_rows_do_not_fit_is_refused() -> None:
    blocks = random_blocks("Q4_K")
    at = blocks.ctypes.data
    odd = PackedLinear(CPU, 128, 4, "float32")
    with pytest.raises(ValueError, match=r"^inputs must be a multiple of 256 for Q4_K$"):
        odd.copy_blocks(0, at, 4, "Q4_K")
    layer = PackedLinear(CPU, INPUTS, OUTPUTS, "float32", parts=[40, 56])
    for start, rows in ((0, 96), (0, 39), (1, 39), (40, 57), (96, 0), (40, 2**60)):
        with pytest.raises(ValueError, match=r"^start and rows must be those of a whole part$"):
            layer.copy_blocks(start, at, rows, "Q4_K")
    unknown: Any = "IQ3_S"
    with pytest.raises(ValueError, match=r"^format must be .*Q4_0.*MXFP4.* not .*IQ3_S"):
        layer.copy_blocks(0, at, 40, unknown)
    assert layer.num_bytes == 0
    rows = torch.full((2, INPUTS), 7, dtype=torch.float32)
    for bad in (-1, OUTPUTS):
        ids = torch.tensor([0, bad])
        with pytest.raises(ValueError, match=rf"^ids\[1\] must be from 0 to 95, not {bad}$"):
            layer.read_rows(ids.data_ptr(), 2, rows.data_ptr())
    assert (rows == 7).all()
