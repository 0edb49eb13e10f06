"""The decoder of every supported family on torch, by the shapes of `models/decoder/shapes.py`.

Letters of shapes: T tokens in the step, E hidden size, F intermediate size, H query heads, K
key-value heads, D head size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prefixcache.config.model_config import ModelConfig
from prefixcache.models.decoder.shape_of import decoder_shape
from prefixcache.models.decoder.shapes import (
    EMBEDDING,
    OWN_EMBEDDING,
    LayerShape,
    OwnInputShape,
    OwnInputsShape,
)
from prefixcache.models.names import TensorNames
from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.grouped import GroupedAttention, Rotation
from prefixcache.runner.torch.decoder.builder import Builder, norm_of, optional_norm
from prefixcache.runner.torch.decoder.feed_forwards import feed_forward_of
from prefixcache.runner.torch.decoder.mixers import mixer_of
from prefixcache.runner.torch.ops.rope import RotaryEmbedding
from prefixcache.runner.torch.ops.sets import Ops


class DecoderLayer:
    """A mixer and a feed-forward, each with the norms that it has and a residual connection."""

    def __init__(
        self, config: ModelConfig, layer: int, shape: LayerShape, builder: Builder
    ) -> None:
        self._rms_norm = norm_of(config, builder.ops)
        self._input_norm_E = optional_norm(shape.input_norm, builder)
        self._mixer = mixer_of(config, layer, shape.mixer, builder)
        self._mixer_out_norm_E = optional_norm(shape.mixer_out_norm, builder)
        self._mlp_norm_E = optional_norm(shape.mlp_norm, builder)
        made = shape.feed_forward
        self._feed_forward = None if made is None else feed_forward_of(config, made, builder)
        self._mlp_out_norm_E = optional_norm(shape.mlp_out_norm, builder)
        own = shape.own_input
        self._own_input = None if own is None else OwnInput(config, own, builder)
        self._scale_1 = None if shape.scale is None else builder.vector(shape.scale)

    def __call__(
        self,
        x_TE: Tensor,
        rotations: Sequence[Rotation],
        attention: GroupedAttention,
        own_TI: Tensor | None,
    ) -> Tensor:
        """Returns the residual stream after this layer, [T, E]; `rotations` are the model's.

        `own_TI` is the input that the layer alone has, where it has one.
        """
        heads_TI = self._mixer(self._normed(x_TE, self._input_norm_E), rotations, attention)
        x_TE = self._added(x_TE, self._mixer.out, heads_TI, self._mixer_out_norm_E)
        if self._feed_forward is not None:
            gated_TF = self._feed_forward(self._normed(x_TE, self._mlp_norm_E))
            x_TE = self._added(x_TE, self._feed_forward.out, gated_TF, self._mlp_out_norm_E)
        if self._own_input is not None:
            assert own_TI is not None
            x_TE = x_TE + self._own_input(x_TE, own_TI)
        return x_TE if self._scale_1 is None else x_TE * self._scale_1.to(x_TE)

    def _normed(self, x_TE: Tensor, norm_E: Tensor | None) -> Tensor:
        return x_TE if norm_E is None else self._rms_norm(x_TE, norm_E)

    def _added(
        self,
        x_TE: Tensor,
        out: Callable[[Tensor, Tensor | None], Tensor],
        y_TI: Tensor,
        out_norm_E: Tensor | None,
    ) -> Tensor:
        """The residual stream with the part's result, which uses the stream up."""
        if out_norm_E is None:
            return out(y_TI, x_TE)
        return x_TE + self._rms_norm(out(y_TI, None).to(x_TE), out_norm_E)


class OwnInput:
    """What takes a layer's own input into the stream; see `OwnInputShape`."""

    def __init__(self, config: ModelConfig, shape: OwnInputShape, builder: Builder) -> None:
        self._rms_norm = norm_of(config, builder.ops)
        self._gate = builder.linear(shape.gate)
        self._open = builder.gate(shape.activation)
        self._out = builder.linear(shape.out)
        self._norm_E = builder.norm(shape.norm)

    def __call__(self, x_TE: Tensor, own_TI: Tensor) -> Tensor:
        """What is added, [T, E]."""
        opened_TI = self._open(torch.cat([self._gate(x_TE), own_TI], dim=-1))
        return self._rms_norm(self._out(opened_TI), self._norm_E)


class OwnInputs:
    """What each of L layers alone has of a token, I numbers; see `OwnInputsShape`."""

    def __init__(self, config: ModelConfig, shape: OwnInputsShape, builder: Builder) -> None:
        self._table = builder.embedding(OWN_EMBEDDING, shape.table, None)
        self._projection = builder.linear(shape.projection)
        self._norm_I = builder.norm(shape.norm)
        self._rms_norm = norm_of(config, builder.ops)
        self._size = config.own_input_size
        self._scale = torch.tensor(self._size**0.5, dtype=builder.ops.dtype).item()

    def __call__(self, token_ids_T: Tensor, x_TE: Tensor) -> Tensor:
        """Returns [L, T, I] of tokens and their embeddings."""
        made_TI = self._projection(x_TE) * x_TE.shape[-1] ** -0.5
        normed_TLI = self._rms_norm(made_TI.unflatten(-1, (-1, self._size)), self._norm_I)
        table_TLI = (self._table.read_rows(token_ids_T) * self._scale).view_as(normed_TLI)
        return ((normed_TLI + table_TLI) * 0.5**0.5).transpose(0, 1)


class DecoderModel:
    """The decoder. Its parameters are undefined until every slot was written.

    `max_positions` bounds the positions `forward` may be given.
    """

    def __init__(self, config: ModelConfig, ops: Ops, max_positions: int) -> None:
        self.config = config
        self.dtype = ops.dtype
        self.device = ops.device
        self._builder = Builder(ops)
        self._rms_norm = norm_of(config, ops)
        shape = decoder_shape(config)
        self._layers = [
            DecoderLayer(config, i, layer, self._builder) for i, layer in enumerate(shape.layers)
        ]
        self._norm_E = self._builder.norm(shape.norm)
        self._head = self._builder.linear(shape.head)
        self._embedding = self._builder.embedding(
            EMBEDDING, shape.head, self._head if config.tie_word_embeddings else None
        )
        self._ropes = [
            RotaryEmbedding(rotation, rotation.rotated, max_positions, self.device)
            for rotation in shape.rotations
        ]
        own = shape.own_inputs
        self._own_inputs = None if own is None else OwnInputs(config, own, self._builder)
        # Rounded as the weights are: Gemma was trained so. The stream is kept divided.
        rounded = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._embedding_scale = rounded / config.residual_scale
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
            softcap=self.config.attention_softcap,
            has_sinks=self.config.sinks,
        )

    @torch.inference_mode()
    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attention: GroupedAttention
    ) -> Tensor:
        """Hidden states [T, E] after the last norm; `attention` must be planned for the step."""
        rotations = [rope.at(positions_T) for rope in self._ropes]
        x_TE = self._embedded(token_ids_T)
        own = None if self._own_inputs is None else self._own_inputs(token_ids_T, x_TE)
        for number, layer in enumerate(self._layers):
            own_TI = None if own is None else own[number]
            x_TE = layer(x_TE, rotations, attention, own_TI)
        return self._rms_norm(x_TE, self._norm_E)

    def _embedded(self, token_ids_T: Tensor) -> Tensor:
        x_TE = self._embedding.read_rows(token_ids_T)
        return x_TE if self._embedding_scale == 1.0 else x_TE.mul_(self._embedding_scale)

    @torch.inference_mode()
    def compute_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits [R, V] of the given rows of `forward`'s result, not rounded any further."""
        logits_RV = self._head.wide(hidden_RE)
        divisor, cap = self.config.logits_divisor, self.config.logits_softcap
        logits_RV = logits_RV if divisor == 1.0 else logits_RV.div_(divisor)
        return logits_RV if cap is None else logits_RV.div_(cap).tanh_().mul_(cap)
