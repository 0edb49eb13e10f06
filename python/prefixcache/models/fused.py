"""Tensors of all experts of a layer, as some families' checkpoints hold them, taken apart.

What a model reads has a matrix for each expert. Letters of shapes: N experts, I inputs and O
outputs of an expert's matrix, G quant blocks of a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prefixcache.exceptions import ModelLoadError
from prefixcache.models.arrays import Array
from prefixcache.models.quantized import QuantizedTensor, quant_block_size

RowOrder = Literal["turns", "halves"]
"""Gates and what they let pass take turns among the outputs of an expert, or are halves of them."""

_NAME = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
# Granite's are of `block_sparse_moe`, or of its `experts` in newer files.
_HALVED_NAME = re.compile(
    r"(.*\.(?:block_sparse_moe|shared_mlp|(?<!moe\.)experts))(?:\.experts)?"
    r"\.(?:(gate_up_proj|input_linear\.weight)|down_proj|output_linear\.weight)"
)
# Dimensions of each kind of tensor: of numbers [N, I, O], biases [N, O], codes [N, O, G, 16], two
# a byte, and exponents [N, O, G].
_DIMENSIONS = {None: 3, "_bias": 2, "_blocks": 4, "_scales": 3}
_PART = re.compile(
    r"(.*\.(?:experts|block_sparse_moe|shared_mlp))(?:\.\d+)?"
    r"\.(gate_proj|up_proj|down_proj|w[123])\.(weight|bias)"
)
_NUMBERS, _BYTES = quant_block_size("MXFP4")


@dataclass(frozen=True, slots=True)
class HalvedTensor:
    """What the name of a tensor of all experts in halves [N, O, I] says.

    A shared expert alone has [O, I].
    """

    base: str
    has_gates: bool
    is_quantized = False

    @classmethod
    def of(cls, name: str, dimensions: int) -> HalvedTensor | None:
        """None for the name of another tensor, or with another number of dimensions."""
        match = _HALVED_NAME.fullmatch(name)
        if match is None or dimensions != (2 if match[1].endswith("shared_mlp") else 3):
            return None
        return cls(match[1], match[2] is not None)

    def shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tensors of the experts, by name."""
        for name, part in self.dense(np.broadcast_to(np.float32(0), shape)):
            yield name, part.shape

    def dense(self, numbers: Array) -> Iterator[tuple[str, Array]]:
        """The numbers of each expert, by name."""
        half = numbers.shape[-2] // 2
        is_lfm2 = self.base.endswith(".feed_forward.experts")
        gate, up, down = ("w1", "w3", "w2") if is_lfm2 else ("gate_proj", "up_proj", "down_proj")
        parts = {down: slice(None)}
        if self.has_gates:
            parts = {gate: slice(half), up: slice(half, None)}
        named = [("", numbers)]
        if numbers.ndim == _DIMENSIONS[None]:
            named = [(f".{number}", array) for number, array in enumerate(numbers)]
        for number, array in named:
            for part, rows in parts.items():
                yield f"{self.base}{number}.{part}.weight", array[rows]


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """What the name of a tensor of all experts in turns says."""

    base: str
    projection: str
    kind: str | None

    @classmethod
    def of(cls, name: str, dimensions: int) -> FusedTensor | None:
        """None for the name of another tensor, or with another number of dimensions."""
        match = _NAME.fullmatch(name)
        if match is None or _DIMENSIONS[match[3]] != dimensions:
            return None
        return cls(match[1], match[2], match[3])

    @property
    def is_quantized(self) -> bool:
        """Whether it holds codes or exponents, and no numbers."""
        return self.kind in ("_blocks", "_scales")

    def shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tensors of the experts, by name; exponents are none of their own."""
        if self.kind == "_blocks":
            shape = (*shape[:2], shape[2] * _NUMBERS)
        if self.kind != "_scales":
            for name, part in self.dense(np.broadcast_to(np.float32(0), shape)):
                yield name, part.shape

    def dense(self, numbers: Array) -> Iterator[tuple[str, Array]]:
        """The numbers of each expert, by name."""
        outputs_first = numbers.swapaxes(1, 2) if self.kind is None else numbers
        for name, expert, rows in self._parts(len(numbers)):
            yield name, outputs_first[expert][rows]

    def quantized(self, codes: Array, exponents: Array) -> Iterator[tuple[str, QuantizedTensor]]:
        """The same numbers in GGUF's blocks."""
        for name, expert, rows in self._parts(len(codes)):
            blocks = _gguf_blocks(codes[expert][rows], exponents[expert][rows])
            shape = (len(blocks), codes.shape[2] * _NUMBERS)
            yield name, QuantizedTensor("MXFP4", shape, blocks)

    def _parts(self, count: int) -> Iterator[tuple[str, int, slice]]:
        """Name, expert and rows of each part: gates and what they let pass take turns."""
        kind = "bias" if self.kind == "_bias" else "weight"
        parts = {"down": slice(None)}
        if self.projection == "gate_up":
            parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for expert in range(count):
            for part, rows in parts.items():
                yield f"{self.base}.{expert}.{part}_proj.{kind}", expert, rows


def fused_tensor(name: str, dimensions: int, order: RowOrder) -> FusedTensor | HalvedTensor | None:
    """What the name says in checkpoints of this order; None for a tensor of one expert or none."""
    return (HalvedTensor if order == "halves" else FusedTensor).of(name, dimensions)


def fused_names(own: str) -> tuple[str, ...]:
    """Tensors of all experts, less "_blocks" or "_scales", that may have a model's own tensor."""
    match = _PART.fullmatch(own)
    if match is None:
        return ()
    names = ("gate_up_proj", "input_linear.weight")
    if match[2] in ("down_proj", "w2"):
        names = ("down_proj", "output_linear.weight")
    if match[3] == "bias":
        names = (f"{names[0]}_bias",)
    parts = ("", "experts.") if match[1].endswith("block_sparse_moe") else ("",)
    return tuple(f"{match[1]}.{part}{name}" for part in parts for name in names)


class FusedReader:
    """Takes tensors apart as they come: codes wait for their exponents."""

    def __init__(self, order: RowOrder) -> None:
        self._order: RowOrder = order
        self._waiting: dict[str, tuple[str, Array]] = {}

    def split(self, name: str, tensor: Any) -> Iterable[tuple[str, Any]]:
        """What the tensor holds, by name: itself, where it is of no experts.

        Raises `ModelLoadError` where codes and exponents do not fit each other.
        """
        fused = fused_tensor(name, len(tensor.shape), self._order)
        if fused is None:
            return [(name, tensor)]
        if isinstance(fused, HalvedTensor) or not fused.is_quantized:
            return fused.dense(tensor)
        assert fused.kind is not None
        base = name.removesuffix(fused.kind)
        if base not in self._waiting:
            self._waiting[base] = (fused.kind, tensor)
            return ()
        tensors = dict([self._waiting.pop(base), (fused.kind, tensor)])
        codes, exponents = tensors["_blocks"], tensors["_scales"]
        if codes.shape != (*exponents.shape, _NUMBERS // 2):
            raise ModelLoadError(
                f"{base}_scales has shape {list(exponents.shape)}, "
                f"{base}_blocks {list(codes.shape)}."
            )
        return fused.quantized(codes, exponents)

    def check_complete(self) -> None:
        """Raises `ModelLoadError` where codes or exponents came alone."""
        for base, (kind, _) in self._waiting.items():
            raise ModelLoadError(f"{base}{kind} is there without its blocks or scales.")


def _gguf_blocks(codes: Array, exponents: Array) -> npt.NDArray[np.uint8]:
    """Blocks [O, G * 17] of codes [O, G, 16] and exponents [O, G].

    There a byte holds the codes of numbers i and 16 + i, here those of 2 i and 2 i + 1.
    """
    each = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*exponents.shape, _NUMBERS)
    halves = each[..., : _NUMBERS // 2] | each[..., _NUMBERS // 2 :] << 4
    blocks = np.concatenate([exponents[..., None], halves], axis=-1)
    return blocks.reshape(len(blocks), -1).astype(np.uint8, copy=False)
