"""A folder whose weights are files of tensors in GGUF's formats, with an index next to them.

The index has the name of each tensor in a checkpoint and its place in a file. The files' own
headers are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache.config.model_config import read_json_object
from prefixcache.exceptions import ModelLoadError
from prefixcache.models.arrays import BFLOAT16, FLOAT32, Array, new_array
from prefixcache.models.digests import file_digest, file_state
from prefixcache.models.quantized import QUANT_FORMATS, QuantizedTensor, row_bytes

INDEX_FILE = "model.gguf.index.json"
WEIGHTS_FILE = "model.gguf"
UNQUANTIZED_TYPES = {"F32": FLOAT32, "F16": np.dtype(np.float16), "BF16": BFLOAT16}

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTensor:
    """A tensor by its name in a checkpoint. `offset` counts bytes from the start of file `part`.

    Where `paired_heads` is not 0, its rows are those of that many heads, and the two of a rotated
    pair stand side by side, which a checkpoint has half a head apart. `offset_by` is what numbers
    in the file are greater than those of a checkpoint. With `is_minus_exp` the file has -e^x of a
    checkpoint's x.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    part: int = 0
    paired_heads: int = 0
    offset_by: float = 0.0
    is_minus_exp: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file. Raises `ValueError` where the format is unknown or does not fit."""
        if self.format in UNQUANTIZED_TYPES:
            return prod(self.shape) * UNQUANTIZED_TYPES[self.format].itemsize
        if self.format not in QUANT_FORMATS or len(self.shape) != 2:
            raise ValueError(f"{self.format} with shape {list(self.shape)}")
        return self.shape[0] * row_bytes(self.format, self.shape[1])

    @property
    def start(self) -> int:
        """The first of its bytes."""
        return self.offset

    def decoded(self, data: Array) -> Array | QuantizedTensor:
        """The tensor of a checkpoint that these bytes of the file, uint8, stand for."""
        dtype = UNQUANTIZED_TYPES.get(self.format)
        rows: Array = data.reshape(self.shape[0], -1)
        if dtype is not None:
            rows = data.view(dtype).reshape(self.shape)
        if self.paired_heads:
            rows = _unpaired(rows, self.paired_heads)
        if dtype is None:
            return QuantizedTensor(self.format, (self.shape[0], self.shape[1]), rows)
        if self.is_minus_exp:
            return np.log(-rows.astype(np.float64)).astype(FLOAT32)
        return rows.astype(FLOAT32) - np.float32(self.offset_by) if self.offset_by else rows


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The tensors of a folder, in the order in which they lie in `files`, its parts."""

    files: tuple[Path, ...]
    tensors: tuple[IndexedTensor, ...]


def has_index(folder: Path) -> bool:
    """Whether the folder's weights are such a file."""
    return (folder / INDEX_FILE).is_file()


def weights_file(part: int) -> str:
    """The name that part `part`, counted from 0, has in the folder."""
    return WEIGHTS_FILE if part == 0 else f"model-{part}.gguf"


def write_index(
    folder: Path, tensors: Iterable[IndexedTensor], parts: Sequence[tuple[int, str | None]]
) -> None:
    """Writes the index of the files that the folder has, or will have, by `weights_file`.

    `parts` are the size in bytes of each, and its `file_digest`, "blake3:" or "sha256:" before it,
    which is checked when weights are read, and None if the file belongs to the folder, so that
    nothing replaces it.
    """
    entries = {tensor.name: asdict(tensor) for tensor in tensors}
    for entry in entries.values():
        del entry["name"]
    (size, digest), *more = parts
    about = {"version": _VERSION, "size": size, "digest": digest, "more": more}
    content = {**about, "tensors": entries}
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes a file of a model's folder. Raises `OSError`."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_index(folder: Path) -> TensorIndex:
    """The index of the folder's weights, checked against their file.

    Raises `ModelLoadError` for a broken index, and when the file is another than when the index was
    written. Finding that out reads the file only where it was touched since.
    """
    index = folder / INDEX_FILE
    try:
        tensors, sizes, digests = _parsed(index, tuple(file_state(index)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"Cannot read {index}: {error!r}") from error
    files = [folder / weights_file(part) for part in range(len(sizes))]
    for file, size, digest in zip(files, sizes, digests, strict=True):
        _check_file(file, size, digest)
    return TensorIndex(tuple(file.resolve() for file in files), tensors)


# A start asks for it several times.
@lru_cache(maxsize=2)
def _parsed(
    index: Path, _state: tuple[Any, ...]
) -> tuple[tuple[IndexedTensor, ...], list[int], list[str | None]]:
    """Tensors, and sizes and digests of parts, of the index in the state in which its file is."""
    content = _content(index)
    tensors = tuple(_entry(name, entry) for name, entry in content["tensors"].items())
    # Earlier versions wrote a sha256 without its name.
    digest = content["digest"] if "digest" in content else content["sha256"]
    parts = [(content["size"], digest), *content.get("more", ())]
    sizes = [int(size) for size, _ in parts]
    digests = [None if digest is None else str(digest) for _, digest in parts]
    for tensor in tensors:
        _check_inside(tensor, sizes[tensor.part] if 0 <= tensor.part < len(sizes) else 0)
    in_order = sorted(tensors, key=lambda tensor: (tensor.part, tensor.offset))
    return tuple(in_order), sizes, digests


def _content(index: Path) -> dict[str, Any]:
    content = read_json_object(index)
    if content["version"] != _VERSION:
        raise ValueError(f"its version is {content['version']}, not {_VERSION}")
    return content


def _entry(name: str, entry: dict[str, Any]) -> IndexedTensor:
    shape = tuple(map(int, entry["shape"]))
    return IndexedTensor(name=name, shape=shape, **{k: v for k, v in entry.items() if k != "shape"})


def _check_inside(tensor: IndexedTensor, size: int) -> None:
    if min(tensor.shape, default=0) < 1 or not 0 <= tensor.offset <= size - tensor.nbytes:
        raise ValueError(f"{tensor.name} lies outside of the file")
    if tensor.offset % 8:
        raise ValueError(f"{tensor.name} does not begin at a multiple of 8 bytes")
    heads = tensor.paired_heads
    if heads < 0 or (heads and tensor.shape[0] % (2 * heads)):
        raise ValueError(f"{tensor.name} has no whole pairs of rows")


def _check_file(file: Path, size: int, digest: str | None) -> None:
    kind = "blake3" if str(digest).startswith("blake3:") else "sha256"
    try:
        is_same = file.stat().st_size == size
        if is_same and digest is not None:
            is_same = digest.removeprefix(f"{kind}:") == file_digest(file.resolve(), kind)
    except OSError as error:
        raise ModelLoadError(f"The weight file {file.resolve()} cannot be read: {error}") from error
    if not is_same:
        raise ModelLoadError(
            f"The weight file {file.resolve()} is not the one that {file.parent} was made of. "
            "Start with the file itself as the model, which makes another folder."
        )


def _unpaired(rows: Array, heads: int) -> Array:
    """Undoes llama.cpp's order of q and k rows: there, a rotated pair stands side by side."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2)
    copy = new_array(pairs.shape, rows.dtype)
    copy[...] = pairs
    return copy.reshape(rows.shape)
