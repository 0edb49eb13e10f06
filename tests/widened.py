"""The dense model of a converted GGUF file, for tools that know no blocks and as an oracle."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from prefixcache.models.blocks import INDEX_FILE, WEIGHTS_FILE, read_index
from prefixcache.ops.blocks import QuantizedTensor


def save_widened(folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the folder's model with its numbers, rounded once to `dtype`, as safetensors."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(WEIGHTS_FILE, INDEX_FILE))
    index = read_index(folder)
    tensors = zip(index.tensors, index.mapped(index.tensors), strict=True)
    dense = {one.name: _dense(tensor, dtype) for one, tensor in tensors}
    save_file(dense, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _dense(tensor: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    is_quantized = isinstance(tensor, QuantizedTensor)
    return tensor.widened(dtype) if is_quantized else tensor.to(dtype, copy=True)
