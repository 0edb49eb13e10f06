"""What mixes the tokens of a layer: attention, a convolution, a recurrence.

Letters of shapes: as in `decoder_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache.config.model_config import MambaConfig, ModelConfig
from prefixcache.models.decoder.shapes import AttentionShape, ConvShape, StateShape
from prefixcache.runner.torch.attention.grouped import GroupedAttention, Rotation
from prefixcache.runner.torch.decoder.builder import Builder, norm_of, optional_norm
from prefixcache.runner.torch.ops.delta import gated_delta_rule, mamba2
from prefixcache.runner.torch.typed import split


class AttentionMixer:
    """Attention of layer `layer` over keys and values, without what `out` makes of it."""

    def __init__(
        self, config: ModelConfig, layer: int, shape: AttentionShape, builder: Builder
    ) -> None:
        self._ops = builder.ops
        self._layer = layer
        self._ropes = (shape.rope, shape.query_rope)
        self._rms_norm = norm_of(config, builder.ops)
        self._makes = shape.makes
        of_keys = shape.kv_heads if shape.makes != "queries" else 0
        self._heads = (config.num_heads, of_keys, of_keys if shape.makes == "all" else 0)
        self._head_dim = shape.head_dim
        self._value_norm_D = 1 - config.norm_offset + builder.ops.empty(self._head_dim).zero_()
        self._has_value_norm = shape.value_norm
        self._qkv = builder.linear(shape.qkv)
        self._gates = config.num_heads if shape.gated else 0
        # One row a head, so that one call normalises the queries and the keys.
        self._qk_norm = optional_norm(shape.qk_norm, builder)
        self._whole_norms = shape.qk_norm is not None and shape.qk_norm.whole_rows
        self._sinks_H = builder.vector(shape.sinks) if shape.sinks else None
        self.out = builder.linear(shape.out)

    def __call__(
        self, x_TE: Tensor, rotations: Sequence[Rotation], attention: GroupedAttention
    ) -> Tensor:
        """What `out` takes; the rotations hold the cosines and sines of the step's positions."""
        qkv = self._qkv(x_TE).view(-1, self._gates + sum(self._heads), self._head_dim)
        gates_THD, qkv = qkv[:, : self._gates], qkv[:, self._gates :]
        attended_TI = self._attended(qkv, rotations, attention)
        if not self._gates:
            return attended_TI
        return (attended_TI.float() * gates_THD.flatten(1).float().sigmoid()).to(attended_TI)

    def _attended(
        self, qkv: Tensor, rotations: Sequence[Rotation], attention: GroupedAttention
    ) -> Tensor:
        num_q, num_k, _ = self._heads
        qk, v_TKD = qkv[:, : num_q + num_k], qkv[:, num_q + num_k :]
        if self._makes == "queries_and_keys":
            v_TKD = qk[:, num_q:]
        if self._has_value_norm:
            v_TKD = self._rms_norm(v_TKD, self._value_norm_D)
        if self._qk_norm is not None:
            qk = self._normed(qk, self._qk_norm)
        of_keys, of_queries = (rotations[rope] for rope in self._ropes)
        if self._makes == "queries":
            q_THD = self._ops.apply_rope(qk, *of_queries)
            return attention.run(self._layer, q_THD, None, None, self._sinks_H).flatten(1)
        if of_keys is of_queries and attention.rotate_and_run is not None:
            return attention.rotate_and_run(self._layer, qk, v_TKD, of_keys).flatten(1)
        if of_keys is of_queries:
            q_THD, k_TKD = split(self._ops.apply_rope(qk, *of_keys), [num_q, num_k], 1)
        else:
            q_THD = self._ops.apply_rope(qk[:, :num_q], *of_queries)
            k_TKD = self._ops.apply_rope(qk[:, num_q:], *of_keys)
        return attention.run(self._layer, q_THD, k_TKD, v_TKD, self._sinks_H).flatten(1)

    def _normed(self, qk_TND: Tensor, norm_ND: Tensor) -> Tensor:
        """Each head; or all queries at once, and all keys."""
        if not self._whole_norms:
            return self._rms_norm(qk_TND, norm_ND)
        sizes = list(self._heads[:2])
        parts = zip(split(qk_TND, sizes, 1), split(norm_ND, sizes), strict=True)
        normed = [self._rms_norm(x.flatten(1), norm.flatten()).view(x.shape) for x, norm in parts]
        return torch.cat(normed, dim=1)


class ShortConvMixer:
    """A convolution of layer `layer` over the last tokens, without what `out` makes of it."""

    def __init__(self, layer: int, shape: ConvShape, builder: Builder) -> None:
        self._layer = layer
        self._in_proj = builder.linear(shape.in_proj)
        self._weight_LE, self._bias_E = builder.conv(shape)
        self.out = builder.linear(shape.out)

    def __call__(
        self, x_TE: Tensor, _rotations: Sequence[Rotation], attention: GroupedAttention
    ) -> Tensor:
        """What `out` takes: [T, E]."""
        b_TE, c_TE, x_TE = self._in_proj(x_TE).chunk(3, dim=-1)
        sums_TE = attention.convolve(self._layer, b_TE * x_TE, self._weight_LE, self._bias_E)
        return (c_TE.float() * sums_TE).to(c_TE.dtype)


class StateMixer:
    """The gated delta rule or Mamba-2 of layer `layer`, without what `out` makes of it."""

    def __init__(
        self, config: ModelConfig, layer: int, shape: StateShape, builder: Builder
    ) -> None:
        self._layer = layer
        self._states = shape.states
        self._eps = config.rms_norm_eps
        self._in_proj = builder.linear(shape.in_proj)
        self._weights = builder.states(shape)
        self.out = builder.linear(shape.out)

    def __call__(
        self, x_TE: Tensor, _rotations: Sequence[Rotation], attention: GroupedAttention
    ) -> Tensor:
        """What `out` takes: the values of all heads."""
        inputs_TI = self._in_proj(x_TE).float()
        states = self._states
        read_TV = inputs_TI.new_empty(len(x_TE), states.values)

        def compute(rows: slice, state: Tensor) -> None:
            given = (self._weights, self._eps, inputs_TI[rows], state)
            if isinstance(states, MambaConfig):
                read_TV[rows] = mamba2(states, *given)
            else:
                read_TV[rows] = gated_delta_rule(states, *given)

        attention.recur(self._layer, compute)
        return read_TV.to(x_TE.dtype)


def mixer_of(
    config: ModelConfig,
    layer: int,
    shape: AttentionShape | ConvShape | StateShape,
    builder: Builder,
) -> AttentionMixer | ShortConvMixer | StateMixer:
    """The mixer of layer `layer`."""
    if isinstance(shape, StateShape):
        return StateMixer(config, layer, shape, builder)
    if isinstance(shape, ConvShape):
        return ShortConvMixer(layer, shape, builder)
    return AttentionMixer(config, layer, shape, builder)
