"""Numpy's weights as torch's tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from prefixcache.models.arrays import BFLOAT16, Array, given_array
from prefixcache.runner.torch.typed import from_numpy

# Numbers that torch does not take from numpy: what they look like to it, and what they are.
_BY_BITS = {
    BFLOAT16: (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
}


def tensor_of(array: Array | Tensor) -> Tensor:
    """The numbers as a tensor on the CPU; a tensor itself, wherever it is."""
    if isinstance(array, Tensor):
        return array
    array = np.require(array, requirements=["C", "W"])
    bits = _BY_BITS.get(array.dtype)
    if bits is None:
        return from_numpy(array)
    return from_numpy(array.view(bits[0])).view(bits[1])


def given_tensor(name: str, tensor: object) -> Tensor | Array:
    """What a caller gave as a weight; a tensor stays on its device.

    Raises `ModelLoadError` unless it holds floating-point numbers.
    """
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_meta:
        return tensor
    return given_array(name, tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """As users write it: bfloat16."""
    return str(dtype).removeprefix("torch.")
