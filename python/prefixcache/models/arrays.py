"""Weights as numpy arrays; bfloat16 and the types of eight bits are those of ml_dtypes."""

from __future__ import annotations

import mmap
import sys
from math import prod
from typing import Any, TypeAlias, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from prefixcache.exceptions import ModelLoadError

Array: TypeAlias = npt.NDArray[Any]

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[str, np.dtype[Any]] = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16)}
"""The types that models compute in, by the names that users write."""

_FLOATS = (*DTYPES.values(), *map(np.dtype, (np.float16, np.float64)))
_EIGHT_BITS = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))


def new_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An array of zeros in pages of its own.

    The heap would keep what it once had for arrays of this size.
    """
    dtype, count = np.dtype(dtype), prod(shape)
    if count == 0:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize)
    return np.frombuffer(memory, dtype).reshape(shape)


def dense(array: Array, dtype: np.dtype[Any]) -> Array:
    """The numbers in C order, rounded to `dtype` once; the array itself where it is so."""
    return np.ascontiguousarray(array.astype(dtype, copy=False))


def given_array(name: str, tensor: object) -> Array:
    """What a caller gave as a weight: a torch tensor on any device, or a numpy array.

    Raises `ModelLoadError` unless it holds floating-point numbers.
    """
    array = cast("Array", tensor) if isinstance(tensor, np.ndarray) else _of_torch(tensor)
    if array is None or array.dtype not in (*_FLOATS, *_EIGHT_BITS):
        raise ModelLoadError(
            f"{name} must be a torch tensor or a numpy array of floating-point numbers."
        )
    return array


def _of_torch(tensor: Any) -> Array | None:
    """Torch is not imported for this: who has a tensor of it has imported it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return None
    if tensor.is_meta or not tensor.is_floating_point():
        return None
    own = {torch.bfloat16: BFLOAT16, torch.float8_e4m3fn: _EIGHT_BITS[0]}
    own[torch.float8_e5m2] = _EIGHT_BITS[1]
    host = tensor.detach().cpu().contiguous()
    if host.dtype in own:
        numbers = own[host.dtype]
        return host.view(torch.uint8).numpy().view(numbers).reshape(host.shape)
    return host.numpy()
