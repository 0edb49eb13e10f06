"""A model whose weights can be replaced, given up, and made again while others keep using it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from prefixcache.attention.grouped import GroupedAttention
from prefixcache.config.logs import SHOWS_ERROR
from prefixcache.config.model_config import ModelConfig, without_defaults
from prefixcache.exceptions import ConfigError, ModelLoadError
from prefixcache.models.checkpoint import Checkpoint, formats_digest, read_checkpoint
from prefixcache.models.decoder import DecoderModel
from prefixcache.models.gguf.index import has_index
from prefixcache.models.quantize import QUANTIZABLE, quantized
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
from prefixcache.ops.quantized import QUANT_FORMATS, QuantizedTensor
from prefixcache.types.modes import WeightsInfo

logger = logging.getLogger(__name__)

_GIVEN_TENSOR = "The update"


class ReplaceableModel:
    """Stands for a model to those who compute with it, whatever becomes of its weights.

    `make` builds the model again with undefined weights, and `checkpoint` is where those of `model`
    came from, if any; later it is the one that holds just these weights, None when some came from
    elsewhere. Weights are usable when every tensor was written (`complete`); `info` tells how they
    are kept, in any thread. Letters of shapes: T tokens in the step, E hidden size, R rows whose
    logits are wanted, V vocabulary.

    Where unquantized weights replace quantized ones: with `requantize` they are quantized to the
    same format. Without it a folder's are kept as they are, and single ones are refused.
    """

    def __init__(
        self,
        model: DecoderModel,
        make: Callable[[], DecoderModel],
        checkpoint: Checkpoint | None,
        *,
        requantize: bool = False,
    ) -> None:
        self._model: DecoderModel | None = model
        self._make = make
        self.checkpoint = checkpoint
        self._config = model.config
        self._shapes = shapes_of(model.slots)
        self._names = model.names
        self._unwritten: set[str] = set()
        self._requantize = requantize
        self._quant_formats = _quant_formats(model)
        self._quantized: dict[str, str] = {}
        self.info = _info(model)

    @property
    def loaded(self) -> DecoderModel:
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

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attention: GroupedAttention
    ) -> Tensor:
        """Hidden states [T, E]."""
        return self.loaded.forward(token_ids_T, positions_T, attention)

    def compute_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits [R, V], float32."""
        return self.loaded.compute_logits(hidden_RE)

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

    def check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `ModelLoadError` for tensors that cannot replace weights of this model.

        That is a name or a shape that is none of its own, and unquantized numbers for quantized
        ones, unless they can be quantized and are to be.
        """
        for name, tensor in tensors.items():
            _check_is_weight(name, tensor)
            own = checked_name(self._shapes, self._names, name, tensor.shape, _GIVEN_TENSOR)
            if own in self._quant_formats:
                self._check_requantizable(own)

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
        missing = self._shapes.keys() - {self._names.own(name) for name in names}
        if missing:
            raise ModelLoadError(f"{_GIVEN_TENSOR} lacks {listed(missing)}.")

    def write(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Replaces the named weights in place; returns the model's own names of them.

        Raises as `check_tensors`, and for numbers that cannot be quantized; then nothing is
        replaced.
        """
        self.check_tensors(tensors)
        named = [self._requantized(name, tensor) for name, tensor in tensors.items()]
        if self._model is None:
            self._model = self._make()
            self._unwritten = set(self._shapes)
        self.checkpoint = None
        written = copy_into(self.loaded.slots, named, self._names)
        self._unwritten -= written
        self.info = _info(self.loaded)
        return written

    def _requantized(self, name: str, tensor: Tensor) -> NamedTensor:
        """A given tensor in the format of the one that it replaces, if that is quantized."""
        quant_format = self._quant_formats.get(self._names.own(name) or "")
        if quant_format is not None:
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
        load_folder(self._requantizing(model.slots), checkpoint.folder, model.device, self._names)
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

        def write(tensor: Tensor | QuantizedTensor) -> None:
            if isinstance(tensor, Tensor):
                self._quantized[name] = quant_format
                slot.write(quantized(name, tensor, quant_format))
            else:
                slot.write(tensor)

        return dataclasses.replace(slot, write=write)


def _quant_formats(model: DecoderModel) -> dict[str, str]:
    """Which weights are quantized, and in which format."""
    kept = {name: slot.kept_format() for name, slot in model.slots.items()}
    return {name: one for name, one in kept.items() if one in QUANT_FORMATS}


def _info(model: DecoderModel) -> WeightsInfo:
    formats = {slot.kept_format() for slot in model.slots.values()}
    return WeightsInfo(tuple(sorted(formats)), model.num_bytes)


def _check_is_weight(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta:
        raise ModelLoadError(f"{name} must be a torch tensor of floating-point numbers.")


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
