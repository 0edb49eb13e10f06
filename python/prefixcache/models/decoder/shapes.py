"""Shapes of linears, norms and layers.

Letters of shapes: E hidden size, F intermediate size, H query heads, K key-value heads, D head
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from prefixcache.config.model_config import Activation, DeltaConfig, ExpertsConfig, MambaConfig
from prefixcache.models.arrays import Array
from prefixcache.models.rope import Rotation

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

    It fills them alike, or with `whole_rows` with numbers for all of its rows; multiplied by
    `factor`.
    """

    width: int
    parts: Mapping[str, int]
    whole_rows: bool = False
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
        return (self.width * (self.parts[name] if self.whole_rows else 1),)


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
        shapes: dict[str, tuple[int, ...]] = {
            "conv1d.weight": (states.channels, 1, states.taps),
            "A_log": (states.value_heads,),
            "dt_bias": (states.value_heads,),
            "norm.weight": (states.value_dim if mamba is None else mamba.values,),
        }
        if mamba is not None:
            shapes |= {"conv1d.bias": (mamba.channels,)} if mamba.conv_bias else {}
            shapes["D"] = (mamba.value_heads,)
        return shapes

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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape that each of the checkpoint's tensors must have."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.head.outputs, self.head.inputs)}
        if self.own_inputs is not None:
            shapes[OWN_EMBEDDING] = (self.own_inputs.table.outputs, self.own_inputs.table.inputs)
        return shapes | dict(_tensors(self))


def _tensors(shape: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a shape and of all that it is made of, by a checkpoint's names."""
    yield from getattr(shape, "tensors", {}).items()
    parts: tuple[Any, ...] = ()
    if is_dataclass(shape):
        parts = tuple(getattr(shape, member.name) for member in fields(shape))
    elif isinstance(shape, tuple):
        parts = cast("tuple[Any, ...]", shape)
    for part in parts:
        yield from _tensors(part)
