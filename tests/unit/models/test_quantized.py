"""Matrices of GGUF blocks: dequantized by the gguf package, rounded once, written into linears."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from prefixcache._core import Cpu
from prefixcache.models import quantized as quantized_module
from prefixcache.models.arrays import BFLOAT16, DTYPES, FLOAT32
from prefixcache.models.decoder.shapes import LinearShape
from prefixcache.models.quantized import QUANT_FORMATS, QuantizedTensor, quant_block_size, row_bytes
from prefixcache.runner.cpu.linear import CpuEmbedding, CpuLinear, KernelDType
from prefixcache.runner.torch.decoder.builder import Builder
from prefixcache.runner.torch.ops.sets import Ops
from support.loaded import CPU, to_numpy, to_torch
from support.tiny_gguf import random_blocks


def quantized(quant_format: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedTensor:
    data = random_blocks(quant_format, outputs, inputs, seed=seed)
    return QuantizedTensor(quant_format, (outputs, inputs), data)


@pytest.mark.parametrize("quant_format", QUANT_FORMATS)
def test_block_sizes_are_those_of_the_gguf_package(quant_format: str) -> None:
    expected = GGML_QUANT_SIZES[GGMLQuantizationType[quant_format]]
    assert quant_block_size(quant_format) == expected


@pytest.mark.parametrize("quant_format", QUANT_FORMATS)
def test_numbers_are_those_of_the_gguf_package_rounded_once(quant_format, monkeypatch):
    monkeypatch.setattr(quantized_module, "_CHUNK_NUMBERS", 5 * 512)  # the last chunk is not full
    tensor = quantized(quant_format, 48, 512)
    exact = dequantize(tensor.blocks, GGMLQuantizationType[quant_format])
    assert np.array_equal(tensor.dequantized(FLOAT32), exact)
    rounded = to_torch(tensor.dequantized(BFLOAT16))
    assert torch.equal(rounded, torch.from_numpy(exact).bfloat16())
    assert tensor.nbytes == 48 * row_bytes(quant_format, 512)


FORMS = ["torch", "cpu"]
DTYPE: KernelDType = "bfloat16"


def linear(form: str, dtype: KernelDType, shape: LinearShape) -> Any:
    if form == "cpu":
        return CpuLinear(Cpu(2), dtype, shape)
    return Ops(getattr(torch, dtype), CPU).linear(shape)


def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """In the layer's type."""
    return to_torch(layer(to_numpy(x))) if isinstance(layer, CpuLinear) else layer(x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_takes_blocks_as_the_numbers_they_stand_for(form, dtype):
    upper, lower = quantized("Q4_K", 40, 256), quantized("Q8_0", 24, 256, seed=1)
    shape = LinearShape(256, {"upper": 40, "lower": 24})
    kept, dense = (linear(form, dtype, shape) for _ in range(2))
    for start, part in ((0, upper), (40, lower)):
        kept.copy_blocks(start, part)
        dense.copy_rows(start, part.dequantized(DTYPES[dtype]))
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    assert torch.equal(product(kept, x), product(dense, x))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_embedding_is_read_from_the_blocks_it_was_written_as(form: str, tied: bool) -> None:
    shape = LinearShape(256, {"": 48})
    head = linear(form, DTYPE, shape)
    if form == "cpu":
        table = CpuEmbedding(Cpu(2), DTYPE, shape, head if tied else None)
        write = table.write
    else:
        table = Builder(Ops(torch.bfloat16, CPU))
        read_rows = table.embedding("table.weight", shape, head if tied else None).read_rows
        write = table.slots["table.weight"].write
    ids = torch.tensor([47, 0, 5, 5])
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    first, last = quantized("Q4_K", 48, 256), quantized("Q6_K", 48, 256, seed=1)
    for weight in (first, first.dequantized(FLOAT32), last):
        write(weight)
        is_dense = isinstance(weight, np.ndarray)
        numbers = to_torch(weight if is_dense else weight.dequantized(FLOAT32)).bfloat16()
        rows = to_torch(table(ids.numpy())) if form == "cpu" else read_rows(ids)
        assert torch.equal(rows, numbers[ids])
        assert (table.num_bytes == 0) == tied
        if tied:
            dense = linear(form, DTYPE, shape)
            dense.copy_rows(0, to_numpy(numbers))
            assert torch.equal(product(head, x), product(dense, x))


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_not_a_number_is_reported_with_its_row(scale: float) -> None:
    data = random_blocks("Q4_K", 32, 256, seed=0)
    data[17, :2] = np.array([scale], np.float16).view(np.uint8)
    tensor = QuantizedTensor("Q4_K", (32, 256), data)
    with pytest.raises(ValueError, match="row 17 has a scale that is not a number"):
        tensor.dequantized(BFLOAT16)


@pytest.mark.parametrize(
    ("quant_format", "shape", "message"),
    [
        ("IQ3_S", (4, 256), "format must be one of Q4_0"),
        ("Q4_K", (4, 128), "inputs must be a multiple of 256 for Q4_K"),
        ("Q4_0", (5, 256), r"blocks must be uint8 \[5, 144\], not uint8 \[4, 144\]"),
    ],
)
def test_what_is_no_matrix_of_blocks_is_refused(quant_format, shape, message):
    with pytest.raises(ValueError, match=message):
        QuantizedTensor(quant_format, shape, np.zeros((4, 144), np.uint8))
