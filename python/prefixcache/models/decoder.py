"""The decoder of every supported family: Llama, Mistral, Qwen and Gemma by flags of their config.

Letters of shapes: T tokens in the step, E hidden size, F intermediate size, H query heads, K
key-value heads, D head size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from prefixcache.attention.base import AttentionSpec
from prefixcache.attention.grouped import GroupedAttention, Rotation
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.names import TensorNames
from prefixcache.models.weights import Slot
from prefixcache.ops.embedding import Embedding
from prefixcache.ops.linear import Linear, dtype_name
from prefixcache.ops.quantized import QuantizedTensor
from prefixcache.ops.rope import RotaryEmbedding
from prefixcache.ops.sets import Ops
from prefixcache.ops.stack import LayerWeights


class Builder:
    """Makes unfilled parameters for one set of ops."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self._tensors: list[Tensor] = []
        self._layers: list[Linear | Embedding] = []

    @property
    def num_bytes(self) -> int:
        """Memory of all that was made, as it is kept now."""
        tensors = sum(tensor.nbytes for tensor in self._tensors)
        return tensors + sum(layer.num_bytes for layer in self._layers)

    def tensor(self, *shape: int) -> Tensor:
        """An uninitialised parameter."""
        made = torch.empty(shape, dtype=self.ops.dtype, device=self.ops.device)
        self._tensors.append(made)
        return made

    def linear(
        self, inputs: int, outputs: int, *, bias: bool, parts: Sequence[int] | None = None
    ) -> Linear:
        """An unfilled linear layer, fused of projections with these numbers of outputs."""
        made = self.ops.linear(inputs, outputs, bias=bias, parts=parts)
        self._layers.append(made)
        return made

    def embedding(self, head: Linear | None, vocab_size: int, hidden_size: int) -> Embedding:
        """An unfilled table of embeddings, and the head tied to it if there is one."""
        made = self.ops.embedding(head, vocab_size, hidden_size)
        self._layers.append(made)
        return made


class Attention:
    """Fused q, k, v projection, rotation, paged attention; `out` is the output projection."""

    def __init__(self, config: ModelConfig, layer: int, builder: Builder) -> None:
        self._ops = builder.ops
        self._layer = layer
        self._rms_norm = _norm_of(config, builder.ops)
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        parts = [heads * config.head_dim for heads in self._heads]
        self.qkv = builder.linear(config.hidden_size, sum(parts), bias=config.qkv_bias, parts=parts)
        self.out = builder.linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias
        )
        # One row a head, so that one call normalises the queries and the keys.
        self.qk_norm = (
            builder.tensor(config.num_heads + config.num_kv_heads, config.head_dim)
            if config.qk_norm
            else None
        )
        self._qkv_bias = config.qkv_bias
        self._out_bias = config.output_bias

    def __call__(self, x_TE: Tensor, rotation: Rotation, attention: GroupedAttention) -> Tensor:
        """What `out` takes; `rotation` holds the cosines and sines of the step's positions."""
        num_q, num_k, _ = self._heads
        qkv = self.qkv(x_TE).view(-1, sum(self._heads), self._head_dim)
        qk, v_TKD = qkv[:, : num_q + num_k], qkv[:, num_q + num_k :]
        if self.qk_norm is not None:
            qk = self._rms_norm(qk, self.qk_norm)
        if attention.rotate_and_run is not None:
            out_THD = attention.rotate_and_run(self._layer, qk, v_TKD, rotation)
        else:
            qk = self._ops.apply_rope(qk, *rotation)
            out_THD = attention.run(self._layer, qk[:, :num_q], qk[:, num_q:], v_TKD)
        return out_THD.flatten(1)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """The checkpoint's names of this block's tensors."""
        row = 0
        for name, heads in zip("qkv", self._heads, strict=True):
            rows = heads * self._head_dim
            yield from _linear_slots(
                f"{prefix}.{name}_proj", self.qkv, row, rows, bias=self._qkv_bias
            )
            row += rows
        yield from _linear_slots(
            f"{prefix}.o_proj", self.out, 0, self.out.out_features, bias=self._out_bias
        )
        if self.qk_norm is not None:
            yield f"{prefix}.q_norm.weight", _head_slot(self.qk_norm[: self._heads[0]])
            yield f"{prefix}.k_norm.weight", _head_slot(self.qk_norm[self._heads[0] :])


class MLP:
    """activation(gate(x)) * up(x), gate and up in one linear, for `down`."""

    def __init__(self, config: ModelConfig, builder: Builder) -> None:
        size = config.intermediate_size
        gates = {
            "silu": builder.ops.silu_and_mul,
            "gelu_tanh": builder.ops.gelu_tanh_and_mul,
        }
        self._gate = gates[config.activation]
        self._size = size
        self._bias = config.mlp_bias
        self.gate_up = builder.linear(
            config.hidden_size, 2 * size, bias=config.mlp_bias, parts=[size, size]
        )
        self.down = builder.linear(size, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """What `down` takes, [T, F]."""
        return self._gate(self.gate_up(x_TE))

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """The checkpoint's names of this block's tensors."""
        for part, name in enumerate(("gate_proj", "up_proj")):
            yield from _linear_slots(
                f"{prefix}.{name}", self.gate_up, part * self._size, self._size, bias=self._bias
            )
        yield from _linear_slots(
            f"{prefix}.down_proj", self.down, 0, self.down.out_features, bias=self._bias
        )


class DecoderLayer:
    """Attention and MLP, each after a norm and with a residual connection.

    With `sandwich_norms` what they add to the residual is normalised too.
    """

    def __init__(self, config: ModelConfig, layer: int, builder: Builder) -> None:
        self._config = config
        self._rms_norm = _norm_of(config, builder.ops)
        self._rope = _rope_of(config, layer)
        self._input_norm_E = builder.tensor(config.hidden_size)
        self._attention = Attention(config, layer, builder)
        self._attention_out_norm_E = self._out_norm(builder)
        self._mlp_norm_E = builder.tensor(config.hidden_size)
        self._mlp = MLP(config, builder)
        self._mlp_out_norm_E = self._out_norm(builder)

    def _out_norm(self, builder: Builder) -> Tensor | None:
        return builder.tensor(self._config.hidden_size) if self._config.sandwich_norms else None

    def __call__(
        self,
        x_TE: Tensor,
        rotations: Sequence[Rotation],
        attention: GroupedAttention,
    ) -> Tensor:
        """Returns the residual stream after this layer, [T, E]; `rotations` are the model's."""
        normed_TE = self._rms_norm(x_TE, self._input_norm_E)
        heads_TI = self._attention(normed_TE, rotations[self._rope], attention)
        x_TE = self._added(x_TE, self._attention.out, heads_TI, self._attention_out_norm_E)
        gated_TF = self._mlp(self._rms_norm(x_TE, self._mlp_norm_E))
        return self._added(x_TE, self._mlp.down, gated_TF, self._mlp_out_norm_E)

    def _added(
        self, x_TE: Tensor, linear: Linear, y_TI: Tensor, out_norm_E: Tensor | None
    ) -> Tensor:
        """The residual stream with the linear's result, which uses the stream up."""
        if out_norm_E is None:
            return linear(y_TI, x_TE)
        return x_TE + self._rms_norm(linear(y_TI), out_norm_E)

    @property
    def weights(self) -> LayerWeights:
        """What this layer is made of."""
        return LayerWeights(
            input_norm_E=self._input_norm_E,
            qkv=self._attention.qkv,
            qk_norm_HKD=self._attention.qk_norm,
            out=self._attention.out,
            attention_out_norm_E=self._attention_out_norm_E,
            mlp_norm_E=self._mlp_norm_E,
            gate_up=self._mlp.gate_up,
            activation=self._config.activation,
            down=self._mlp.down,
            mlp_out_norm_E=self._mlp_out_norm_E,
            norm_offset=self._config.norm_offset,
            rope=self._rope,
        )

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """The checkpoint's names of this layer's tensors."""
        for name, norm_E in self._norms().items():
            yield f"{prefix}.{name}.weight", _tensor_slot(norm_E)
        yield from self._attention.slots(f"{prefix}.self_attn")
        yield from self._mlp.slots(f"{prefix}.mlp")

    def _norms(self) -> dict[str, Tensor]:
        """By the checkpoint's names: "post-attention" is another norm where there are four."""
        if self._attention_out_norm_E is None or self._mlp_out_norm_E is None:
            return {
                "input_layernorm": self._input_norm_E,
                "post_attention_layernorm": self._mlp_norm_E,
            }
        return {
            "input_layernorm": self._input_norm_E,
            "post_attention_layernorm": self._attention_out_norm_E,
            "pre_feedforward_layernorm": self._mlp_norm_E,
            "post_feedforward_layernorm": self._mlp_out_norm_E,
        }


class DecoderModel:
    """The decoder. Its parameters are undefined until every slot was written.

    `max_positions` bounds the positions `forward` may be given.
    """

    def __init__(self, config: ModelConfig, builder: Builder, max_positions: int) -> None:
        self.config = config
        self.dtype = builder.ops.dtype
        self.device = builder.ops.device
        self._builder = builder
        self._rms_norm = _norm_of(config, builder.ops)
        self._layers = [DecoderLayer(config, i, builder) for i in range(config.num_layers)]
        self._stack = builder.ops.stack(
            [layer.weights for layer in self._layers], config.rms_norm_eps
        )
        self._norm_E = builder.tensor(config.hidden_size)
        self._head = builder.linear(config.hidden_size, config.vocab_size, bias=False)
        self._embedding = builder.embedding(
            self._head if config.tie_word_embeddings else None,
            config.vocab_size,
            config.hidden_size,
        )
        self._ropes = [
            RotaryEmbedding(rope, config.head_dim, max_positions, self.device)
            for rope in (config.rope, config.local_rope)
            if rope is not None
        ]
        # Rounded as the weights are: Gemma was trained so.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self.names = TensorNames(config)
        self.slots = dict(self._all_slots())

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
        x_TE = self._through_layers(self._embedded(token_ids_T), rotations, attention)
        return self._rms_norm(x_TE, self._norm_E)

    def _embedded(self, token_ids_T: Tensor) -> Tensor:
        x_TE = self._embedding(token_ids_T)
        return x_TE if self._embedding_scale == 1.0 else x_TE.mul_(self._embedding_scale)

    def _through_layers(
        self,
        x_TE: Tensor,
        rotations: Sequence[Rotation],
        attention: GroupedAttention,
    ) -> Tensor:
        """In one call where ops and attention both can, which changes no bit."""
        if self._stack is not None and attention.run_stack is not None:
            attention.run_stack(self._stack, x_TE, rotations)
            return x_TE
        for layer in self._layers:
            x_TE = layer(x_TE, rotations, attention)
        return x_TE

    @torch.inference_mode()
    def compute_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits [R, V] of the given rows of `forward`'s result, not rounded any further."""
        return self._head.wide(hidden_RE)

    def _all_slots(self) -> Iterator[tuple[str, Slot]]:
        shape = (self.config.vocab_size, self.config.hidden_size)
        yield (
            "model.embed_tokens.weight",
            Slot(shape, self._embedding.write, self._embedding.kept_format),
        )
        for index, layer in enumerate(self._layers):
            yield from layer.slots(f"model.layers.{index}")
        yield "model.norm.weight", _tensor_slot(self._norm_E)
        if not self.config.tie_word_embeddings:
            yield from _linear_slots("lm_head", self._head, 0, self.config.vocab_size, bias=False)


def _norm_of(config: ModelConfig, ops: Ops) -> Callable[[Tensor, Tensor], Tensor]:
    """The norm of a tensor with a weight, as all of the model's are."""
    return partial(ops.rms_norm, eps=config.rms_norm_eps, offset=config.norm_offset)


def _rope_of(config: ModelConfig, layer: int) -> int:
    """The number of the layer's rotation: 1 where a layer with a window has one of its own."""
    has_window = bool(config.layer_windows) and config.layer_windows[layer] is not None
    return int(has_window and config.local_rope is not None)


def _tensor_slot(parameter: Tensor) -> Slot:
    shape, write = tuple(parameter.shape), partial(_copy_numbers, parameter)
    return Slot(shape, write, partial(dtype_name, parameter.dtype))


def _head_slot(parameter_ND: Tensor) -> Slot:
    """One checkpoint row [D] for all of N heads."""
    shape, write = (parameter_ND.shape[1],), partial(_copy_numbers, parameter_ND)
    return Slot(shape, write, partial(dtype_name, parameter_ND.dtype))


def _copy_numbers(parameter: Tensor, tensor: Tensor | QuantizedTensor) -> None:
    parameter.copy_(_numbers(tensor))


def _numbers(tensor: Tensor | QuantizedTensor) -> Tensor:
    if isinstance(tensor, QuantizedTensor):
        raise TypeError("quantized weights are for linear layers and embeddings")
    return tensor


def _linear_slots(
    name: str, linear: Linear, start: int, rows: int, *, bias: bool
) -> Iterator[tuple[str, Slot]]:
    """The part of a (fused) linear that the checkpoint keeps under `name`."""
    write, kept_format = partial(_copy_matrix, linear, start), partial(linear.kept_format, start)
    yield f"{name}.weight", Slot((rows, linear.in_features), write, kept_format)
    if bias:

        def write_bias(tensor: Tensor | QuantizedTensor) -> None:
            linear.copy_bias(start, _numbers(tensor))

        yield f"{name}.bias", Slot((rows,), write_bias, partial(dtype_name, linear.dtype))


def _copy_matrix(linear: Linear, start: int, tensor: Tensor | QuantizedTensor) -> None:
    if isinstance(tensor, QuantizedTensor):
        linear.copy_blocks(start, tensor)
    else:
        linear.copy_rows(start, tensor)
