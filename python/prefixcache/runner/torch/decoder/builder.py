"""What makes the parameters of a decoder on torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from prefixcache.config.model_config import Activation, ModelConfig
from prefixcache.models.arrays import Array
from prefixcache.models.decoder.parameters import Parameters
from prefixcache.models.decoder.shapes import LinearShape, NormShape
from prefixcache.runner.torch.ops.arrays import dtype_name, tensor_of
from prefixcache.runner.torch.ops.linear import TorchLinear
from prefixcache.runner.torch.ops.sets import Ops


class Builder(Parameters):
    """Makes unfilled parameters, and the slots that fill them."""

    def __init__(self, ops: Ops) -> None:
        def new(shape: tuple[int, ...], dtype_name: str) -> Tensor:
            return torch.empty(shape, dtype=getattr(torch, dtype_name), device=ops.device)

        super().__init__(dtype_name(ops.dtype), new, _write)
        self.ops = ops
        self._layers: list[TorchLinear] = []

    @property
    def num_bytes(self) -> int:
        """Memory of all that was made, as it is kept now."""
        tensors = sum(tensor.nbytes for tensor in self.tensors)
        return tensors + sum(layer.num_bytes for layer in self._layers)

    def norm(self, shape: NormShape) -> Tensor:
        """The weight of a norm: [rows, width], or [width] of one row."""
        made: Tensor = super().norm(shape)
        return made if shape.rows > 1 else made[0]

    def linear(self, shape: LinearShape) -> TorchLinear:
        """A linear layer."""
        made = self.ops.linear(shape)
        self._layers.append(made)
        self.add_linear(shape, made)
        return made

    def gate(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """What becomes of gates, and what they let pass."""
        return {
            "silu": self.ops.silu_and_mul,
            "gelu_tanh": self.ops.gelu_tanh_and_mul,
            "clamped_swiglu": self.ops.clamped_swiglu,
            "squared_relu": _squared_relu,
        }[activation]

    def embedding(self, name: str, shape: LinearShape, head: TorchLinear | None) -> TorchLinear:
        """A table of embeddings by its name: the weight of the head, if there is one."""
        table = LinearShape(shape.inputs, {name.removesuffix(".weight"): shape.outputs})
        if head is None:
            return self.linear(table)
        self.add_linear(table, head)
        return head


def norm_of(config: ModelConfig, ops: Ops) -> Callable[[Tensor, Tensor], Tensor]:
    """The norm of a tensor with a weight, as all of the model's are."""
    return partial(ops.rms_norm, eps=config.stream_eps, offset=config.norm_offset)


def optional_norm(shape: NormShape | None, builder: Builder) -> Tensor | None:
    """The weight of a norm that a layer may go without."""
    return None if shape is None else builder.norm(shape)


def _squared_relu(x_TF: Tensor) -> Tensor:
    return x_TF.float().relu().square().to(x_TF.dtype)


@torch.inference_mode()
def _write(target: Tensor, numbers: Array | Tensor) -> None:
    target.copy_(tensor_of(numbers))
