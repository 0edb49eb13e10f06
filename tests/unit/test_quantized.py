"""Matrices of GGUF blocks: dequantized by the gguf package, rounded once, written into linears."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from prefixcache._core import Cpu
from prefixcache.models.quantized import QUANT_FORMATS, QuantizedTensor, row_bytes
from prefixcache.runner.cuda.ops import quantized as quantized_module
from prefixcache.runner.cuda.ops.sets import make_ops
from tiny_gguf import random_blocks


def quantized(quant_format: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedTensor:
    data = random_blocks(quant_format, outputs, inputs, seed=seed)
    return QuantizedTensor(quant_format, (outputs, inputs), torch.from_numpy(data))


@pytest.mark.parametrize("quant_format", QUANT_FORMATS)
def test_numbers_are_those_of_the_gguf_package_rounded_once(quant_format, monkeypatch):
    monkeypatch.setattr(quantized_module, "_CHUNK_NUMBERS", 5 * 512)  # the last chunk is not full
    tensor = quantized(quant_format, 48, 512)
    exact = dequantize(tensor.blocks.numpy(), GGMLQuantizationType[quant_format])
    assert torch.equal(tensor.dequantized(torch.float32), torch.from_numpy(exact))
    assert torch.equal(tensor.dequantized(torch.bfloat16), torch.from_numpy(exact).bfloat16())
    assert tensor.nbytes == 48 * row_bytes(quant_format, 512)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_takes_blocks_as_the_numbers_they_stand_for(kernels, dtype):
    ops = make_ops(dtype, torch.device("cpu"), Cpu(2) if kernels else None)
    upper, lower = quantized("Q4_K", 40, 256), quantized("Q8_0", 24, 256, seed=1)
    kept, dense = (ops.linear(256, 64, parts=[40, 24]) for _ in range(2))
    for start, part in ((0, upper), (40, lower)):
        kept.copy_blocks(start, part)
        dense.copy_rows(start, part.dequantized(dtype))
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(kept(x), dense(x))
    assert torch.equal(kept.wide(x), dense.wide(x))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "cpu"])
def test_an_embedding_is_read_from_the_blocks_it_was_written_as(kernels: bool, tied: bool) -> None:
    ops = make_ops(torch.bfloat16, torch.device("cpu"), Cpu(2) if kernels else None)
    head = ops.linear(256, 48)
    embedding = ops.embedding(head if tied else None, 48, 256)
    ids = torch.tensor([47, 0, 5, 5], dtype=torch.int32)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    first, last = quantized("Q4_K", 48, 256), quantized("Q6_K", 48, 256, seed=1)
    for weight in (first, first.dequantized(torch.float32), last):
        embedding.write(weight)
        is_dense = isinstance(weight, torch.Tensor)
        numbers = (weight if is_dense else weight.dequantized(torch.float32)).bfloat16()
        assert torch.equal(embedding(ids), numbers[ids.long()])
        assert (embedding.num_bytes == 0) == tied
        if tied:
            dense = ops.linear(256, 48)
            dense.copy_rows(0, numbers)
            assert torch.equal(head(x), dense(x))


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_not_a_number_is_reported_with_its_row(scale: float) -> None:
    data = random_blocks("Q4_K", 32, 256, seed=0)
    data[17, :2] = np.array([scale], np.float16).view(np.uint8)
    tensor = QuantizedTensor("Q4_K", (32, 256), torch.from_numpy(data))
    with pytest.raises(ValueError, match="row 17 has a scale that is not a number"):
        tensor.dequantized(torch.bfloat16)


@pytest.mark.parametrize(
    ("quant_format", "shape", "message"),
    [
        ("Q2_K", (4, 256), "format must be one of Q4_0"),
        ("Q4_K", (4, 128), "inputs must be a multiple of 256 for Q4_K"),
        ("Q4_0", (5, 256), r"blocks must be uint8 \[5, 144\], not torch.uint8 \[4, 144\]"),
    ],
)
def test_what_is_no_matrix_of_blocks_is_refused(quant_format, shape, message):
    with pytest.raises(ValueError, match=message):
        QuantizedTensor(quant_format, shape, torch.zeros(4, 144, dtype=torch.uint8))
