"""The parameters of a decoder: tensors that a runner makes, and the slots that fill them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from prefixcache.models.arrays import Array, given_array
from prefixcache.models.decoder.shapes import (
    ConvShape,
    LinearShape,
    NormShape,
    PairedHeads,
    Pieces,
    StateShape,
    VectorShape,
)
from prefixcache.models.quantized import QuantizedTensor
from prefixcache.models.weights import Slot

_Weight: TypeAlias = Array | QuantizedTensor
_Order: TypeAlias = Pieces | PairedHeads | None


class WritableLinear(Protocol):
    """A linear layer as those who load weights see it; its type is `dtype`, as "bfloat16"."""

    @property
    def dtype_name(self) -> str:
        """The type that it computes in, as "bfloat16"."""
        ...

    def kept_format(self, start: int) -> str:
        """How the part of the weight that begins at output `start` is kept: a type or a format."""
        ...

    def copy_rows(self, start: int, weight_OI: Array, /) -> None:
        """Writes outputs `start:start + O` of the weight, converting their type."""
        ...

    def copy_blocks(self, start: int, weight_OI: QuantizedTensor, /) -> None:
        """Writes outputs `start:start + O`, a whole part. `ValueError` where a scale is no number.

        The layer computes as with the numbers that the blocks stand for, rounded once to its type.
        """
        ...

    def copy_bias(self, start: int, bias_O: Array, /) -> None:
        """Writes elements `start:start + O` of the bias."""
        ...


def _same(numbers: Array) -> Array:
    return numbers


def _exp(numbers: Array) -> Array:
    """In float64, so that every processor rounds to the same."""
    return np.array([math.exp(float(number)) for number in numbers]).astype(np.float32)


_STATE_FIELDS = {
    "conv1d.weight": "conv",
    "conv1d.bias": "conv_bias",
    "A_log": "decay",
    "dt_bias": "time_bias",
    "D": "skip",
    "norm.weight": "norm",
}


@dataclass(frozen=True, slots=True)
class StateWeights:
    """What a recurrence computes with, float32: of numpy or of torch.

    `decay` are e^A_log of each value head, `conv` is [taps, channels]. Mamba-2 has a `skip` of each
    value head, and may have a `conv_bias` of each channel.
    """

    conv: Any
    decay: Any
    time_bias: Any
    norm: Any
    conv_bias: Any = None
    skip: Any = None


class Parameters:
    """A model's tensors, of numpy or of torch, unfilled, and the slots that fill them.

    `new` makes one of a shape and a type, as "bfloat16", and `write` writes numbers to one. All are
    kept in `tensors`: kernels may have but their addresses.
    """

    def __init__(
        self,
        dtype_name: str,
        new: Callable[[tuple[int, ...], str], Any],
        write: Callable[[Any, Array], None],
    ) -> None:
        self.slots: dict[str, Slot] = {}
        self.tensors: list[Any] = []
        self._dtype_name = dtype_name
        self._new = new
        self._write = write

    def norm(self, shape: NormShape) -> Any:
        """The weight of a norm: [rows, width]."""
        made, start = self._made((shape.rows, shape.width)), 0
        for name, rows in shape.parts.items():
            change = partial(_norm_numbers, shape)
            part, size = made[start : start + rows], shape.shape(name)
            self._add(f"{name}.{shape.tensor}", size, part, self._dtype_name, change)
            start += rows
        return made

    def vector(self, shape: VectorShape) -> Any:
        """Numbers in float32."""
        made = self._made((shape.width,), "float32")
        self._add(shape.name, (shape.width,), made, "float32")
        return made

    def conv(self, shape: ConvShape) -> tuple[Any, Any | None]:
        """The weight of a convolution, [taps, E], and its bias, [E], where it has one."""
        channels = shape.out.inputs
        weight_LE, bias_E = self._made((shape.taps, channels)), self._made((channels,))
        for name, size in shape.tensors.items():
            target = bias_E if name.endswith(".bias") else weight_LE.T[:, None]
            self._add(name, size, target, self._dtype_name)
        return weight_LE, bias_E if shape.bias else None

    def states(self, shape: StateShape) -> StateWeights:
        """The weights of a recurrence."""
        made: dict[str, Any] = {}
        for name, size in shape.own.items():
            is_conv, change = name == "conv1d.weight", _exp if name == "A_log" else _same
            array = self._made((size[-1], size[0]) if is_conv else size, "float32")
            if name.startswith("conv1d"):
                change = partial(_in_order, shape.channels)
            target = array.T[:, None] if is_conv else array
            self._add(f"{shape.name}.{name}", size, target, "float32", change)
            made[_STATE_FIELDS[name]] = array
        return StateWeights(**made)

    def add_linear(self, shape: LinearShape, linear: WritableLinear) -> None:
        """The slots of a linear layer; none of one that goes without a name."""
        for name, start in shape.starts.items():
            if not name:
                continue
            order, size = shape.pieces.get(name), (shape.parts[name], shape.inputs)
            write = partial(_write_matrix, linear, start, order)
            self.slots[f"{name}.weight"] = Slot(size, write, partial(linear.kept_format, start))
            if shape.bias:
                write = partial(_write_bias, linear, start, order)
                self.slots[f"{name}.bias"] = Slot(size[:1], write, lambda: linear.dtype_name)

    def _made(self, size: tuple[int, ...], dtype_name: str | None = None) -> Any:
        made = self._new(size, dtype_name or self._dtype_name)
        self.tensors.append(made)
        return made

    def _add(
        self,
        name: str,
        size: tuple[int, ...],
        target: Any,
        kept_as: str,
        change: Callable[[Array], Array] = _same,
    ) -> None:
        fill = self._write  # without this object: a circle would keep a model that is given up

        def write(tensor: _Weight) -> None:
            fill(target, change(_numbers(tensor)))

        self.slots[name] = Slot(size, write, lambda: kept_as)


def _write_matrix(linear: WritableLinear, start: int, order: _Order, tensor: _Weight) -> None:
    if isinstance(tensor, QuantizedTensor):
        linear.copy_blocks(start, replace(tensor, blocks=_in_order(order, tensor.blocks)))
    else:
        linear.copy_rows(start, _in_order(order, tensor))


def _write_bias(linear: WritableLinear, start: int, order: _Order, tensor: _Weight) -> None:
    linear.copy_bias(start, _in_order(order, _numbers(tensor)))


def _norm_numbers(shape: NormShape, numbers: Array) -> Array:
    if shape.whole_rows:
        numbers = numbers.reshape(-1, shape.width)
    if shape.factor == 1.0:
        return numbers
    # A tensor of torch may come too.
    return given_array(shape.tensor, numbers).astype(np.float32) * np.float32(shape.factor)


def _numbers(tensor: _Weight) -> Array:
    if isinstance(tensor, QuantizedTensor):
        raise TypeError("quantized weights are for linear layers and embeddings")
    return tensor


def _in_order(order: _Order, numbers: Array) -> Array:
    """Outputs with pieces of a kind together."""
    return numbers if order is None else numbers[order.rows]
