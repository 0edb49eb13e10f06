"""The decoder of every supported family on torch, by the shapes of `models/decoder/shapes.py`.

Letters of shapes: T tokens in the step, E hidden size, F intermediate size, H query heads, K
key-value heads, D head size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from prefixcache.config.model_config import Activation, MambaConfig, ModelConfig
from prefixcache.models.arrays import Array
from prefixcache.models.decoder.parameters import Parameters
from prefixcache.models.decoder.shape_of import decoder_shape
from prefixcache.models.decoder.shapes import (
    EMBEDDING,
    OWN_EMBEDDING,
    AttentionShape,
    ConvShape,
    DenseAndExpertsShape,
    DenseShape,
    ExpertsShape,
    LayerShape,
    LinearShape,
    NormShape,
    OwnInputShape,
    OwnInputsShape,
    StateShape,
)
from prefixcache.models.names import TensorNames
from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.grouped import GroupedAttention, Rotation
from prefixcache.runner.torch.ops.arrays import dtype_name, tensor_of
from prefixcache.runner.torch.ops.delta import gated_delta_rule, mamba2
from prefixcache.runner.torch.ops.linear import TorchLinear
from prefixcache.runner.torch.ops.rope import RotaryEmbedding
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


class AttentionMixer:
    """Attention of layer `layer` over keys and values, without what `out` makes of it."""

    def __init__(
        self, config: ModelConfig, layer: int, shape: AttentionShape, builder: Builder
    ) -> None:
        self._ops = builder.ops
        self._layer = layer
        self._ropes = (shape.rope, shape.query_rope)
        self._rms_norm = _norm_of(config, builder.ops)
        self._makes = shape.makes
        of_keys = shape.kv_heads if shape.makes != "queries" else 0
        self._heads = (config.num_heads, of_keys, of_keys if shape.makes == "all" else 0)
        self._head_dim = shape.head_dim
        self._value_norm_D = 1 - config.norm_offset + builder.ops.empty(self._head_dim).zero_()
        self._has_value_norm = shape.value_norm
        self._qkv = builder.linear(shape.qkv)
        self._gates = config.num_heads if shape.gated else 0
        # One row a head, so that one call normalises the queries and the keys.
        self._qk_norm = _optional(shape.qk_norm, builder)
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
            q_THD, k_TKD = self._ops.apply_rope(qk, *of_keys).split([num_q, num_k], dim=1)
        else:
            q_THD = self._ops.apply_rope(qk[:, :num_q], *of_queries)
            k_TKD = self._ops.apply_rope(qk[:, num_q:], *of_keys)
        return attention.run(self._layer, q_THD, k_TKD, v_TKD, self._sinks_H).flatten(1)

    def _normed(self, qk_TND: Tensor, norm_ND: Tensor) -> Tensor:
        """Each head; or all queries at once, and all keys."""
        if not self._whole_norms:
            return self._rms_norm(qk_TND, norm_ND)
        sizes = list(self._heads[:2])
        parts = zip(qk_TND.split(sizes, dim=1), norm_ND.split(sizes), strict=True)
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


class DenseFeedForward:
    """An MLP, gated or not, without what `out` makes of it."""

    def __init__(self, shape: DenseShape, builder: Builder) -> None:
        self._gate = builder.gate(shape.activation)
        self._gate_up = builder.linear(shape.gate_up)
        self.out = builder.linear(shape.down)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """What `out` takes: [T, F]."""
        return self._gate(self._gate_up(x_TE))


class ExpertsFeedForward:
    """A mixture of experts, one expert after the other; see `ExpertsShape`."""

    def __init__(self, shape: ExpertsShape, builder: Builder) -> None:
        self._gate = builder.gate(shape.activation)
        self._experts = shape.experts
        bias = shape.selection_bias
        self._selection_bias_N = None if bias is None else builder.vector(bias)
        self._scales_N = None if shape.scales is None else builder.vector(shape.scales)
        self._router = builder.linear(shape.router)
        self._gate_up = builder.linear(shape.gate_up)
        self._down = builder.linear(shape.down)
        self._shared = DenseFeedForward(shape.shared, builder) if shape.shared else None
        self._shared_weight = builder.linear(shape.shared_weight) if shape.shared_weight else None

    def __call__(self, x_TE: Tensor, chosen_by_TE: Tensor | None = None) -> Tensor:
        """The weighted sum of what each token's experts make of it, [T, E] in float32.

        It is taken in the order of their scores, what the shared expert makes last. The router
        reads `chosen_by_TE` where it is given.
        """
        routed_TE = x_TE if chosen_by_TE is None else chosen_by_TE
        weights_TK, experts_TK = self._route(self._router.wide(routed_TE).float())
        count, top_k = self._experts.count, self._experts.top_k
        made_TKE = x_TE.new_empty(*experts_TK.shape, x_TE.shape[1], dtype=torch.float32)
        for expert in experts_TK.unique().tolist():
            token, rank = (experts_TK == expert).nonzero(as_tuple=True)
            gated = self._gate(self._gate_up.block(expert, count, x_TE[token]))
            made_TKE[token, rank] = self._down.block(expert, count, gated).float()
        sum_TE = torch.zeros_like(made_TKE[:, 0])
        for rank in range(top_k):
            sum_TE += made_TKE[:, rank] * weights_TK[:, rank, None]
        if self._shared is not None:
            made_TE = self._shared.out(self._shared(x_TE)).float()
            if self._shared_weight is not None:
                made_TE *= self._shared_weight.wide(x_TE).float().sigmoid()
            sum_TE += made_TE
        return sum_TE

    def _route(self, logits_TN: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, and their numbers."""
        experts = self._experts
        softmax = experts.scores == "softmax"
        scores_TN = torch.softmax(logits_TN, dim=-1) if softmax else logits_TN.sigmoid()
        bias_N = self._selection_bias_N
        compared_TN = scores_TN if bias_N is None else scores_TN + bias_N
        experts_TK = compared_TN.topk(experts.top_k, dim=-1).indices
        weights_TK = scores_TN.gather(1, experts_TK)
        if experts.renormalise:
            weights_TK /= weights_TK.sum(dim=-1, keepdim=True) + experts.added_to_sum
        weights_TK = weights_TK * experts.scale
        if self._scales_N is not None:
            weights_TK *= self._scales_N[experts_TK]
        return weights_TK, experts_TK

    @staticmethod
    def out(sum_TE: Tensor, residual_TE: Tensor | None = None) -> Tensor:
        """The sum, with the residual added, rounded once; in the type of the residual."""
        return sum_TE if residual_TE is None else (residual_TE.float() + sum_TE).to(residual_TE)


class DenseAndExperts:
    """An MLP and experts next to it; see `DenseAndExpertsShape`."""

    def __init__(self, config: ModelConfig, shape: DenseAndExpertsShape, builder: Builder) -> None:
        self._rms_norm = _norm_of(config, builder.ops)
        self._dense = DenseFeedForward(shape.dense, builder)
        self._experts = ExpertsFeedForward(shape.experts, builder)
        self._dense_norms_E = builder.norm(shape.dense_norm), builder.norm(shape.dense_out_norm)
        self._router_norm_E = builder.norm(shape.router_norm)
        self._experts_norms_E = (
            builder.norm(shape.experts_norm),
            builder.norm(shape.experts_out_norm),
        )

    def __call__(self, x_TE: Tensor) -> Tensor:
        """The sum of what both make of the stream, [T, E]."""
        before_E, after_E = self._dense_norms_E
        dense_TE = self._dense.out(self._dense(self._rms_norm(x_TE, before_E)))
        dense_TE = self._rms_norm(dense_TE, after_E)
        before_E, after_E = self._experts_norms_E
        chosen_by_TE = self._rms_norm(x_TE, self._router_norm_E)
        made_TE = self._experts(self._rms_norm(x_TE, before_E), chosen_by_TE).to(x_TE)
        return dense_TE + self._rms_norm(made_TE, after_E)

    @staticmethod
    def out(sum_TE: Tensor, residual_TE: Tensor | None = None) -> Tensor:
        """The sum, with the residual added."""
        return sum_TE if residual_TE is None else residual_TE + sum_TE


class DecoderLayer:
    """A mixer and a feed-forward, each with the norms that it has and a residual connection."""

    def __init__(
        self, config: ModelConfig, layer: int, shape: LayerShape, builder: Builder
    ) -> None:
        self._rms_norm = _norm_of(config, builder.ops)
        self._input_norm_E = _optional(shape.input_norm, builder)
        self._mixer = _mixer(config, layer, shape.mixer, builder)
        self._mixer_out_norm_E = _optional(shape.mixer_out_norm, builder)
        self._mlp_norm_E = _optional(shape.mlp_norm, builder)
        made = shape.feed_forward
        self._feed_forward = None if made is None else _feed_forward(config, made, builder)
        self._mlp_out_norm_E = _optional(shape.mlp_out_norm, builder)
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
        self._rms_norm = _norm_of(config, builder.ops)
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
        self._rms_norm = _norm_of(config, builder.ops)
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
        self._rms_norm = _norm_of(config, ops)
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


def _mixer(
    config: ModelConfig,
    layer: int,
    shape: AttentionShape | ConvShape | StateShape,
    builder: Builder,
) -> AttentionMixer | ShortConvMixer | StateMixer:
    if isinstance(shape, StateShape):
        return StateMixer(config, layer, shape, builder)
    if isinstance(shape, ConvShape):
        return ShortConvMixer(layer, shape, builder)
    return AttentionMixer(config, layer, shape, builder)


def _feed_forward(
    config: ModelConfig, shape: DenseShape | ExpertsShape | DenseAndExpertsShape, builder: Builder
) -> DenseFeedForward | ExpertsFeedForward | DenseAndExperts:
    if isinstance(shape, DenseAndExpertsShape):
        return DenseAndExperts(config, shape, builder)
    if isinstance(shape, ExpertsShape):
        return ExpertsFeedForward(shape, builder)
    return DenseFeedForward(shape, builder)


def _squared_relu(x_TF: Tensor) -> Tensor:
    return x_TF.float().relu().square().to(x_TF.dtype)


def _norm_of(config: ModelConfig, ops: Ops) -> Callable[[Tensor, Tensor], Tensor]:
    """The norm of a tensor with a weight, as all of the model's are."""
    return partial(ops.rms_norm, eps=config.stream_eps, offset=config.norm_offset)


def _optional(shape: NormShape | None, builder: Builder) -> Tensor | None:
    return None if shape is None else builder.norm(shape)


@torch.inference_mode()
def _write(target: Tensor, numbers: Array | Tensor) -> None:
    target.copy_(tensor_of(numbers))
