"""Tensors of all experts of a layer, as gpt-oss's checkpoints hold them, taken apart.

What a model reads has a matrix for each expert. Letters of shapes: N experts, I inputs and O
outputs of an expert's matrix, G quant blocks of a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.exceptions import ModelLoadError
from prefixcache.models.arrays import Array
from prefixcache.models.quantized import QuantizedTensor, quant_block_size

_NAME = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
# Dimensions of each kind of tensor: of numbers [N, I, O], biases [N, O], codes [N, O, G, 16], two
# a byte, and exponents [N, O, G].
_DIMENSIONS = {None: 3, "_bias": 2, "_blocks": 4, "_scales": 3}
_PART = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.(weight|bias)")
_NUMBERS, _BYTES = quant_block_size("MXFP4")


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """What the name of a tensor of all experts says."""

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
        count, outputs = shape[0], shape[2] if self.kind is None else shape[1]
        columns = {
            None: shape[1:2],
            "_bias": (),
            "_blocks": (shape[-2] * _NUMBERS,),
            "_scales": None,
        }[self.kind]
        if columns is not None:
            for name, _, rows in self._parts(count):
                yield name, (len(range(outputs)[rows]), *columns)

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


def fused_name(own: str) -> str | None:
    """The tensor of all experts, without "_blocks" or "_scales", that has a model's own tensor."""
    match = _PART.fullmatch(own)
    if match is None:
        return None
    projection = "down" if match[2] == "down" else "gate_up"
    return f"{match[1]}.{projection}_proj" + ("_bias" if match[3] == "bias" else "")


class FusedReader:
    """Takes tensors apart as they come: codes wait for their exponents."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, Array]] = {}

    def split(self, name: str, tensor: Any) -> Iterable[tuple[str, Any]]:
        """What the tensor holds, by name: itself, where it is of no experts.

        Raises `ModelLoadError` where codes and exponents do not fit each other.
        """
        fused = FusedTensor.of(name, len(tensor.shape))
        if fused is None:
            return [(name, tensor)]
        if not fused.is_quantized:
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
