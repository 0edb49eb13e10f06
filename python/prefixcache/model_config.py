"""A model's shape, read from its folder: sizes, rotary embedding, and in what families differ.

transformers' own configuration classes say what a config.json means: defaults of each family, both
spellings of ropes, the type of each layer. They are asked unless the file leaves nothing open. What
they would take without a word is checked before: fields that are missing, and numbers that no model
has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from annotated_types import Ge, Le

from prefixcache.checked import (
    MAX_INT,
    Checked,
    Count,
    PositiveFloat,
    PositiveInt,
    adapter,
    adapters,
    check,
)
from prefixcache.exceptions import ConfigError, FieldError, ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Activation = Literal["silu", "gelu_tanh"]

# transformers' name for the configuration of each supported architecture.
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_ALWAYS_SAID = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")
# Biases that a family may have; others ignore what the file says.
_BIASES = {
    "LlamaForCausalLM": ("attention_bias", "mlp_bias"),
    "MistralForCausalLM": (),
    "Qwen2ForCausalLM": (),
    "Qwen3ForCausalLM": ("attention_bias",),
}
_Integer = Annotated[int, Ge(-MAX_INT), Le(MAX_INT)]
# How fields are called in a config.json; the others have one name.
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "theta": "rope_theta",
    "kind": "rope_type",
    "original_max_position": "original_max_position_embeddings",
}
# What is read beside the fields of `ModelConfig` and `RopeConfig`, or checked more closely.
_FIELDS: dict[str, Any] = {
    "rope_theta": PositiveFloat,
    "partial_rotary_factor": PositiveFloat,
    "original_max_position_embeddings": PositiveInt,
    "sliding_window": PositiveInt,
    "use_sliding_window": bool,
    "max_window_layers": Count,
    "layer_types": list[str],
    "attention_bias": bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig(Checked):
    """Rotary position embedding: base frequency and how it is scaled to longer contexts.

    Scaling kinds and field names are those of Hugging Face's `rope_parameters`. Fields that a kind
    does not use stay at their defaults. `original_max_position` is in tokens; None of
    `attention_factor` lets YaRN derive it from `factor` and the two `mscale` values.
    """

    theta: PositiveFloat = 10_000.0
    kind: RopeKind = "default"
    factor: PositiveFloat = 1.0
    original_max_position: Count = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.kind in ("llama3", "yarn") and not self.original_max_position:
            raise FieldError("original_max_position", f"is needed for rope {self.kind}.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise FieldError(
                "high_freq_factor",
                f"({self.high_freq_factor}) of the rope must exceed low_freq_factor "
                f"({self.low_freq_factor}).",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults(Checked):
    """Sampling values a model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: _Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: _Integer | None = None

    def sampling_options(self) -> dict[str, Any]:
        """Those values that are given, by their names in `SamplingParams`; not the length."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Checked):
    """The shape of a decoder of the Llama family, and the flags in which its members differ.

    `qkv_bias`, `output_bias` and `mlp_bias` say which linears carry a bias, `qk_norm` whether each
    query and key head is RMS-normalised before rotation. `layer_windows` has an entry for each
    layer: how many of the last tokens a token sees, itself among them, or None for all; with no
    entries every layer sees all. Layers with a window rotate by `local_rope` where it is given, all
    others by `rope`. Norms multiply by their weight plus `norm_offset`; with `sandwich_norms` what
    attention and MLP add is normalised too. `embedding_scale` multiplies embeddings, rounded to
    their type; `attention_scale` the dot products of queries and keys, None for
    `head_dim ** -0.5`. `checkpoint_dtype` is the type the weights were saved in, None when the
    checkpoint does not say.
    """

    architecture: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: Annotated[PositiveInt, Le(1 << 16)]
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[PositiveInt | None, ...] = ()
    local_rope: RopeConfig | None = None
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: PositiveFloat = 1.0
    attention_scale: PositiveFloat | None = None
    tie_word_embeddings: bool = False
    checkpoint_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def check_together(self) -> None:
        """Raises `ConfigError`."""
        _known_architecture([self.architecture])
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})."
            )
        if len(self.layer_windows) not in (0, self.num_layers):
            raise FieldError(
                "layer_windows",
                f"must have an entry for each of {self.num_layers} layers, "
                f"got {len(self.layer_windows)}.",
            )
        if self.head_dim % 2:
            raise FieldError(
                "head_dim", f"must be even for rotary embeddings, got {self.head_dim}."
            )

    @property
    def max_context_length(self) -> int:
        """Tokens a sequence may have, with the room that linear and YaRN scaling add."""
        if self.rope.kind == "linear":
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

        `generation` is the dict of generation_config.json; with a path it is read from beside
        config.json when it is there. Runs none of the folder's code and asks no network. Raises
        `UnsupportedModelError` naming what is not supported, `ConfigError` for a missing or wrong
        field, `ModelLoadError` for an unreadable file.
        """
        if isinstance(source, (str, Path)):
            path = Path(source)
            config_path = path / "config.json" if path.is_dir() else path
            source = read_json_object(config_path)
            beside = config_path.with_name("generation_config.json")
            if generation is None and beside.is_file():
                generation = read_json_object(beside)
        return _from_hf(source, generation or {})


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
    architecture = _known_architecture(source.get("architectures"))
    _refuse_unsupported(source)
    given = _read(_readers(ModelConfig), source) | _ropes(source)
    # Null means that there is none, which families differ on where nothing is said.
    if "sliding_window" in source and source["sliding_window"] is None:
        given["sliding_window"] = None
    config = _normalized(architecture, given)
    _refuse_windows(config)
    head_dim = getattr(config, "head_dim", None)  # Qwen2's class has no field for it
    attention_bias = "attention_bias" in _BIASES[architecture] and config.attention_bias
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope=_rope(config.rope_parameters),
        # Qwen2 has a bias on q, k and v without saying so.
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias="mlp_bias" in _BIASES[architecture] and config.mlp_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=config.tie_word_embeddings,
        checkpoint_dtype=_checkpoint_dtype(source),
        bos_token_id=given.get("bos_token_id"),
        # Either file may hold the one that ends a chat turn.
        eos_token_ids=tuple(dict.fromkeys(_token_ids(generation) + _token_ids(source))),
        generation=GenerationDefaults(**_read(adapters(GenerationDefaults), generation)),
    )


def _known_architecture(names: object) -> str:
    listed = cast("list[object]", names) if isinstance(names, list) else []
    for name in listed:
        if isinstance(name, str) and name in _MODEL_TYPES:
            return name
    raise UnsupportedModelError(
        f"The architecture {', '.join(map(str, listed)) or '(none named)'} is not supported. "
        f"Supported: {', '.join(_MODEL_TYPES)}."
    )


def _refuse_unsupported(source: Mapping[str, Any]) -> None:
    if source.get("quantization_config") is not None:
        raise UnsupportedModelError(
            "quantization_config is not supported. Supported weights: unquantized safetensors "
            "(float32, float16, bfloat16) and GGUF files."
        )
    if (activation := source.get("hidden_act")) not in (None, "silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported. Supported: silu.")


def _readers(kind: type[Any]) -> dict[str, TypeAdapter[Any]]:
    """What checks a dataclass's fields, by their names in a config.json."""
    more = {name: adapter(value_type) for name, value_type in _FIELDS.items()}
    return {_HF_NAMES.get(name, name): one for name, one in adapters(kind).items()} | more


def _read(readers: Mapping[str, TypeAdapter[Any]], source: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of those names that are given, as null is not. Raises `ConfigError`."""
    given = {name: source[name] for name in readers if source.get(name) is not None}
    try:
        return {name: check(readers[name], name, value) for name, value in given.items()}
    except FieldError as error:
        raise ConfigError(f"{error.field} in the model's config {error.problem}") from None


def _token_ids(source: Mapping[str, Any]) -> tuple[int, ...]:
    name = "eos_token_id"
    value = source.get(name)
    listed = {name: value if isinstance(value, list) else [value]}
    return () if value is None else tuple(_read({name: adapter(list[_Integer])}, listed)[name])


def _ropes(source: Mapping[str, Any]) -> dict[str, Any]:
    """The rope in either spelling, with checked fields. Raises `UnsupportedModelError`."""
    spellings = ("rope_parameters", "rope_scaling")
    ropes = _read({name: adapter(dict[str, Any]) for name in spellings}, source)
    for name, rope in ropes.items():
        if any(isinstance(value, dict) for value in rope.values()):
            raise UnsupportedModelError(
                f"{name} that differ by layer type are not supported. "
                "Supported: one set for all layers."
            )
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in get_args(RopeKind):
            raise UnsupportedModelError(
                f"Rope scaling {kind!r} is not supported. "
                f"Supported: {', '.join(get_args(RopeKind))}."
            )
        ropes[name] = _read(_readers(RopeConfig), rope) | {"rope_type": kind}
    return ropes


def _normalized(architecture: str, given: dict[str, Any]) -> Any:
    """The config with nothing left to defaults, in one spelling. Raises `ConfigError`."""
    for name in _REQUIRED:
        if name not in given:
            raise ConfigError(f"The model's config lacks {name}.")
    model_type = _MODEL_TYPES[architecture]
    if _is_normalized(architecture, given):
        return SimpleNamespace(**given, model_type=model_type)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type, **given)
    except (StrictDataclassError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = str(error).strip('"\n').splitlines()[-1].strip()
        raise ConfigError(f"transformers refuses the model's config: {reason}") from error


def _is_normalized(architecture: str, given: dict[str, Any]) -> bool:
    """Whether it is as transformers 5 writes it, so that transformers would change nothing.

    Its import takes longer than the rest of a start, and 170 MB.
    """
    full = ["full_attention"] * given["num_hidden_layers"]
    rope = given.get("rope_parameters", {})
    return (
        {*_ALWAYS_SAID, *_BIASES[architecture]} <= given.keys()
        and not {"rope_scaling", "rope_theta", "partial_rotary_factor"} & given.keys()
        and rope.keys() == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        and (architecture == "LlamaForCausalLM" or "sliding_window" in given)
        and given.get("sliding_window") is None
        and given.get("layer_types", full) == full
    )


def _refuse_windows(config: Any) -> None:
    """Raises `UnsupportedModelError` unless every layer sees the whole context.

    Mistral names no types of layers: all have the window, which may hold the whole context.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = any(kind != "full_attention" for kind in kinds or ())
    if not kinds and config.model_type == "mistral" and window is not None:
        slides = window < config.max_position_embeddings
    if slides:
        raise UnsupportedModelError(
            f"Sliding window attention (sliding_window {window}) is not supported. "
            "Supported: full attention in every layer."
        )


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    rotated = values.get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {rotated} is not supported. Supported: 1.0."
        )
    names = {one.name: _HF_NAMES.get(one.name, one.name) for one in fields(RopeConfig)}
    known = {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
    return RopeConfig(**known)


def _checkpoint_dtype(source: Mapping[str, Any]) -> str | None:
    name = source.get("dtype") or source.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")
