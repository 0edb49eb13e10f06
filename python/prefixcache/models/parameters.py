"""The parameters of a decoder, by a checkpoint's names: what its linears and norms are made of.

Every runner makes a model out of these shapes in its own memory. Letters of shapes: E hidden size,
F intermediate size, H query heads, K key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from prefixcache.config.families import FAMILIES
from prefixcache.config.model_config import (
    Activation,
    DeltaConfig,
    ExpertsConfig,
    MambaConfig,
    ModelConfig,
)
from prefixcache.models.arrays import Array, given_array
from prefixcache.models.quantized import QuantizedTensor
from prefixcache.models.rope import Rotation
from prefixcache.models.weights import Slot

EMBEDDING = "model.embed_tokens.weight"
OWN_EMBEDDING = "model.embed_tokens_per_layer.weight"

Makes: TypeAlias = Literal["all", "queries_and_keys", "queries"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Outputs that a checkpoint has in `groups`, each of one piece of each of these `sizes`.

    Here pieces of a kind stand together, the kinds in this `order`.
    """

    groups: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def rows(self) -> Array:
        """The output in a checkpoint that each is here."""
        starts = list(accumulate(self.sizes, initial=0))
        outputs = np.arange(self.groups * starts[-1]).reshape(self.groups, -1)
        return np.concatenate([outputs[:, starts[i] : starts[i + 1]].ravel() for i in self.order])


@dataclass(frozen=True, slots=True)
class PairedHeads:
    """Outputs of `heads`, each with the pairs of its first `rotated` numbers next to each other.

    Here the second number of a pair is half of these behind the first.
    """

    heads: int
    head_dim: int
    rotated: int

    @property
    def rows(self) -> Array:
        """The output in a checkpoint that each is here."""
        numbers = np.arange(self.rotated).reshape(-1, 2).T.ravel()
        head = np.concatenate([numbers, np.arange(self.rotated, self.head_dim)])
        return (np.arange(self.heads)[:, None] * self.head_dim + head).ravel()


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer that is fused of projections: their names, and how many outputs each has.

    `pieces` are those of projections whose outputs a checkpoint has in another order.
    """

    inputs: int
    parts: Mapping[str, int]
    bias: bool = False
    pieces: Mapping[str, Pieces | PairedHeads] = field(default_factory=dict[str, Any])

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a checkpoint's tensors; none of a table that goes without a name."""
        named = {name: rows for name, rows in self.parts.items() if name}
        biases = {f"{name}.bias": (rows,) for name, rows in named.items() if self.bias}
        return {f"{name}.weight": (rows, self.inputs) for name, rows in named.items()} | biases

    @property
    def outputs(self) -> int:
        """Outputs of all parts."""
        return sum(self.parts.values())

    @property
    def starts(self) -> Mapping[str, int]:
        """The first output of each part."""
        return dict(zip(self.parts, accumulate(self.parts.values(), initial=0), strict=False))


@dataclass(frozen=True, slots=True)
class NormShape:
    """The weight of a norm: rows of `width` numbers, of which the `tensor` of each name fills some.

    It fills them alike, or `whole`: with numbers for all of its rows; multiplied by `factor`.
    """

    width: int
    parts: Mapping[str, int]
    whole: bool = False
    tensor: str = "weight"
    factor: float = 1.0

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a checkpoint's tensors."""
        return {f"{name}.{self.tensor}": self.shape(name) for name in self.parts}

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(self.parts.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """That of the tensor of this name."""
        return (self.width * (self.parts[name] if self.whole else 1),)


@dataclass(frozen=True, slots=True)
class VectorShape:
    """A tensor of `width` numbers, which are kept in float32."""

    name: str
    width: int

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of the checkpoint's tensor."""
        return {self.name: (self.width,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention over keys and values.

    `qkv` makes all of queries, keys and values, or queries and keys, of which values are made too,
    or queries alone: keys and values are then those of an earlier layer. `qk_norm` has a row for
    each query and key head [H + K, D], of which those of queries share a mean square, and those of
    keys, where it is whole; with `value_norm` each head of values is normalised, without a weight.
    `rope` is the number of the keys' rotation among the model's, `query_rope` that of the queries'.
    `sinks` names a number for each query head, where there are some. Where it
    is `gated`, `qkv` makes a gate for each number that heads make, before the queries, whose
    sigmoid multiplies that number.
    """

    kv_heads: int
    head_dim: int
    qkv: LinearShape
    makes: Makes
    gated: bool
    qk_norm: NormShape | None
    value_norm: bool
    sinks: VectorShape | None
    out: LinearShape
    rope: int
    query_rope: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedShape:
    """What a mixer between two linears has, whose own tensors begin with `name`."""

    in_proj: LinearShape
    name: str
    out: LinearShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape(ProjectedShape):
    """A convolution over the last `taps` tokens, each of E channels alone.

    `in_proj` makes a token's gates B and C, and x.
    """

    taps: int
    bias: bool

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a checkpoint's tensors of the convolution itself."""
        channels = self.out.inputs
        bias = {f"{self.name}.bias": (channels,)} if self.bias else {}
        return {f"{self.name}.weight": (channels, 1, self.taps)} | bias


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape(ProjectedShape):
    """The gated delta rule or Mamba-2: see `StateConfig`.

    `in_proj` makes a token's queries, keys and values, z, b of the delta rule, and a. The tensors
    of the rule itself are kept in float32.
    """

    states: DeltaConfig | MambaConfig

    @property
    def mamba(self) -> MambaConfig | None:
        """The recurrence, where it is Mamba-2."""
        return self.states if isinstance(self.states, MambaConfig) else None

    @property
    def channels(self) -> Pieces | None:
        """Where a checkpoint has another order of them: values, keys and queries."""
        if self.mamba is None:
            return None
        keys = self.mamba.key_heads * self.mamba.key_dim
        return Pieces(1, (self.mamba.values, keys, keys), (2, 1, 0))

    @property
    def own(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the rule's tensors, whose names go without the mixer's."""
        states, mamba = self.states, self.mamba
        found: dict[str, tuple[int, ...]] = {
            "conv1d.weight": (states.channels, 1, states.taps),
            "A_log": (states.value_heads,),
            "dt_bias": (states.value_heads,),
            "norm.weight": (states.value_dim if mamba is None else mamba.values,),
        }
        if mamba is not None:
            found |= {"conv1d.bias": (mamba.channels,)} if mamba.conv_bias else {}
            found["D"] = (mamba.value_heads,)
        return found

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a checkpoint's tensors of the rule."""
        return {f"{self.name}.{name}": shape for name, shape in self.own.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseShape:
    """An MLP: `gate_up` has the gates, if it is gated, then what they let pass."""

    gate_up: LinearShape
    down: LinearShape
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Gated MLPs of which `router` chooses `top_k` for each token: see `ExpertsConfig`.

    `scales` are what weights are multiplied by, a number an expert. `gate_up` has for each expert
    its gates and what they let pass, `down` a part an expert. All tokens go through `shared` too,
    which the sigmoid of what `shared_weight` makes weighs.
    """

    router: LinearShape
    selection_bias: VectorShape | None
    scales: VectorShape | None
    gate_up: LinearShape
    down: LinearShape
    activation: Activation
    experts: ExpertsConfig
    shared: DenseShape | None
    shared_weight: LinearShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAndExpertsShape:
    """An MLP and experts next to it, whose results are added.

    Norms are of what the MLP, the router and the experts read of the stream, and of what the MLP
    and the experts make.
    """

    dense_norm: NormShape
    dense: DenseShape
    dense_out_norm: NormShape
    router_norm: NormShape
    experts_norm: NormShape
    experts: ExpertsShape
    experts_out_norm: NormShape


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInputShape:
    """What takes a layer's own input of I numbers into the stream.

    `gate` makes gates of the stream, `out` and `norm` what is added of what they let pass.
    """

    gate: LinearShape
    activation: Activation
    out: LinearShape
    norm: NormShape


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInputsShape:
    """Where the layers' own inputs come from: L * I numbers of a token, layer by layer.

    They are the sum of a row of `table`, scaled by the root of I, and of what `projection` makes of
    the token's embedding, normalised by layer, over the root of 2.
    """

    table: LinearShape
    projection: LinearShape
    norm: NormShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A mixer, then a feed-forward if any, each with a residual connection; then its own input.

    In the end the stream is multiplied by `scale`, where there is one. Where there are norms,
    `input_norm` and `mlp_norm` are of what the two read, `mixer_out_norm` and `mlp_out_norm` of
    what they add to the residual.
    """

    input_norm: NormShape | None
    mixer: AttentionShape | ConvShape | StateShape
    mixer_out_norm: NormShape | None
    mlp_norm: NormShape | None
    feed_forward: DenseShape | ExpertsShape | DenseAndExpertsShape | None
    mlp_out_norm: NormShape | None
    own_input: OwnInputShape | None
    scale: VectorShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """All parameters of a model. `head` has no name where it is tied to the embedding."""

    layers: tuple[LayerShape, ...]
    rotations: tuple[Rotation, ...]
    own_inputs: OwnInputsShape | None
    norm: NormShape
    head: LinearShape

    @classmethod
    def of(cls, config: ModelConfig) -> DecoderShape:
        """The shape of the model that the config describes."""
        name = "" if config.tie_word_embeddings else "lm_head"
        turns = [_rotations_of(config, layer) for layer in range(config.num_layers)]
        rotations = tuple(dict.fromkeys(rotation for both in turns for rotation in both))
        numbers = [tuple(map(rotations.index, both)) for both in turns]
        return cls(
            layers=tuple(_layer(config, layer, ropes) for layer, ropes in enumerate(numbers)),
            rotations=rotations,
            own_inputs=_own_inputs(config) if config.own_input_size else None,
            norm=NormShape(config.hidden_size, {f"model.{_names(config)['norm']}": 1}),
            head=LinearShape(config.hidden_size, {name: config.vocab_size}),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape that each of the checkpoint's tensors must have."""
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.head.outputs, self.head.inputs)}
        if self.own_inputs is not None:
            found[OWN_EMBEDDING] = (self.own_inputs.table.outputs, self.own_inputs.table.inputs)
        return found | dict(_tensors(self))


def _tensors(shape: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a shape and of all that it is made of, by a checkpoint's names."""
    yield from getattr(shape, "tensors", {}).items()
    parts: tuple[Any, ...] = shape if isinstance(shape, tuple) else ()
    if is_dataclass(shape):
        parts = tuple(getattr(shape, one.name) for one in fields(shape))
    for part in parts:
        yield from _tensors(part)


def _layer(config: ModelConfig, layer: int, ropes: tuple[int, ...]) -> LayerShape:
    number, has_mlp = _number(config, layer), layer not in config.bare_layers
    prefix = mlp_prefix = f"model.layers.{number}"
    if FAMILIES[config.architecture].lone_parts:
        mlp_prefix = f"model.layers.{number + 1}"

    def norm(name: str, prefix: str = prefix) -> NormShape:
        return NormShape(config.hidden_size, {f"{prefix}.{name}": 1})

    # "post-attention" is another norm where there are four.
    sandwich, names = config.sandwich_norms, _names(config)
    feed_forward = _feed_forward(config, layer, mlp_prefix) if has_mlp else None
    reads_normed = config.input_norms and isinstance(feed_forward, DenseShape | ExpertsShape)
    mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    return LayerShape(
        input_norm=norm(names["input_norm"]) if config.input_norms else None,
        mixer=_mixer(config, layer, prefix, ropes),
        mixer_out_norm=norm("post_attention_layernorm") if sandwich else None,
        mlp_norm=norm(names.get("mlp_norm", mlp_norm), mlp_prefix) if reads_normed else None,
        feed_forward=feed_forward,
        mlp_out_norm=norm("post_feedforward_layernorm") if sandwich else None,
        own_input=_own_input(config, prefix) if config.own_input_size else None,
        scale=VectorShape(f"{prefix}.layer_scalar", 1) if config.layer_scales else None,
    )


def _number(config: ModelConfig, layer: int) -> int:
    """The layer's in a checkpoint, where MLPs may be layers too."""
    if not FAMILIES[config.architecture].lone_parts:
        return layer
    return layer + sum(before not in config.bare_layers for before in range(layer))


def _own_input(config: ModelConfig, prefix: str) -> OwnInputShape:
    hidden, size = config.hidden_size, config.own_input_size
    return OwnInputShape(
        gate=LinearShape(hidden, {f"{prefix}.per_layer_input_gate": size}),
        activation=config.activation,
        out=LinearShape(size, {f"{prefix}.per_layer_projection": hidden}),
        norm=NormShape(hidden, {f"{prefix}.post_per_layer_input_norm": 1}),
    )


def _own_inputs(config: ModelConfig) -> OwnInputsShape:
    hidden, size = config.hidden_size, config.own_input_size
    width = config.num_layers * size
    return OwnInputsShape(
        table=LinearShape(width, {"": config.own_input_vocab_size}),
        projection=LinearShape(hidden, {"model.per_layer_model_projection": width}),
        norm=NormShape(size, {"model.per_layer_projection_norm": 1}),
    )


def _mixer(
    config: ModelConfig, layer: int, prefix: str, ropes: tuple[int, ...]
) -> AttentionShape | ConvShape | StateShape:
    if layer in config.conv_layers:
        return _conv(config, prefix)
    if config.delta is not None and layer in config.delta.layers:
        return _delta(config, config.delta, f"{prefix}.linear_attn")
    if config.mamba is not None and layer in config.mamba.layers:
        return _mamba(config, config.mamba, f"{prefix}.{_names(config)['mamba']}")
    return _attention(config, layer, prefix, ropes)


def _names(config: ModelConfig) -> Mapping[str, str]:
    return FAMILIES[config.architecture].modules


def _makes(config: ModelConfig, layer: int) -> Makes:
    if config.kv_owner(layer) != layer:
        return "queries"
    keys_as_values = config.keys_as_values and config.window_of(layer) is None
    return "queries_and_keys" if keys_as_values else "all"


def _attention(
    config: ModelConfig, layer: int, prefix: str, ropes: tuple[int, ...]
) -> AttentionShape:
    heads, (kv_heads, head_dim) = config.num_heads, config.heads_of(config.window_of(layer))
    makes = _makes(config, layer)
    parts = {"all": "qkv", "queries_and_keys": "qk", "queries": "q"}[makes]
    counts = {one: heads if one == "q" else kv_heads for one in parts}
    hidden, names = config.hidden_size, _names(config)
    base = f"{prefix}.{names['attention']}"
    pieces: dict[str, Pieces | PairedHeads] = {}
    if FAMILIES[config.architecture].pairs_heads:
        rotated = config.rope_of(config.window_of(layer)).rotated_of(head_dim)
        for one in "qk":
            pieces[f"{base}.{one}_proj"] = PairedHeads(counts[one], head_dim, rotated)
    if config.output_gate:
        counts["q"] += heads
        pieces[f"{base}.q_proj"] = Pieces(heads, (head_dim, head_dim), (1, 0))
    qkv = {f"{base}.{one}_proj": count * head_dim for one, count in counts.items()}
    if "qkv" in names:
        qkv = {f"{prefix}.{names['qkv']}": sum(qkv.values())}
    q_norm = f"{prefix}.{names['q_norm']}"
    k_norm = f"{prefix}.{names['k_norm']}"
    out = f"{prefix}.{names['out']}"
    normed = {q_norm: heads} | ({} if makes == "queries" else {k_norm: kv_heads})
    return AttentionShape(
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv=LinearShape(hidden, qkv, config.qkv_bias, pieces),
        makes=makes,
        gated=config.output_gate,
        qk_norm=NormShape(head_dim, normed, whole=config.whole_qk_norms)
        if config.qk_norm
        else None,
        value_norm=config.value_norms and makes != "queries",
        sinks=VectorShape(f"{prefix}.self_attn.sinks", heads) if config.sinks else None,
        out=LinearShape(heads * head_dim, {out: hidden}, config.output_bias),
        rope=ropes[0],
        query_rope=ropes[1],
    )


def _conv(config: ModelConfig, prefix: str) -> ConvShape:
    hidden, bias = config.hidden_size, config.conv_bias
    return ConvShape(
        in_proj=LinearShape(hidden, {f"{prefix}.conv.in_proj": 3 * hidden}, bias),
        name=f"{prefix}.conv.conv",
        taps=config.conv_taps,
        bias=bias,
        out=LinearShape(hidden, {f"{prefix}.conv.out_proj": hidden}, bias),
    )


def _delta(config: ModelConfig, delta: DeltaConfig, name: str) -> StateShape:
    heads, each = delta.key_heads, delta.value_heads // delta.key_heads
    outputs = {"qkv": delta.channels, "z": delta.values}
    pieces: dict[str, Pieces] = {}
    if delta.by_key_head and not delta.qkvz_apart:
        outputs = {"qkvz": delta.channels + delta.values}
        qkvz = (delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim)
        pieces[f"{name}.in_proj_qkvz"] = Pieces(heads, qkvz, (0, 1, 2, 3))
    if delta.by_key_head:
        outputs |= {"ba": 2 * delta.value_heads}
        pieces[f"{name}.in_proj_ba"] = Pieces(heads, (each, each), (0, 1))
    else:
        outputs |= dict.fromkeys("ba", delta.value_heads)
    parts = {f"{name}.in_proj_{part}": count for part, count in outputs.items()}
    return StateShape(
        in_proj=LinearShape(config.hidden_size, parts, pieces=pieces),
        name=name,
        states=delta,
        out=LinearShape(delta.values, {f"{name}.out_proj": config.hidden_size}),
    )


def _mamba(config: ModelConfig, mamba: MambaConfig, name: str) -> StateShape:
    keys, heads, values = mamba.key_heads * mamba.key_dim, mamba.value_heads, mamba.values
    # z, x, B, C and dt, which here are C, B, x, z and dt.
    pieces = Pieces(1, (values, values, keys, keys, heads), (3, 2, 1, 0, 4))
    in_proj, hidden = f"{name}.in_proj", config.hidden_size
    outputs = {in_proj: sum(pieces.sizes)}
    return StateShape(
        in_proj=LinearShape(hidden, outputs, mamba.bias, {in_proj: pieces}),
        name=name,
        states=mamba,
        out=LinearShape(values, {f"{name}.out_proj": hidden}, mamba.bias),
    )


def _feed_forward(
    config: ModelConfig, layer: int, prefix: str
) -> DenseShape | ExpertsShape | DenseAndExpertsShape:
    experts, size = config.experts, config.intermediate_size
    if config.kv_owner(layer) != layer:
        size = config.reader_intermediate_size or size
    if experts is None or layer in experts.dense_layers:
        return _dense(config, prefix, size, _names(config))
    if experts.next_to_mlp:
        return _dense_and_experts(config, experts, prefix, size)
    return _experts(config, experts, prefix)


def _dense_and_experts(
    config: ModelConfig, experts: ExpertsConfig, prefix: str, size: int
) -> DenseAndExpertsShape:
    hidden = config.hidden_size
    before, after = f"{prefix}.pre_feedforward_layernorm", f"{prefix}.post_feedforward_layernorm"
    return DenseAndExpertsShape(
        dense_norm=NormShape(hidden, {before: 1}),
        dense=_dense(config, prefix, size, _names(config)),
        dense_out_norm=NormShape(hidden, {f"{after}_1": 1}),
        router_norm=NormShape(hidden, {f"{prefix}.router": 1}, tensor="scale", factor=hidden**-0.5),
        experts_norm=NormShape(hidden, {f"{before}_2": 1}),
        experts=_experts(config, experts, prefix),
        experts_out_norm=NormShape(hidden, {f"{after}_2": 1}),
    )


def _experts(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> ExpertsShape:
    hidden, size, names = config.hidden_size, experts.intermediate_size, _names(config)
    router = f"{prefix}.{names['router']}"
    base = f"{prefix}.{names['experts']}"
    each = [f"{base}.{i}" for i in range(experts.count)]
    gate, up, down = (names[part].rpartition(".")[2] for part in ("gate", "up", "down"))
    bias = VectorShape(f"{prefix}.{names.get('selection_bias', '')}", experts.count)
    scales = VectorShape(f"{prefix}.router.per_expert_scale", experts.count)
    shared = names["shared"]
    of_shared = {part: f"{shared}.{part}_proj" for part in ("gate", "up", "down")}
    weight = LinearShape(hidden, {f"{prefix}.{shared}_gate": 1})
    return ExpertsShape(
        router=LinearShape(hidden, {router: experts.count}, experts.router_bias),
        selection_bias=bias if experts.selection_bias else None,
        scales=scales if experts.next_to_mlp else None,
        gate_up=LinearShape(
            hidden, {f"{one}.{part}": size for one in each for part in (gate, up)}, config.mlp_bias
        ),
        down=LinearShape(size, {f"{one}.{down}": hidden for one in each}, config.mlp_bias),
        activation=config.activation,
        experts=experts,
        shared=_dense(config, prefix, experts.shared_size, of_shared)
        if experts.shared_size
        else None,
        shared_weight=weight if experts.shared_weight else None,
    )


def _dense(config: ModelConfig, prefix: str, size: int, names: Mapping[str, str]) -> DenseShape:
    hidden = config.hidden_size
    down = f"{prefix}.{names['down']}"
    return DenseShape(
        gate_up=LinearShape(
            hidden,
            _gate_up(prefix, names, size, is_gated=config.activation != "squared_relu"),
            config.mlp_bias,
        ),
        down=LinearShape(size, {down: hidden}, config.mlp_bias),
        activation=config.activation,
    )


def _gate_up(prefix: str, names: Mapping[str, str], size: int, *, is_gated: bool) -> dict[str, int]:
    """One tensor where it has a name, else two."""
    if "gate_up" in names:
        return {f"{prefix}.{names['gate_up']}": 2 * size}
    parts = [names[part] for part in ("gate", "up")]
    return {f"{prefix}.{part}": size for part in (parts if is_gated else parts[1:])}


def _rotations_of(config: ModelConfig, layer: int) -> tuple[Rotation, Rotation]:
    """Those of a layer's keys and of its queries."""
    window = config.window_of(layer)
    rope = config.rope_of(window)
    rotated = rope.rotated_of(config.heads_of(window)[1])
    if layer in config.unrotated_layers:
        return Rotation(None, rotated=rotated), Rotation(None, rotated=rotated)
    return Rotation(rope, rotated=rotated), Rotation(rope, config.query_growth, rotated)


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
    return np.array([math.exp(float(one)) for one in numbers]).astype(np.float32)


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
    if shape.whole:
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
