"""Where the tensors of a safetensors file lie, and their bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from prefixcache.exceptions import ModelLoadError
from prefixcache.models.arrays import BFLOAT16, Array, new_array

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_BROKEN = (ValueError, LookupError, TypeError, AttributeError)  # of a header that says nonsense
TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
FORMATS = {dtype: name for name, dtype in TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A tensor's bytes in its file, from `start` to `end`; `format` is its file format's name."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start

    def decoded(self, data: Array) -> Array:
        """The numbers that these bytes of the file, uint8, stand for. Raises `ValueError`."""
        dtype = TYPES.get(self.format)
        if dtype is None:
            raise ValueError(f"{self.name} has the type {self.format}, which no weights here have")
        if self.nbytes != prod(self.shape) * dtype.itemsize:
            raise ValueError(f"{self.name} has {self.nbytes} bytes, not those of its shape")
        return data.view(dtype).reshape(self.shape)


def tensor_ranges(file: Path) -> list[TensorRange]:
    """The tensors of a safetensors file, by its header.

    Raises `ModelLoadError` when the header cannot be read.
    """
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            return parse_header(stream.read(size), 8 + size)
    except (*_BROKEN, ModelLoadError, OSError, struct.error) as error:
        raise ModelLoadError(f"Cannot read the weight file {file}: {error!r}") from error


def parse_header(text: bytes, data: int) -> list[TensorRange]:
    """The tensors that a header names, whose bytes begin at byte `data`.

    Raises `ModelLoadError` for one that says nonsense. Where the tensors lie is not checked.
    """
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        return [_range(name, entry, data) for name, entry in header.items()]
    except (*_BROKEN, RecursionError) as error:
        raise ModelLoadError(f"the header cannot be read: {error!r}") from error


def _range(name: str, entry: Mapping[str, Any], data: int) -> TensorRange:
    name.encode()  # raises for what is no text
    start, end = entry["data_offsets"]
    shape = tuple(map(int, entry["shape"]))
    return TensorRange(name, str(entry["dtype"]), shape, data + start, data + end)


def read_bytes(stream: BinaryIO, start: int, length: int) -> Array:
    """`length` bytes of a file from `start` on: [length] uint8, in pages of their own.

    They are read and not mapped: the system kills a process that touches a mapped page of a file
    that was cut. Raises `ValueError` when the file ends before.
    """
    memory = new_array((length,), np.uint8)
    stream.seek(start)
    if stream.readinto(memory.data) != length:  # type: ignore[attr-defined]
        raise ValueError(f"it ends before byte {start + length}")
    return memory
