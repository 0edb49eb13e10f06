"""Weights from a folder's files into a model, strictly: nothing missing, nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from prefixcache.config.model_config import read_json_object
from prefixcache.exceptions import ModelLoadError
from prefixcache.models.arrays import Array
from prefixcache.models.fused import FusedReader, RowOrder, fused_names, fused_tensor
from prefixcache.models.gguf.index import IndexedTensor, has_index, read_index
from prefixcache.models.names import TensorNames
from prefixcache.models.quantized import QuantizedTensor
from prefixcache.models.safetensors_file import TensorRange, read_bytes, tensor_ranges

_SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LONG_LOAD_BYTES = 1 << 30
_LISTED_NAMES = 5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a checkpoint; `source` says where it came from, for error messages."""

    name: str
    tensor: Array | QuantizedTensor
    source: str


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a checkpoint's tensor goes: the shape it must have, and what writes it.

    `kept_format` says how it is kept now: a type, as "bfloat16", or one of `QUANT_FORMATS`.
    """

    shape: tuple[int, ...]
    write: Callable[[Array | QuantizedTensor], object]
    kept_format: Callable[[], str]


Slots = Mapping[str, Slot]
Shapes = Mapping[str, tuple[int, ...]]


def load_folder(slots: Slots, folder: Path, names: TensorNames, done: Collection[str] = ()) -> None:
    """Fills every slot from the folder's safetensors, or from the file that its index is of.

    Slots named by `done` are filled already; what they are of is not read.

    Raises `ModelLoadError` naming the tensor and the file when one is missing, unexpected,
    misshapen or unreadable. What `names` does not read may be there or not.
    """
    undone = slots.keys() - {*done}
    tensors = read_folder(folder, names, undone if done else None)
    _check_complete(undone - copy_into(slots, tensors, names), folder)


def read_folder(
    folder: Path, names: TensorNames, wanted: Collection[str] | None = None
) -> Iterator[NamedTensor]:
    """The folder's tensors that `names` reads, one after the other.

    Of those only what holds the model's own tensors named by `wanted`, if that is given. Raises
    `ModelLoadError` when a file cannot be read.
    """
    is_read = partial(_is_read, names, None if wanted is None else _and_fused(wanted))
    return _split(_read(folder, is_read), names.fused_experts)


def _and_fused(names: Collection[str]) -> set[str]:
    """A model's own names, and those of the tensors of all experts that may hold what they name."""
    return {*names, *(fused for name in names for fused in fused_names(name))}


def _is_read(names: TensorNames, wanted: Collection[str] | None, name: str) -> bool:
    own = names.own(name)
    if own is None or wanted is None:
        return own is not None
    return own in wanted or own.removesuffix("_blocks").removesuffix("_scales") in wanted


def check_folder(shapes: Shapes, folder: Path, names: TensorNames) -> None:
    """Raises what `load_folder` would, from the files' headers alone: no weight is read."""
    tensors = _split_shapes(_read_shapes(folder), names.fused_experts)
    present = {checked_name(shapes, names, name, shape, source) for name, shape, source in tensors}
    _check_complete(shapes.keys() - present, folder)


def checked_name(
    shapes: Shapes, names: TensorNames, name: str, shape: Sequence[int], source: str
) -> str | None:
    """The model's own name of a checkpoint's tensor, None for one that it does not read.

    Raises `ModelLoadError` unless the model has a tensor of this name and shape.
    """
    own = names.own(name)
    if own is None:
        return None
    wanted = shapes.get(own)
    if wanted is None:
        raise ModelLoadError(f"{source} holds an unexpected tensor {name}.")
    if tuple(shape) != wanted:
        raise ModelLoadError(
            f"{name} in {source} has shape {list(shape)}, "
            f"the model's configuration needs {list(wanted)}."
        )
    return own


def shapes_of(slots: Slots) -> dict[str, tuple[int, ...]]:
    """The shape each of the checkpoint's tensors must have."""
    return {name: slot.shape for name, slot in slots.items()}


def _check_complete(missing: Collection[str], folder: Path) -> None:
    if missing:
        raise ModelLoadError(f"The weights in {folder} lack {listed(missing)}.")


def copy_into(slots: Slots, tensors: Iterable[NamedTensor], names: TensorNames) -> set[str]:
    """Writes the given tensors to their slots, in place, and returns those slots' names.

    Raises `ModelLoadError` for a name without a slot, a wrong shape, or a scale that is not a
    number; tensors before it are written.
    """
    shapes = shapes_of(slots)
    written: set[str] = set()
    for named in tensors:
        own = checked_name(shapes, names, named.name, named.tensor.shape, named.source)
        if own is not None:
            _write(slots[own], named)
            written.add(own)
    return written


def _write(slot: Slot, named: NamedTensor) -> None:
    if isinstance(named.tensor, np.ndarray) and named.tensor.dtype == np.uint8:
        raise ModelLoadError(
            f"{named.name} in {named.source} holds bytes, which no weights here have."
        )
    try:
        slot.write(named.tensor)
    except ValueError as error:
        raise ModelLoadError(f"{named.name} in {named.source}: {error}") from error


def checkpoint_files(folder: Path) -> list[Path]:
    """The folder's files of safetensors. Raises `ModelLoadError` when one is missing."""
    index = folder / INDEX_FILE
    if index.is_file():
        files = [_next_to(index, name) for name in sorted(set(_weight_map(index).values()))]
    else:
        files = [folder / _SINGLE_FILE]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"The weight file {file} does not exist.")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(read_json_object(index)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"Cannot read {index}: {error!r}") from error


def _next_to(index: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ModelLoadError(f"{index} names {name}, not a file of its folder.")
    return index.with_name(name)


def stored_tensors(folder: Path) -> list[tuple[Path, list[TensorRange] | list[IndexedTensor]]]:
    """Each file with weights, and what lies in it. Raises `ModelLoadError`."""
    if not has_index(folder):
        return [(file, tensor_ranges(file)) for file in checkpoint_files(folder)]
    index = read_index(folder)
    return [
        (file, [tensor for tensor in index.tensors if tensor.part == part])
        for part, file in enumerate(index.files)
    ]


def _read(folder: Path, is_read: Callable[[str], bool]) -> Iterator[NamedTensor]:
    stored = stored_tensors(folder)
    wanted = [
        (file, [tensor for tensor in tensors if is_read(tensor.name)]) for file, tensors in stored
    ]
    tensors = (named for file, tensors in wanted for named in _read_file(file, tensors))
    total = sum(tensor.nbytes for _, tensors in wanted for tensor in tensors)
    return with_progress("Loading weights", total, tensors, attrgetter("tensor.nbytes"))


def _read_file(file: Path, wanted: Sequence[TensorRange | IndexedTensor]) -> Iterator[NamedTensor]:
    try:
        with file.open("rb") as stream:
            for tensor in wanted:
                data = read_bytes(stream, tensor.start, tensor.nbytes)
                yield NamedTensor(tensor.name, tensor.decoded(data), str(file))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read the weight file {file}: {error}") from error


def with_progress(
    doing: str, total: int, items: Iterable[T], num_bytes: Callable[[T], int]
) -> Iterator[T]:
    """The items, of `total` bytes together; where those take long a bar shows how far they came."""
    if total < _LONG_LOAD_BYTES:
        yield from items
        return
    from tqdm import tqdm

    with tqdm(desc=doing, total=total, unit="B", unit_scale=True, disable=None) as bar:
        for item in items:
            yield item
            bar.update(num_bytes(item))


def _read_shapes(folder: Path) -> Iterator[tuple[str, Sequence[int], str]]:
    """Names, shapes and files; also checks that all data of safetensors is there."""
    for file, tensors in stored_tensors(folder):
        if not has_index(folder):
            _check_whole(file)
        for tensor in tensors:
            yield tensor.name, tensor.shape, str(file)


def _check_whole(file: Path) -> None:
    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"Cannot read the weight file {file}: {error}") from error


def _split(tensors: Iterable[NamedTensor], order: RowOrder) -> Iterator[NamedTensor]:
    """The tensors of each expert in the place of those of all experts of a layer."""
    reader = FusedReader(order)
    for named in tensors:
        for name, tensor in reader.split(named.name, named.tensor):
            yield NamedTensor(name, tensor, named.source)
    reader.check_complete()


def _split_shapes(
    tensors: Iterable[tuple[str, Sequence[int], str]], order: RowOrder
) -> Iterator[tuple[str, Sequence[int], str]]:
    for name, shape, source in tensors:
        fused = fused_tensor(name, len(shape), order)
        parts = [(name, shape)] if fused is None else fused.shapes(tuple(shape))
        for part, part_shape in parts:
            yield part, part_shape, source


def listed(names: Iterable[str]) -> str:
    """Names for an error message, the first few of them."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_LISTED_NAMES])
    rest = len(ordered) - _LISTED_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
