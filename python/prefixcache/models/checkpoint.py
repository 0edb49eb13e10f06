"""What the weights of a checkpoint are called, wherever they lie; docs/hashing.md has the bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixcache._core import derive_digest
from prefixcache.exceptions import ModelLoadError
from prefixcache.model_config import ModelConfig, without_defaults
from prefixcache.models.blocks import (
    INDEX_FILE,
    WEIGHTS_FILE,
    IndexedTensor,
    has_index,
    read_index,
)
from prefixcache.models.digests import FileState, file_state, range_digests
from prefixcache.models.weights import INDEX_FILE as SHARDS_FILE
from prefixcache.models.weights import checkpoint_files

_CONTEXT = "prefixcache v2 {}"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_BROKEN = (ValueError, LookupError, TypeError, AttributeError)  # of a header that says nonsense


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder's weights as they were read at one time.

    `digest` is the same for the same tensors in other files, in hexadecimal. `states` tells when a
    file has changed since.
    """

    folder: Path
    digest: str
    states: tuple[FileState, ...] = ()

    def check_unchanged(self) -> None:
        """Raises `ModelLoadError` unless the folder's files are those that were read."""
        if self.states != _states(self.folder):
            raise ModelLoadError(f"The weights in {self.folder} were changed while they were read.")


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    """A tensor's bytes in its file, from `start` to `end`."""

    name: bytes
    format: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_checkpoint(folder: Path, threads: int = 1) -> Checkpoint:
    """The weights in a folder, all of which it reads, unless they are remembered.

    Raises `ModelLoadError` when a file cannot be read.
    """
    states = _states(folder)
    parts: list[tuple[_Place, str]] = []
    for file, places in _places(folder):
        parts += zip(places, _range_digests(file, places, threads), strict=True)
    message = b"".join(_described(place, digest) for place, digest in sorted(parts))
    checkpoint = Checkpoint(folder, _derived("weights", message), states)
    checkpoint.check_unchanged()
    return checkpoint


def model_digest(config: ModelConfig) -> str:
    """A digest of all but the weights that decides what a model computes, in hexadecimal."""
    fields = dataclasses.asdict(without_defaults(config))
    return _derived("model", json.dumps(fields, sort_keys=True).encode())


def formats_digest(formats: Mapping[str, str]) -> str:
    """A digest of the formats to which weights are quantized, by name, in hexadecimal."""
    return _derived("quantized", json.dumps(formats, sort_keys=True).encode())


def _derived(purpose: str, message: bytes) -> str:
    return derive_digest(_CONTEXT.format(purpose), message).hex()


def _described(place: _Place, digest: str) -> bytes:
    shape = struct.pack(f"<{len(place.shape)}Q", *place.shape)
    fields = (place.name, place.format.encode(), shape, bytes.fromhex(digest))
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def _states(folder: Path) -> tuple[FileState, ...]:
    try:
        return tuple(map(file_state, _files(folder)))
    except OSError as error:
        raise ModelLoadError(f"The weights in {folder} cannot be read: {error}") from error


def _files(folder: Path) -> list[Path]:
    """All files that say what the weights are, links followed."""
    if has_index(folder):
        return [folder / INDEX_FILE, (folder / WEIGHTS_FILE).resolve()]
    shards = folder / SHARDS_FILE
    files = [file.resolve() for file in checkpoint_files(folder)]
    return [shards, *files] if shards.is_file() else files


def _places(folder: Path) -> Iterator[tuple[Path, list[_Place]]]:
    """Each file with tensors, links followed, and where they lie in it."""
    if has_index(folder):
        index = read_index(folder)
        yield index.file, [_indexed_place(one) for one in index.tensors]
    else:
        for file in checkpoint_files(folder):
            yield file.resolve(), _header_places(file)


def _indexed_place(tensor: IndexedTensor) -> _Place:
    form = tensor.format
    if tensor.paired_heads:
        form += f", rows paired in {tensor.paired_heads} heads"
    if tensor.offset_by:
        form += f", greater by {tensor.offset_by}"
    end = tensor.offset + tensor.nbytes
    return _Place(tensor.name.encode(), form, tensor.shape, tensor.offset, end)


def _header_places(file: Path) -> list[_Place]:
    """The tensors of a file of safetensors, by its header."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        return [_header_place(name, entry, 8 + size) for name, entry in header.items()]
    except (*_BROKEN, OSError, RecursionError, struct.error) as error:
        raise ModelLoadError(f"Cannot read the weight file {file}: {error!r}") from error


def _header_place(name: str, entry: Mapping[str, Any], data: int) -> _Place:
    start, end = entry["data_offsets"]
    shape = tuple(map(int, entry["shape"]))
    return _Place(name.encode(), str(entry["dtype"]), shape, data + start, data + end)


def _range_digests(file: Path, places: list[_Place], threads: int) -> list[str]:
    try:
        return range_digests(file, [(place.start, place.end) for place in places], threads)
    except (*_BROKEN, OSError) as error:
        raise ModelLoadError(f"Cannot read the weight file {file}: {error}") from error
