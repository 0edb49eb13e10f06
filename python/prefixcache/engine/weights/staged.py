"""Tensors of new weights, in memory of their own until all of them are there.

A chunk is laid out as a file of safetensors. Whatever it claims is checked against its own length,
and its tensors against the model, before it counts; a chunk that is refused leaves nothing behind.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache.exceptions import ModelLoadError
from prefixcache.models.arrays import Array
from prefixcache.models.checkpoint import tensors_digest
from prefixcache.models.safetensors_file import FORMATS, TYPES, TensorRange, parse_header

_MAX_HEADER_BYTES = 16 << 20


class StagedTensors:
    """What has come of an update, `check` being asked whether each tensor fits the model.

    At most `most_bytes` are held, in an unnamed file in memory. One thread uses it at a time.
    """

    def __init__(self, check: Callable[[Mapping[str, Array]], None], most_bytes: int) -> None:
        self._check = check
        self._most_bytes = most_bytes
        self._file = os.fdopen(_memory_file(), "r+b", buffering=0)
        self._ranges: dict[str, TensorRange] = {}
        self._size = 0

    @property
    def num_bytes(self) -> int:
        """Memory of what has come."""
        return self._size

    @property
    def names(self) -> list[str]:
        """The tensors that have come."""
        return list(self._ranges)

    def add(self, pieces: Iterable[bytes | memoryview]) -> int:
        """Adds a chunk, which comes in pieces; how many tensors it has.

        Raises `ModelLoadError` for one that is no safetensors, has too many bytes, or tensors that
        do not fit the model or have come before.
        """
        end = self._size
        try:
            for piece in pieces:
                end = self._append(piece, end)
            return self._accept(end)
        except BaseException:
            self._file.truncate(self._size)
            raise

    def _append(self, piece: bytes | memoryview, at: int) -> int:
        """Keeps a part of the next chunk at byte `at`; where the part after it goes."""
        if at + len(piece) > self._most_bytes:
            raise ModelLoadError(
                f"the chunks have more than {self._most_bytes} bytes, which is more than the "
                "model's tensors take"
            )
        view = memoryview(piece)
        while len(view):
            written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written
        return at

    def _accept(self, end: int) -> int:
        """Takes what was appended up to byte `end` as a whole chunk; how many tensors it has."""
        ranges = self._read_header(end)
        again = next((tensor.name for tensor in ranges if tensor.name in self._ranges), None)
        if again is not None:
            raise ModelLoadError(f"{again} has come before in this update")
        with _Mapped(self._file.fileno(), end) as data:
            self._check({tensor.name: data.array(tensor) for tensor in ranges})
        self._ranges |= {tensor.name: tensor for tensor in ranges}
        self._size = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE  # numbers are aligned in every chunk
        self._file.truncate(self._size)
        return len(ranges)

    def digest(self, threads: int = 1) -> str:
        """That of a checkpoint with these tensors: see `read_checkpoint`."""
        path = Path(f"/dev/fd/{self._file.fileno()}")
        return tensors_digest(path, list(self._ranges.values()), threads)

    def open(self) -> _Mapped:
        """The tensors, by name, as long as the context lasts."""
        return _Mapped(self._file.fileno(), self._size, self._ranges)

    def close(self) -> None:
        """Frees all memory. Idempotent."""
        self._file.close()

    def _read_header(self, end: int) -> list[TensorRange]:
        begin, number = self._size, os.pread(self._file.fileno(), 8, self._size)
        if end - begin < 8:
            raise ModelLoadError("a chunk ends before its header")
        (size,) = struct.unpack("<Q", number)
        if size > min(_MAX_HEADER_BYTES, end - begin - 8):
            raise ModelLoadError(f"a chunk's header has {size} bytes, which is too many")
        header = os.pread(self._file.fileno(), size, begin + 8)
        ranges = parse_header(header, begin + 8 + size)
        for tensor in ranges:
            _check_range(tensor, begin + 8 + size, end)
        _check_apart(ranges)
        return ranges


class _Mapped(Mapping[str, Array]):
    """Tensors in a file that nobody else can cut short."""

    def __init__(self, fd: int, size: int, ranges: Mapping[str, TensorRange] | None = None) -> None:
        self._memory = np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), np.uint8)
        self._ranges = ranges or {}

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory = np.empty(0, np.uint8)

    def __getitem__(self, name: str) -> Array:
        return self.array(self._ranges[name])

    def __iter__(self) -> Any:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def array(self, tensor: TensorRange) -> Array:
        """A tensor's numbers, in place unless they are not aligned."""
        data = self._memory[tensor.start : tensor.end].view(np.uint8)
        dtype = TYPES[tensor.format]
        if tensor.start % dtype.itemsize:
            data = data.copy()
        return data.view(dtype).reshape(tensor.shape)


def as_chunk(tensors: Mapping[str, Array]) -> list[bytes | memoryview]:
    """Arrays as a chunk, in pieces."""
    header: dict[str, Any] = {}
    pieces: list[bytes | memoryview] = []
    offset = 0
    for name, array in tensors.items():
        numbers = np.ascontiguousarray(array)
        span = [offset, offset + numbers.nbytes]
        format_name = FORMATS.get(numbers.dtype)
        if format_name is None:
            raise ModelLoadError(f"{name} has the type {numbers.dtype}, which no weights here have")
        header[name] = {"dtype": format_name, "shape": list(array.shape), "data_offsets": span}
        pieces.append(numbers.reshape(-1).view(np.uint8).data)
        offset += numbers.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)), text, *pieces]


def _memory_file() -> int:
    """A file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("prefixcache-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _check_range(tensor: TensorRange, begin: int, end: int) -> None:
    dtype = TYPES.get(tensor.format)
    if dtype is None:
        raise ModelLoadError(
            f"{tensor.name} has the type {tensor.format}, which no weights here have"
        )
    if any(size < 0 for size in tensor.shape) or not begin <= tensor.start <= tensor.end <= end:
        raise ModelLoadError(f"{tensor.name} lies outside of its chunk")
    if tensor.end - tensor.start != prod(tensor.shape) * dtype.itemsize:
        raise ModelLoadError(
            f"{tensor.name} has {tensor.end - tensor.start} bytes, not those of its shape"
        )


def _check_apart(ranges: Iterable[TensorRange]) -> None:
    """Tensors that overlap would have others' bytes, and more of them than were sent."""
    end = 0
    for tensor in sorted(ranges, key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise ModelLoadError(f"{tensor.name} overlaps another tensor of its chunk")
        end = max(end, tensor.end)
