"""A model's shape: sizes, rotary embedding, and in what families differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from prefixcache.config.checked import Checked, Count, PositiveFloat, PositiveInt, hints
from prefixcache.config.families import FAMILIES
from prefixcache.config.generation_fields import not_obeyed
from prefixcache.config.hf_config import (
    read_fields,
    read_hf_config,
    supported_architecture,
    token_ids,
)
from prefixcache.config.hf_fields import FULL, SLIDING, NumLayers, TokenId
from prefixcache.config.rope_config import RopeConfig, rope_of
from prefixcache.exceptions import ConfigError, FieldError, ModelLoadError

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "squared_relu"]

# Tokens that a convolution of the kernels is made of, at most.
_MAX_TAPS = 8
# Heads of the kernel of states are multiples of this, and as many of Mamba-2 are computed together.
_HEAD_STEP = 16
_MAMBA_RUN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(Checked):
    """The experts of a layer: `count` gated MLPs, of which each token goes through `top_k`."""

    count: PositiveInt
    top_k: PositiveInt
    intermediate_size: PositiveInt
    # A token's experts have the highest scores: the softmax of the router's logits, or the sigmoid
    # of each. A number of each expert may be added before scores are compared.
    scores: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    # Whether scores are divided by their sum plus `added_to_sum` before they weigh what the experts
    # make, times `scale`.
    renormalise: bool = False
    added_to_sum: float = 0.0
    scale: PositiveFloat = 1.0
    # Whether the router has a bias; `mlp_bias` of `ModelConfig` says whether experts have.
    router_bias: bool = False
    # Of an MLP that all tokens go through too, and whether the sigmoid of a linear weighs it.
    shared_size: Count = 0
    shared_weight: bool = False
    # Those with one MLP in place of experts.
    dense_layers: tuple[Count, ...] = ()
    # Whether layers have both: each reads the stream through a norm of its own, and its result is
    # normalised before they are added; the router has a norm too, and each expert a scale.
    next_to_mlp: bool = False

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.top_k > self.count:
            raise FieldError("top_k", f"must be at most {self.count} (count), got {self.top_k}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig(Checked):
    """A recurrence of `layers`, in the place of attention.

    `value_heads` heads of `value_dim` numbers share `key_heads` heads of queries and keys of
    `key_dim` numbers, neighbours one. All pass a convolution over the last `taps` tokens first.
    """

    layers: tuple[Count, ...]
    key_heads: PositiveInt
    value_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    taps: PositiveInt

    def check_together(self) -> None:
        """Raises `FieldError`."""
        self._check_multiple("value_heads", self.key_heads, " (key_heads)")
        for name in ("key_dim", "value_dim"):
            self._check_multiple(name, _HEAD_STEP)
        if self.taps > _MAX_TAPS:
            raise FieldError("taps", f"must be at most {_MAX_TAPS}, got {self.taps}.")

    def _check_multiple(self, name: str, of: int, named: str = "") -> None:
        if getattr(self, name) % of:
            raise FieldError(name, f"must be a multiple of {of}{named}, got {getattr(self, name)}.")

    @property
    def alike(self) -> int:
        """Parts that a key head's value heads are computed in, each with queries and keys."""
        return 1

    @property
    def channels(self) -> int:
        """Numbers of a token that pass the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of a token's values."""
        return self.value_heads * self.value_dim

    @property
    def state_numbers(self) -> int:
        """Numbers of a layer's state: its matrices, and what the convolution needs of tokens.

        Each part of a key head's value heads has a copy of what it needs of queries and keys.
        """
        kept = 2 * self.alike * self.key_heads * self.key_dim + self.values
        return self.values * self.key_dim + (self.taps - 1) * kept


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig(StateConfig):
    """The gated delta rule.

    Value heads of a key head are `key_heads` apart where they are `tiled`. `by_key_head` says that
    checkpoints have all that is of a key head together: b and a, and without `qkvz_apart` the
    others too.
    """

    tiled: bool = False
    by_key_head: bool = False
    qkvz_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(StateConfig):
    """Mamba-2, whose x are the values, B the keys and C the queries.

    `conv_bias` says whether the convolution has a bias, `bias` whether the linears around have one.
    """

    conv_bias: bool = True
    bias: bool = False

    @property
    def alike(self) -> int:
        """As many parts as have at most 8 value heads, all of them the same number."""
        heads = self.value_heads // self.key_heads
        return heads // max(n for n in range(1, _MAMBA_RUN + 1) if heads % n == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults(Checked):
    """Sampling values a model's authors recommend; None where they say nothing.

    Tokens of `suppress_tokens` are never sampled, those of `begin_suppress_tokens` not as the first
    of an answer, whatever a request asks for. `not_obeyed` names the fields that the authors set
    and that act in no request.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: TokenId | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: TokenId | None = None
    suppress_tokens: tuple[TokenId, ...] = ()
    begin_suppress_tokens: tuple[TokenId, ...] = ()
    not_obeyed: tuple[str, ...] = ()

    def sampling_options(self) -> dict[str, Any]:
        """Those values that are given, by their names in `SamplingParams`; not the length."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Checked):
    """The shape of a decoder of the Llama family, and the flags in which its members differ."""

    architecture: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    # Of the one MLP that layers have where there are no experts.
    intermediate_size: PositiveInt
    num_layers: NumLayers
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    # Which linears carry a bias.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # Whether each query and key head is RMS-normalised before rotation. With `whole_qk_norms` all
    # queries of a token are at once, and all keys.
    qk_norm: bool = False
    # Of each layer, how many of the last tokens a token sees, itself among them, or None for all;
    # with no entries every layer sees all. Of layers without attention they say nothing.
    layer_windows: tuple[PositiveInt | None, ...] = ()
    # What layers with a window rotate by, where it is not `rope`.
    local_rope: RopeConfig | None = None
    unrotated_layers: tuple[Count, ...] = ()
    # Those with a short convolution over the last `conv_taps` tokens in the place of attention.
    conv_layers: tuple[Count, ...] = ()
    conv_taps: Count = 0
    conv_bias: bool = False
    # A recurrence in the place of attention: one of them at most.
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    # Those without an MLP.
    bare_layers: tuple[Count, ...] = ()
    # Norms multiply by their weight plus this.
    norm_offset: float = 0.0
    # Whether what attention and MLP add is normalised, and what they read.
    sandwich_norms: bool = False
    input_norms: bool = True
    # An MLP of "squared_relu" has no gates.
    activation: Activation = "silu"
    # What embeddings are multiplied by, rounded to their type.
    embedding_scale: PositiveFloat = 1.0
    # What dot products of queries and keys are multiplied by, None for `head_dim ** -0.5`. Products
    # x become `attention_softcap` * tanh(x / `attention_softcap`), where it is given.
    attention_scale: PositiveFloat | None = None
    attention_softcap: PositiveFloat | None = None
    # Queries are scaled by 1 + this * ln(1 + position // the rope's `original_max_position`).
    query_growth: float = 0.0
    whole_qk_norms: bool = False
    # Whether each head has one more score, without a value.
    sinks: bool = False
    # Whether what heads make is multiplied by the sigmoid of gates, which come with the queries.
    output_gate: bool = False
    experts: ExpertsConfig | None = None
    # Of layers without a window, where they differ.
    full_kv_heads: PositiveInt | None = None
    full_head_dim: PositiveInt | None = None
    # Whether values are the keys before norm and rotation in layers without a window.
    keys_as_values: bool = False
    # Whether each head of values is normalised.
    value_norms: bool = False
    # That many last layers read the keys and values of the last layer before them with the same
    # window; their MLP may have another size.
    num_kv_readers: Count = 0
    reader_intermediate_size: PositiveInt | None = None
    # Numbers of a token that each layer has of its own, from a table of that many tokens.
    own_input_size: Count = 0
    own_input_vocab_size: Count = 0
    # Whether each layer multiplies the stream by a number in the end.
    layer_scales: bool = False
    # Logits x become `logits_softcap` * tanh(x / `logits_softcap`), where it is given.
    logits_softcap: PositiveFloat | None = None
    # What layers add to the stream is multiplied by this.
    residual_scale: PositiveFloat = 1.0
    logits_divisor: PositiveFloat = 1.0
    tie_word_embeddings: bool = False
    # The type that the weights were saved in, None where the checkpoint does not say.
    checkpoint_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def check_together(self) -> None:
        """Raises `ConfigError`."""
        supported_architecture([self.architecture])
        for kv_heads in (self.num_kv_heads, self.full_kv_heads or self.num_kv_heads):
            if self.num_heads % kv_heads:
                raise ConfigError(
                    f"num_attention_heads ({self.num_heads}) must be a multiple of "
                    f"num_key_value_heads ({kv_heads})."
                )
        if len(self.layer_windows) not in (0, self.num_layers):
            raise FieldError(
                "layer_windows",
                f"must have an entry for each of {self.num_layers} layers, "
                f"got {len(self.layer_windows)}.",
            )
        if self.conv_layers and not 1 <= self.conv_taps <= _MAX_TAPS:
            raise FieldError("conv_taps", f"must be from 1 to {_MAX_TAPS}, got {self.conv_taps}.")
        for name, layers in (("conv_layers", self.conv_layers), ("layers", self.state_layers)):
            if len(layers) >= self.num_layers:
                raise FieldError(name, "must leave a layer of attention.")
        if self.residual_scale != 1.0 and (self.qk_norm or self.sandwich_norms):
            raise FieldError("residual_scale", "is for models with norms of the stream alone.")
        if self.query_growth and not self.rope.original_max_position:
            raise FieldError("query_growth", "needs original_max_position of the rope.")
        self._check_readers()
        for window in dict.fromkeys(map(self.window_of, range(self.num_layers))):
            self._check_rotation(self.rope_of(window), self.heads_of(window)[1])

    def _check_readers(self) -> None:
        first = self.num_layers - self.num_kv_readers
        windows = [self.window_of(layer) for layer in range(self.num_layers)]
        if self.num_kv_readers and (first < 1 or set(windows[first:]) - set(windows[:first])):
            raise FieldError(
                "num_kv_readers", "must leave a layer before them of each kind that reads."
            )

    def _check_rotation(self, rope: RopeConfig, head_dim: int) -> None:
        if head_dim % 2:
            raise FieldError("head_dim", f"must be even for rotary embeddings, got {head_dim}.")
        rotated = rope.rotated_of(head_dim)
        if not 0 < rotated <= head_dim or rotated % 2:
            raise FieldError(
                "partial_rotary_factor", f"must turn an even part of a head, not {rotated}."
            )
        for name in ("short_factor", "long_factor"):
            if len(getattr(rope, name)) not in (0, rotated // 2):
                raise FieldError(name, f"of the rope must have {rotated // 2} entries.")

    @property
    def states(self) -> DeltaConfig | MambaConfig | None:
        """What layers with a state compute, where there are some."""
        return self.delta or self.mamba

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers with a state."""
        return () if self.states is None else self.states.layers

    def window_of(self, layer: int) -> int | None:
        """How many tokens the layer sees, None for all."""
        return self.layer_windows[layer] if self.layer_windows else None

    def heads_of(self, window: int | None) -> tuple[int, int]:
        """Key-value heads, and numbers of a head, of layers with this window."""
        if window is not None:
            return self.num_kv_heads, self.head_dim
        return self.full_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim

    def rope_of(self, window: int | None) -> RopeConfig:
        """What layers with this window rotate by, if they do."""
        return self.rope if window is None or self.local_rope is None else self.local_rope

    def kv_owner(self, layer: int) -> int:
        """The layer whose keys and values this one reads: itself, or one before it."""
        first = self.num_layers - self.num_kv_readers
        if layer < first:
            return layer
        window = self.window_of(layer)
        return max(layer for layer in range(first) if self.window_of(layer) == window)

    def for_length(self, max_model_len: int) -> ModelConfig:
        """The model that serves sequences of up to this many tokens.

        Of LongRoPE's factors one kind is left, the long one where sequences may exceed the original
        context: they decide what keys are, so a server keeps to one.
        """
        if self.rope.kind != "longrope":
            return self
        is_long = max_model_len > self.rope.original_max_position
        other = {"short_factor" if is_long else "long_factor": ()}
        return replace(self, rope=replace(self.rope, **other))

    @property
    def stream_eps(self) -> float:
        """What norms add to mean squares of a stream that is kept divided by `residual_scale`.

        Kept so, it takes what layers add as it is, and norms make the same of it.
        """
        return self.rms_norm_eps / self.residual_scale**2

    @property
    def max_context_length(self) -> int:
        """Tokens a sequence may have, with the room that linear and YaRN scaling add."""
        if self.rope.kind == "linear" and not FAMILIES[self.architecture].counts_scaling:
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            scaled = int(self.rope.original_max_position * self.rope.factor)
            return max(self.max_position_embeddings, scaled)
        return self.max_position_embeddings

    @classmethod
    def from_hf(
        cls,
        source: Mapping[str, Any] | str | Path,
        generation: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Reads a Hugging Face config.json: its dict, the file, or the folder that holds it.

        `generation` is the dict of generation_config.json; with a path it is read from the
        same folder when it is there. Runs none of the folder's code and asks no network. Raises
        `UnsupportedModelError` naming what is not supported, `ConfigError` for a missing or wrong
        field, `ModelLoadError` for an unreadable file.
        """
        if isinstance(source, (str, Path)):
            path = Path(source)
            config_path = path / "config.json" if path.is_dir() else path
            source = read_json_object(config_path)
            sibling = config_path.with_name("generation_config.json")
            if generation is None and sibling.is_file():
                generation = read_json_object(sibling)
        return _from_hf(source, generation or {})


def without_defaults(config: ModelConfig) -> ModelConfig:
    """The config without what decides nothing of what the model computes."""
    return replace(
        config,
        checkpoint_dtype=None,
        bos_token_id=None,
        eos_token_ids=(),
        generation=GenerationDefaults(),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises `ModelLoadError` when it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"Cannot read {path}: it does not hold a JSON object.")
    return cast("dict[str, Any]", value)


def _from_hf(source: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    hf = read_hf_config(source)
    given, family = hf.fields, FAMILIES[hf.architecture]
    ropes = {layers: rope_of(values, family, given) for layers, values in hf.ropes.items()}
    sizes = {"intermediate_size": given.intermediate_size, "rms_norm_eps": given.rms_norm_eps}
    flags: dict[str, Any] = sizes | hf.flags
    parts = {"experts": ExpertsConfig, "delta": DeltaConfig, "mamba": MambaConfig}
    flags |= {name: kind(**flags[name]) for name, kind in parts.items() if name in flags}
    config = ModelConfig(
        architecture=hf.architecture,
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        num_layers=given.num_hidden_layers,
        num_heads=given.num_attention_heads,
        num_kv_heads=given.num_key_value_heads,
        head_dim=given.head_dim,
        max_position_embeddings=given.max_position_embeddings,
        rope=ropes[FULL],
        local_rope=ropes.get(SLIDING),
        layer_windows=hf.layer_windows if any(hf.layer_windows) else (),
        tie_word_embeddings=given.tie_word_embeddings,
        checkpoint_dtype=hf.checkpoint_dtype,
        bos_token_id=given.bos_token_id,
        # Either file may hold the one that ends a chat turn.
        eos_token_ids=tuple(dict.fromkeys(token_ids(generation) + hf.eos_token_ids)),
        generation=_generation(generation),
        **flags,
    )
    return _with_active_windows(config, hf.longest_window)


def _generation(source: Mapping[str, Any]) -> GenerationDefaults:
    given = {
        name: tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        for name, value in {**source, "not_obeyed": not_obeyed(source)}.items()
    }
    return GenerationDefaults(**read_fields(hints(GenerationDefaults), given))


def _with_active_windows(config: ModelConfig, said: int | None) -> ModelConfig:
    """Without the windows where they hold the whole context.

    Layers that rotate in their own way keep theirs. Raises `ConfigError` for a window that the file
    names and that exceeds the context; a family's default may.
    """
    context = config.max_context_length
    if not config.layer_windows:
        return config
    if said is not None and said > context:
        raise ConfigError(
            f"sliding_window in the model's config must be at most the context of {context} tokens "
            f"(max_position_embeddings), got {said}."
        )
    window = max(window or 0 for window in config.layer_windows)
    if window < context or config.local_rope is not None:
        return config
    return replace(config, layer_windows=())
