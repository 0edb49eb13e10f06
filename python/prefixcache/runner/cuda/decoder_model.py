"""The decoder of every supported family on torch, by the shapes of `models/parameters.py`.

Letters of shapes: T tokens in the step, E hidden size, F intermediate size, H query heads, K
key-value heads, D head size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from prefixcache.config.model_config import ModelConfig
from prefixcache.models.arrays import Array
from prefixcache.models.names import TensorNames
from prefixcache.models.parameters import (
    EMBEDDING,
    DecoderShape,
    LayerShape,
    LinearShape,
    NormShape,
    linear_slots,
    norm_slots,
)
from prefixcache.models.weights import Slot
from prefixcache.runner.cuda.attention.base import AttentionSpec
from prefixcache.runner.cuda.attention.grouped import GroupedAttention, Rotation
from prefixcache.runner.cuda.ops.arrays import dtype_name, tensor_of
from prefixcache.runner.cuda.ops.embedding import Embedding
from prefixcache.runner.cuda.ops.linear import Linear
from prefixcache.runner.cuda.ops.rope import RotaryEmbedding
from prefixcache.runner.cuda.ops.sets import Ops


class Builder:
    """Makes unfilled parameters, and the slots that fill them."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.slots: dict[str, Slot] = {}
        self._tensors: list[Tensor] = []
        self._layers: list[Linear | Embedding] = []

    @property
    def num_bytes(self) -> int:
        """Memory of all that was made, as it is kept now."""
        tensors = sum(tensor.nbytes for tensor in self._tensors)
        return tensors + sum(layer.num_bytes for layer in self._layers)

    def norm(self, shape: NormShape) -> Tensor:
        """The weight of a norm: [rows, width], or [width] of one row."""
        made = self.ops.empty(shape.rows, shape.width)
        self._tensors.append(made)
        write = partial(_write_rows, made)
        self.slots.update(norm_slots(shape, write, dtype_name(made.dtype)))
        return made if shape.rows > 1 else made[0]

    def linear(self, shape: LinearShape) -> Linear:
        """A linear layer."""
        made = self.ops.linear(shape)
        self._layers.append(made)
        if "" not in shape.parts:
            self.slots.update(linear_slots(shape, made))
        return made

    def embedding(self, shape: LinearShape, head: Linear | None) -> Embedding:
        """A table of embeddings, and the head tied to it if there is one."""
        made = self.ops.embedding(shape, head)
        self._layers.append(made)
        size = (shape.outputs, shape.inputs)
        self.slots[EMBEDDING] = Slot(size, made.write, made.kept_format)
        return made


class DecoderLayer:
    """Attention and MLP, each after a norm and with a residual connection.

    With `sandwich_norms` what they add to the residual is normalised too.
    """

    def __init__(
        self, config: ModelConfig, layer: int, shape: LayerShape, builder: Builder
    ) -> None:
        self._ops = builder.ops
        self._layer = layer
        self._rope = shape.rope
        self._rms_norm = _norm_of(config, builder.ops)
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        gates = {
            "silu": builder.ops.silu_and_mul,
            "gelu_tanh": builder.ops.gelu_tanh_and_mul,
        }
        self._gate = gates[shape.activation]
        self._input_norm_E = builder.norm(shape.input_norm)
        self._qkv = builder.linear(shape.qkv)
        # One row a head, so that one call normalises the queries and the keys.
        self._qk_norm = builder.norm(shape.qk_norm) if shape.qk_norm else None
        self._out = builder.linear(shape.out)
        self._attention_out_norm_E = _optional(shape.attention_out_norm, builder)
        self._mlp_norm_E = builder.norm(shape.mlp_norm)
        self._gate_up = builder.linear(shape.gate_up)
        self._down = builder.linear(shape.down)
        self._mlp_out_norm_E = _optional(shape.mlp_out_norm, builder)

    def __call__(
        self,
        x_TE: Tensor,
        rotations: Sequence[Rotation],
        attention: GroupedAttention,
    ) -> Tensor:
        """Returns the residual stream after this layer, [T, E]; `rotations` are the model's."""
        normed_TE = self._rms_norm(x_TE, self._input_norm_E)
        heads_TI = self._attend(normed_TE, rotations[self._rope], attention)
        x_TE = self._added(x_TE, self._out, heads_TI, self._attention_out_norm_E)
        gated_TF = self._gate(self._gate_up(self._rms_norm(x_TE, self._mlp_norm_E)))
        return self._added(x_TE, self._down, gated_TF, self._mlp_out_norm_E)

    def _attend(self, x_TE: Tensor, rotation: Rotation, attention: GroupedAttention) -> Tensor:
        """What `out` takes; `rotation` holds the cosines and sines of the step's positions."""
        num_q, num_k, _ = self._heads
        qkv = self._qkv(x_TE).view(-1, sum(self._heads), self._head_dim)
        qk, v_TKD = qkv[:, : num_q + num_k], qkv[:, num_q + num_k :]
        if self._qk_norm is not None:
            qk = self._rms_norm(qk, self._qk_norm)
        if attention.rotate_and_run is not None:
            out_THD = attention.rotate_and_run(self._layer, qk, v_TKD, rotation)
        else:
            qk = self._ops.apply_rope(qk, *rotation)
            out_THD = attention.run(self._layer, qk[:, :num_q], qk[:, num_q:], v_TKD)
        return out_THD.flatten(1)

    def _added(
        self, x_TE: Tensor, linear: Linear, y_TI: Tensor, out_norm_E: Tensor | None
    ) -> Tensor:
        """The residual stream with the linear's result, which uses the stream up."""
        if out_norm_E is None:
            return linear(y_TI, x_TE)
        return x_TE + self._rms_norm(linear(y_TI), out_norm_E)


class DecoderModel:
    """The decoder. Its parameters are undefined until every slot was written.

    `max_positions` bounds the positions `forward` may be given.
    """

    def __init__(self, config: ModelConfig, ops: Ops, max_positions: int) -> None:
        self.config = config
        self.dtype = ops.dtype
        self.device = ops.device
        self._builder = Builder(ops)
        self._rms_norm = _norm_of(config, ops)
        shape = DecoderShape.of(config)
        self._layers = [
            DecoderLayer(config, i, layer, self._builder) for i, layer in enumerate(shape.layers)
        ]
        self._norm_E = self._builder.norm(shape.norm)
        self._head = self._builder.linear(shape.head)
        self._embedding = self._builder.embedding(
            shape.head, self._head if config.tie_word_embeddings else None
        )
        self._ropes = [
            RotaryEmbedding(rope, config.head_dim, max_positions, self.device)
            for rope in (config.rope, config.local_rope)
            if rope is not None
        ]
        # Rounded as the weights are: Gemma was trained so.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self.names = TensorNames(config)
        self.slots = self._builder.slots

    @property
    def num_bytes(self) -> int:
        """Memory of the weights as they are kept now."""
        return self._builder.num_bytes

    @property
    def attention_spec(self) -> AttentionSpec:
        """What this model's attention backend is made with."""
        return AttentionSpec(
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            scale=self.config.attention_scale or self.config.head_dim**-0.5,
        )

    @torch.inference_mode()
    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attention: GroupedAttention
    ) -> Tensor:
        """Hidden states [T, E] after the last norm; `attention` must be planned for the step."""
        rotations = [rope.at(positions_T) for rope in self._ropes]
        x_TE = self._embedded(token_ids_T)
        for layer in self._layers:
            x_TE = layer(x_TE, rotations, attention)
        return self._rms_norm(x_TE, self._norm_E)

    def _embedded(self, token_ids_T: Tensor) -> Tensor:
        x_TE = self._embedding(token_ids_T)
        return x_TE if self._embedding_scale == 1.0 else x_TE.mul_(self._embedding_scale)

    @torch.inference_mode()
    def compute_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits [R, V] of the given rows of `forward`'s result, not rounded any further."""
        return self._head.wide(hidden_RE)


def _norm_of(config: ModelConfig, ops: Ops) -> Callable[[Tensor, Tensor], Tensor]:
    """The norm of a tensor with a weight, as all of the model's are."""
    return partial(ops.rms_norm, eps=config.rms_norm_eps, offset=config.norm_offset)


def _optional(shape: NormShape | None, builder: Builder) -> Tensor | None:
    return None if shape is None else builder.norm(shape)


@torch.inference_mode()
def _write_rows(norm: Tensor, rows: slice, numbers: Array | Tensor) -> None:
    norm[rows] = tensor_of(numbers).to(norm)
