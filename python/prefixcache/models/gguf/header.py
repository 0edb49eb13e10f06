"""The header of a GGUF file, checked: what it says of its model, and where its tensors lie.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from prefixcache.exceptions import ModelLoadError, UnsupportedModelError
from prefixcache.models.quantized import QUANT_FORMATS
from prefixcache.models.safetensors_file import TensorRange

# Unquantized numbers, by GGUF's names.
DENSE_FORMATS = ("F32", "F16", "BF16")
SUPPORTED_FORMATS = (*DENSE_FORMATS, *QUANT_FORMATS)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
# Codes of a value's type in the file: numbers as numpy calls them, and the others.
_NUMBERS = {
    **dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of its model, and its tensors in the order in which they lie.

    Their formats are of `SUPPORTED_FORMATS`. The dimension whose numbers lie side by side is the
    last.
    """

    metadata: dict[str, Any]
    tensors: tuple[TensorRange, ...]


def read_header(file: Path) -> GgufHeader:
    """Reads and checks all of the header, and that the file holds what the header tells of.

    Raises `ModelLoadError` for a broken file and `UnsupportedModelError` for a tensor of another
    format, with the names of file and tensor.
    """
    try:
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return parse_header(data)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"The GGUF file {file}: {error}") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read the GGUF file {file}: {error}") from error


class FileBytes(Protocol):
    """The bytes of a file. Slices are read, from the start on."""

    def __len__(self) -> int:
        """Bytes of the file."""
        ...

    def __getitem__(self, part: slice, /) -> bytes:
        """Those of a part, which lies within the file."""
        ...


class _Cursor:
    """Reads values one after the other. Raises `ValueError` at the file's end."""

    def __init__(self, data: FileBytes) -> None:
        self.place = 0
        self.size = len(data)
        self._data = data

    def bytes(self, count: int) -> bytes:
        end = self.place + count
        if end > self.size:
            raise ValueError("it ends within its header")
        data = self._data[self.place : end]
        self.place = end
        return data

    def number(self, layout: str) -> int:
        return struct.unpack(layout, self.bytes(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.bytes(self.number("<Q")).decode("utf-8")

    def value(self) -> Any:
        kind = self.number("<I")
        return self._array() if kind == _ARRAY else self._values(kind, 1)[0]

    def _array(self) -> list[Any]:
        kind = self.number("<I")
        return self._values(kind, self.number("<Q"))

    def _values(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"its metadata holds a value of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()


def parse_header(data: FileBytes, check: Callable[[str, Any], None] | None = None) -> GgufHeader:
    """The header of a file; `check` is called with each key and value as they come.

    Raises `ValueError` for a broken file and `UnsupportedModelError` for a tensor of another
    format, and what `check` does.
    """
    cursor = _Cursor(data)
    if cursor.bytes(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, not one of {_VERSIONS}")
    num_tensors, num_values = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value()
        if check is not None:
            check(key, metadata[key])
    unplaced = [_tensor(cursor) for _ in range(num_tensors)]
    start = _data_start(cursor.place, metadata)
    tensors = sorted(
        (_placed(tensor, start, cursor.size) for tensor in unplaced), key=attrgetter("start")
    )
    _check_apart(tensors)
    return GgufHeader(metadata, tuple(tensors))


def _data_start(header_end: int, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise ValueError(f"general.alignment is {alignment!r}, not a multiple of 8")
    return -(-header_end // alignment) * alignment


def _tensor(cursor: _Cursor) -> TensorRange:
    """The next tensor, its bytes still counted within the data."""
    name = cursor.string()
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
    tensor_format = _supported_format(name, cursor.number("<I"))
    nbytes = _checked_bytes(name, tensor_format, shape)
    start = cursor.number("<Q")
    return TensorRange(name, tensor_format, shape, start, start + nbytes)


def _supported_format(name: str, code: int) -> str:
    try:
        kind = GGMLQuantizationType(code).name
    except ValueError:
        kind = f"of the unknown type {code}"
    if kind not in SUPPORTED_FORMATS:
        raise UnsupportedModelError(
            f"tensor {name} is {kind}. Supported: {', '.join(SUPPORTED_FORMATS)}."
        )
    return kind


def _checked_bytes(name: str, tensor_format: str, shape: tuple[int, ...]) -> int:
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor_format]]
    if 0 in shape:
        raise ValueError(f"tensor {name} is empty")
    if shape[-1] % numbers:
        raise ValueError(
            f"tensor {name} has rows of {shape[-1]} numbers, no multiple of {tensor_format}'s "
            f"{numbers}"
        )
    if tensor_format in QUANT_FORMATS and len(shape) not in (2, 3):
        raise ValueError(f"tensor {name} is {tensor_format}, but no matrix, nor several")
    return prod(shape) // numbers * size


def _placed(tensor: TensorRange, data_start: int, file_size: int) -> TensorRange:
    start, end = data_start + tensor.start, data_start + tensor.end
    if start % 8:
        raise ValueError(f"tensor {tensor.name} does not begin at a multiple of 8 bytes")
    if end > file_size:
        raise ValueError(
            f"tensor {tensor.name} needs the bytes {start} to {end}, but the file has {file_size}"
        )
    return replace(tensor, start=start, end=end)


def _check_apart(tensors: list[TensorRange]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"it holds two tensors {tensor.name}")
        names.add(tensor.name)
    for tensor, following in pairwise(tensors):
        if tensor.end > following.start:
            raise ValueError(f"tensors {tensor.name} and {following.name} overlap")
