"""A model whose weights can be replaced, given up, and made again while others keep using it."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from prefixcache.config.logs import SHOWS_ERROR
from prefixcache.config.model_config import ModelConfig, without_defaults
from prefixcache.exceptions import ConfigError, ModelLoadError
from prefixcache.models.arrays import Array, given_array
from prefixcache.models.checkpoint import Checkpoint, formats_digest, read_checkpoint
from prefixcache.models.fused import (
    FusedReader,
    FusedTensor,
    HalvedTensor,
    fused_names,
    fused_tensor,
)
from prefixcache.models.gguf.index import has_index
from prefixcache.models.names import TensorNames
from prefixcache.models.quantize import QUANTIZABLE, quantized
from prefixcache.models.quantized import QUANT_FORMATS, QuantizedTensor
from prefixcache.models.weights import (
    NamedTensor,
    Slot,
    Slots,
    check_folder,
    checked_name,
    copy_into,
    listed,
    load_folder,
    shapes_of,
)
from prefixcache.types.modes import WeightsInfo

logger = logging.getLogger(__name__)

_GIVEN_TENSOR = "The update"


class FilledModel(Protocol):
    """A model whose parameters can be written by a checkpoint's names."""

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        ...

    @property
    def names(self) -> TensorNames:
        """What a checkpoint's names mean to it."""
        ...

    @property
    def slots(self) -> Slots:
        """Where each tensor goes."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the weights as they are kept now."""
        ...


ModelT = TypeVar("ModelT", bound=FilledModel)


class ReplaceableModel(Generic[ModelT]):
    """Stands for a model to those who compute with it, whatever becomes of its weights.

    `make` builds the model again with undefined weights, and `checkpoint` is where those of `model`
    came from, if any; later it is the one that holds just these weights, None when some came from
    elsewhere. Weights are usable when every tensor was written (`complete`); `info` tells how they
    are kept, in any thread.

    `take` makes what the slots write of a tensor that a caller gives, or raises `ModelLoadError`.

    Where unquantized weights replace quantized ones: with `requantize` they are quantized to the
    same format. Without it a folder's are kept as they are, and single ones are refused.
    """

    def __init__(
        self,
        model: ModelT,
        make: Callable[[], ModelT],
        checkpoint: Checkpoint | None,
        *,
        requantize: bool = False,
        convert: Callable[[str, object], Any] = given_array,
    ) -> None:
        self._model: ModelT | None = model
        self._make = make
        self.checkpoint = checkpoint
        self._config = model.config
        self._shapes = shapes_of(model.slots)
        self._names = model.names
        self._unwritten: set[str] = set()
        self._requantize = requantize
        self._convert = convert
        self._quant_formats = _quant_formats(model)
        self._quantized: dict[str, str] = {}
        self.info = _info(model)

    @property
    def loaded(self) -> ModelT:
        """The model itself. Raises `RuntimeError` while it is given up."""
        if self._model is None:
            raise RuntimeError("The model's weights are given up.")
        return self._model

    @property
    def complete(self) -> bool:
        """Whether the weights are there, every one of them."""
        return self._model is not None and not self._unwritten

    @property
    def quantized_digest(self) -> str | None:
        """Which weights a folder's numbers were quantized for, and how; None where none were."""
        return formats_digest(self._quantized) if self._quantized else None

    @property
    def requantized_digest(self) -> str | None:
        """The same of an update in chunks, which quantizes what was quantized."""
        formats = self._quant_formats if self._requantize else {}
        return formats_digest(formats) if formats else None

    def check_folder(self, folder: Path) -> Checkpoint:
        """The weights in a folder, for `load`. From any thread.

        Raises `ModelLoadError` unless they are of this very model, which its configuration and the
        headers of its files tell. The weights are read then for their digest.
        """
        try:
            config = ModelConfig.from_hf(folder)
        except ConfigError as error:
            raise ModelLoadError(str(error)) from error
        _check_same(self._config, config, folder)
        check_folder(self._shapes, folder, self._names)
        if self._requantize and not has_index(folder):
            for name in self._quant_formats:
                self._check_requantizable(name)
        return read_checkpoint(folder)

    def load(self, checkpoint: Checkpoint) -> None:
        """Writes all weights of a checked folder, in place if they are there.

        Raises `ModelLoadError` when the folder has changed since. The weights that its folder
        holds now are then back in the place of those before, as `checkpoint` tells, or they are
        given up where no folder holds them.
        """
        before = self.checkpoint if self.complete else None
        try:
            self._load(checkpoint)
        except BaseException:
            self._restore(before)
            raise

    def check_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Raises `ModelLoadError` for tensors that cannot replace weights of this model.

        That is a name or a shape that is none of its own, and unquantized numbers for quantized
        ones, unless they can be quantized and are to be.
        """
        for name, tensor in tensors.items():
            fused = self._fused(name, tensor)
            if fused is not None and fused.is_quantized:
                _check_bytes(name, tensor)
            else:
                self._convert(name, tensor)
            shape = tuple(tensor.shape)
            for part, of_part in [(name, shape)] if fused is None else fused.shapes(shape):
                own = checked_name(self._shapes, self._names, part, of_part, _GIVEN_TENSOR)
                if own in self._quant_formats and not (fused and fused.is_quantized):
                    self._check_requantizable(own)

    def _fused(self, name: str, tensor: Any) -> FusedTensor | HalvedTensor | None:
        """What a tensor of all experts of a layer is, where checkpoints have such."""
        if not hasattr(tensor, "shape"):
            return None
        return fused_tensor(name, len(tensor.shape), self._names.fused_experts)

    def _check_requantizable(self, name: str) -> None:
        quant_format = self._quant_formats[name]
        if not self._requantize:
            raise ModelLoadError(
                f"{name} is quantized as {quant_format}, and unquantized numbers in its place "
                "would take more memory. --requantize quantizes them to that format; a folder or a "
                "GGUF file replaces all weights as they are."
            )
        if quant_format not in QUANTIZABLE:
            raise ModelLoadError(
                f"{name} is quantized as {quant_format}, to which nothing can be quantized "
                f"here. --requantize knows {', '.join(QUANTIZABLE)}."
            )

    def check_all_named(self, names: Collection[str]) -> None:
        """Raises `ModelLoadError` when a tensor of the model is not among `names`."""
        named = {self._names.own(name) for name in names}
        fused = {re.sub("_(blocks|scales)$", "", own) for own in named if own}
        named |= {own for own in self._shapes if not fused.isdisjoint(fused_names(own))}
        missing = self._shapes.keys() - named
        if missing:
            raise ModelLoadError(f"{_GIVEN_TENSOR} lacks {listed(missing)}.")

    def write(self, tensors: Mapping[str, Any]) -> set[str]:
        """Replaces the named weights in place; returns the model's own names of them.

        Raises as `check_tensors`, and for numbers that cannot be quantized; then nothing is
        replaced.
        """
        return self._write(self._prepared(tensors))

    def _prepared(self, tensors: Mapping[str, Any]) -> list[NamedTensor]:
        self.check_tensors(tensors)
        return [self._requantized(name, part) for name, part in self._parts(tensors)]

    def _write(self, named: Sequence[NamedTensor]) -> set[str]:
        if self._model is None:
            self._model = self._make()
            self._unwritten = set(self._shapes)
        self.checkpoint = None
        written = copy_into(self.loaded.slots, named, self._names)
        self._unwritten -= written
        self.info = _info(self.loaded)
        return written

    def replace(self, tensors: Mapping[str, Any]) -> None:
        """`write`, after which all weights are whole, whatever it raises: as `load` leaves them."""
        before = self.checkpoint if self.complete else None
        named = self._prepared(tensors)
        try:
            self._write(named)
        except BaseException:
            self._restore(before)
            raise

    @property
    def most_given_bytes(self) -> int:
        """Bytes of all tensors in the widest type that they may come in, and of their headers."""
        widest, header = 8, 4096
        return sum(widest * prod(shape) + header for shape in self._shapes.values())

    def _parts(self, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Array | QuantizedTensor]]:
        """What the given tensors hold, those of all experts taken apart."""
        reader = FusedReader(self._names.fused_experts)
        for name, tensor in tensors.items():
            fused = self._fused(name, tensor)
            if fused is None:
                yield name, self._convert(name, tensor)
            else:
                given = tensor if fused.is_quantized else self._convert(name, tensor)
                yield from reader.split(name, given)
        reader.check_complete()

    def _requantized(self, name: str, tensor: Array | QuantizedTensor) -> NamedTensor:
        """A given tensor in the format of the one that it replaces, if that is quantized."""
        quant_format = self._quant_formats.get(self._names.own(name) or "")
        if quant_format is not None and not isinstance(tensor, QuantizedTensor):
            return NamedTensor(name, quantized(name, tensor, quant_format), _GIVEN_TENSOR)
        return NamedTensor(name, tensor, _GIVEN_TENSOR)

    def missing(self) -> set[str]:
        """Weights that were never written since the model was made again."""
        return set(self._unwritten) if self._model is not None else set(self._shapes)

    def give_up(self) -> None:
        """Frees the weights' memory."""
        self._model = None
        self._unwritten = set()
        self.info = WeightsInfo((), 0)

    def _restore(self, before: Checkpoint | None) -> None:
        """Undoes a load that broke off: half-replaced weights must never compute anything."""
        if before is None:
            self.give_up()
            return
        try:
            self._load(read_checkpoint(before.folder))
        except ModelLoadError:
            logger.exception("The weights of %s are gone too.", before.folder, extra=SHOWS_ERROR)
            self.give_up()

    def _load(self, checkpoint: Checkpoint) -> None:
        model = self._model or self._make()
        self._quantized = {}
        load_folder(self._requantizing(model.slots), checkpoint.folder, self._names)
        checkpoint.check_unchanged()
        self._model = model
        self._unwritten = set()
        self._quant_formats = _quant_formats(model)
        self.info = _info(model)
        self.checkpoint = checkpoint

    def _requantizing(self, slots: Slots) -> Slots:
        """The slots, of which quantized ones take unquantized numbers as such, if they are to."""
        if not self._requantize:
            return slots
        return {name: self._requantizing_slot(name, slot) for name, slot in slots.items()}

    def _requantizing_slot(self, name: str, slot: Slot) -> Slot:
        quant_format = self._quant_formats.get(name)
        if quant_format is None:
            return slot

        def write(tensor: Array | QuantizedTensor) -> None:
            if isinstance(tensor, QuantizedTensor):
                slot.write(tensor)
            else:
                self._quantized[name] = quant_format
                slot.write(quantized(name, tensor, quant_format))

        return dataclasses.replace(slot, write=write)


def _check_bytes(name: str, tensor: Any) -> None:
    if not (isinstance(tensor, np.ndarray) and cast("Array", tensor).dtype == np.uint8):
        raise ModelLoadError(f"{name} must be a numpy array of uint8.")


def _quant_formats(model: FilledModel) -> dict[str, str]:
    """Which weights are quantized, and in which format."""
    kept = {name: slot.kept_format() for name, slot in model.slots.items()}
    return {name: kept_as for name, kept_as in kept.items() if kept_as in QUANT_FORMATS}


def _info(model: FilledModel) -> WeightsInfo:
    formats = {slot.kept_format() for slot in model.slots.values()}
    return WeightsInfo(tuple(sorted(formats)), model.num_bytes)


def _check_same(mine: ModelConfig, other: ModelConfig, folder: Path) -> None:
    """Weights are all that may differ; what a tokenizer or a client reads does not matter here."""
    mine, other = without_defaults(mine), without_defaults(other)
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    wrong = [name for name in names if getattr(mine, name) != getattr(other, name)]
    if wrong:
        name = wrong[0]
        raise ModelLoadError(
            f"{folder} holds another model: its {name} is {getattr(other, name)!r}, "
            f"that of the model served is {getattr(mine, name)!r}."
        )
