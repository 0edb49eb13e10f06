"""A config.json, checked, of which nothing is left to defaults.

A file means what transformers' configuration classes make of it: the defaults of its family, both
spellings of ropes, the type of each layer. transformers is not needed. What its classes take
without a word is checked too: fields that are missing, and numbers that no model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from prefixcache.config.checked import PositiveFloat, PositiveInt, adapter, check, hints, is_list
from prefixcache.config.families import FAMILIES
from prefixcache.config.family import Family
from prefixcache.config.hf_fields import CONV, FULL, LINEAR, SLIDING, HFFields, TokenId
from prefixcache.exceptions import ConfigError, FieldError, UnsupportedModelError

_MLP = "mlp"
_OLD_LAYER_TYPES = {"attention": FULL, "mamba": LINEAR}
# Those of `hybrid_override_pattern`.
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": "moe"}
# Fields of which a file says more than their type, or nothing.
_READ_APART = ("rope_parameters", "rope_scaling", "bare_layers")
_ROPE_FIELDS: dict[str, Any] = {
    "rope_theta": PositiveFloat,
    "factor": PositiveFloat,
    "partial_rotary_factor": PositiveFloat,
    "original_max_position_embeddings": PositiveInt,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "beta_fast": float,
    "beta_slow": float,
    "attention_factor": float,
    "mscale": float,
    "mscale_all_dim": float,
    "truncate": bool,
    "llama_4_scaling_beta": float,
    "short_factor": list[PositiveFloat],
    "long_factor": list[PositiveFloat],
}
# Fields of the whole model, which a file with a `text_config` may have next to it.
_OUTER_FIELDS = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
# Where a quantization_config says what weights became.
_QUANTIZED_TO = {"format": "", "fmt": "", "bits": " bits"}
# Fields without which a kind of rope has no meaning.
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HFConfig:
    """The part of a config.json that describes the text model.

    Of ropes there is one, or one by the type of layer. `layer_windows` has an entry for each layer.
    `longest_window` is what the file says of windows, if it must be within the context.
    """

    architecture: str
    fields: HFFields
    ropes: Mapping[str, Mapping[str, Any]]
    layer_windows: tuple[int | None, ...]
    longest_window: int | None
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str | None

    @property
    def flags(self) -> dict[str, Any]:
        """Fields of `ModelConfig` in which the family differs from others."""
        family, fields = FAMILIES[self.architecture], self.fields
        attention = fields.attention_bias if "attention_bias" in family.biases else False
        mlp = fields.mlp_bias if "mlp_bias" in family.biases else False
        biases = {"qkv_bias": attention, "output_bias": attention, "mlp_bias": mlp}
        return biases | family.flags(fields)


def read_hf_config(source: Mapping[str, Any]) -> HFConfig:
    """Reads a config.json's object.

    Raises `UnsupportedModelError` naming what is not supported, `ConfigError` for a missing or
    wrong field.
    """
    architecture = supported_architecture(source.get("architectures"))
    if FAMILIES[architecture].sees_images:
        text = _text_config(source)
        if text is not source:
            architecture = _text_architecture(architecture, text.get("model_type"))
        source = text
    family = FAMILIES[architecture]
    _refuse_unsupported(family, source)
    source = {name: value for name, value in source.items() if name not in family.ignored}
    given = _given_fields(family, source) | _given_ropes(family, source)
    # Null means that there is none, which families differ on where nothing is said.
    if "sliding_window" in source and source["sliding_window"] is None:
        given["sliding_window"] = None
    if family.lone_parts:
        given |= _joined_layers(given)
    for name in family.required:
        if name not in given:
            raise ConfigError(f"The model's config lacks {name}.")
    _check_layer_types(family, given)
    rotates = given.get("no_rope_layers")
    if rotates is not None and len(rotates) != given["num_hidden_layers"]:
        raise ConfigError("no_rope_layers in the model's config must have an entry for each layer.")
    fields = _completed(family, given)
    ropes = fields.rope_parameters
    return HFConfig(
        architecture=architecture,
        fields=fields,
        ropes=ropes if family.ropes_by_layer else {FULL: ropes},
        layer_windows=_layer_windows(family, fields),
        longest_window=None if family.exceeds_context else given.get("sliding_window"),
        eos_token_ids=token_ids(source),
        checkpoint_dtype=_checkpoint_dtype(source),
    )


def supported_architecture(names: object) -> str:
    """The first of them that is supported. Raises `UnsupportedModelError`."""
    listed = cast("list[object]", names) if isinstance(names, list) else []
    for name in listed:
        if isinstance(name, str) and name in FAMILIES:
            return name
    raise UnsupportedModelError(
        f"The architecture {', '.join(map(str, listed)) or '(none named)'} is not supported. "
        f"Supported: {', '.join(FAMILIES)}."
    )


def read_fields(types: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of those names that are given, as null is not. Raises `ConfigError`."""
    given = {name: source[name] for name in types if source.get(name) is not None}
    try:
        return {name: check(adapter(types[name]), name, value) for name, value in given.items()}
    except FieldError as error:
        raise ConfigError(f"{error.field} in the model's config {error.problem}") from None


def _given_fields(family: Family, source: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the file has, by our names. Raises `ConfigError`."""
    spellings = {"num_experts": "num_local_experts", **family.spellings}
    ours = {name: kind for name, kind in hints(HFFields).items() if name not in _READ_APART}
    theirs = {name: ours[spelled] for name, spelled in spellings.items()}
    given = read_fields(ours | theirs, source)
    return given | {spellings[name]: given.pop(name) for name in theirs if name in given}


def token_ids(source: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, of either file. Raises `ConfigError`."""
    name = "eos_token_id"
    value = source.get(name)
    listed = {name: value if is_list(value) else [value]}
    return () if value is None else tuple(read_fields({name: list[TokenId]}, listed)[name])


def _text_config(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that reads images too: the part that reads text, with what is said of both."""
    text = read_fields({"text_config": dict[str, Any]}, source).get("text_config")
    if text is None:
        return source
    outer = {name: source[name] for name in _OUTER_FIELDS if source.get(name) is not None}
    return text | outer


def _text_architecture(outer: str, text_type: object) -> str:
    """The architecture of that part, which may be another's. Raises `UnsupportedModelError`."""
    if text_type in (None, FAMILIES[outer].model_type):
        return outer
    if isinstance(text_type, str) and text_type in FAMILIES[outer].text_families:
        return FAMILIES[outer].text_families[text_type]
    raise UnsupportedModelError(f"A text_config of {text_type!r} is not supported in {outer}.")


def _refuse_unsupported(family: Family, source: Mapping[str, Any]) -> None:
    quantization = source.get("quantization_config")
    if quantization is not None and not _is_supported(family, quantization):
        raise UnsupportedModelError(
            f"Safetensors quantized by {_quantizer(quantization)} (quantization_config) are not "
            "supported. Take a GGUF file of the model, as --model owner/name-GGUF:Q4_K_M, or the "
            "unquantized checkpoint, which prefixcache convert --quantize q8_0 makes smaller."
        )
    name, *activations = family.activation
    if (activation := source.get(name)) not in (None, *activations):
        raise UnsupportedModelError(
            f"{name} {activation!r} is not supported. Supported: {activations[0]}."
        )
    for name in family.refused:
        if value := source.get(name):
            raise UnsupportedModelError(f"{name} {value!r} is not supported. Supported: none.")


def _quantizer(quantization: object) -> str:
    """The name of what weights were quantized by, and of their type where it is said."""
    said = cast("dict[str, object]", quantization) if isinstance(quantization, dict) else {}
    method = said.get("quant_method") or "an unnamed method"
    kinds = [f"{said[name]}{unit}" for name, unit in _QUANTIZED_TO.items() if said.get(name)]
    return " ".join([str(method), *(f"({kind})" for kind in kinds[:1])])


def _is_supported(family: Family, quantization: object) -> bool:
    method = cast("dict[str, object]", quantization).get("quant_method", "")
    return family.quantization is not None and method == family.quantization


def _given_ropes(family: Family, source: Mapping[str, Any]) -> dict[str, Any]:
    """The ropes in either spelling, with checked fields. Raises `UnsupportedModelError`."""
    ropes = read_fields(dict.fromkeys(("rope_parameters", "rope_scaling"), dict[str, Any]), source)
    checked: dict[str, Any] = {}
    for name, rope in ropes.items():
        by_layer = any(isinstance(value, dict) for value in rope.values())
        if by_layer != (family.ropes_by_layer and name == "rope_parameters"):
            form = "that differ by layer type" if by_layer else "of one set for all layers"
            raise UnsupportedModelError(f"{name} {form} are not supported for {family.model_type}.")
        if rope:
            checked[name] = _ropes_by_layer(family, rope) if by_layer else _rope(family, rope)
        elif name == "rope_parameters" and not family.ropes_by_layer:
            checked[name] = {}  # which says more than nothing: no scaling, whatever the family's
    return checked


def _ropes_by_layer(family: Family, ropes: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(ropes.keys() - {FULL, SLIDING}):
        raise UnsupportedModelError(
            f"rope_parameters of {unknown[0]} are not supported. Supported: {FULL}, {SLIDING}."
        )
    given = read_fields(dict.fromkeys((FULL, SLIDING), dict[str, Any]), ropes)
    return {kind: _rope(family, rope) for kind, rope in given.items()}


def _rope(family: Family, rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in family.rope_kinds:
        raise UnsupportedModelError(
            f"Rope scaling {kind!r} is not supported. Supported: {', '.join(family.rope_kinds)}."
        )
    for name in _ROPE_NEEDS.get(kind, ()):
        if rope.get(name) is None:
            raise ConfigError(f"The model's config lacks the {name} of its rope scaling {kind!r}.")
    return read_fields(_ROPE_FIELDS, rope) | {"rope_type": kind}


def _joined_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of a mixer, and of the MLP that follows it: `bare_layers` are those without one."""
    pattern = [_LETTERS.get(letter, letter) for letter in given.get("hybrid_override_pattern", "")]
    kinds: list[str] = given.get("layer_types", pattern)
    if len(kinds) != given.get("num_hidden_layers", len(kinds)) or not kinds:
        raise ConfigError("layers_block_type in the model's config must have all of its layers.")
    starts = [i for i, kind in enumerate(kinds) if kind != _MLP]
    if starts[:1] != [0] or any(b - a > 2 for a, b in pairwise([*starts, len(kinds)])):
        raise UnsupportedModelError("Layers of an MLP that no mixer precedes are not supported.")
    bare = (i for i, (a, b) in enumerate(pairwise([*starts, len(kinds)])) if b - a == 1)
    mixers = [kinds[start] for start in starts]
    return {
        "layer_types": mixers,
        "num_hidden_layers": len(mixers),
        "bare_layers": tuple(bare),
    }


def _check_layer_types(family: Family, given: dict[str, Any]) -> None:
    types: list[str] | None = given.get("layer_types")
    if types is None:
        return
    types = given["layer_types"] = [_OLD_LAYER_TYPES.get(kind, kind) for kind in types]
    supported = (FULL, _other_layers(family))
    if unsupported := [kind for kind in types if kind not in supported]:
        raise UnsupportedModelError(
            f"layer_types {unsupported[0]!r} is not supported. Supported: {', '.join(supported)}."
        )
    if len(types) != given["num_hidden_layers"]:
        raise ConfigError(
            "layer_types in the model's config must have an entry for each of "
            f"{given['num_hidden_layers']} layers (num_hidden_layers), got {len(types)}."
        )


def _other_layers(family: Family) -> str:
    """What layers are that have no full attention."""
    if family.convolves:
        return CONV
    return LINEAR if family.recurs else SLIDING


def _completed(family: Family, given: dict[str, Any]) -> HFFields:
    """The fields with nothing left to defaults, in one spelling. Raises `ConfigError`."""
    said = {**family.defaults, **given}
    fields = HFFields(**said)
    size, heads = fields.hidden_size, fields.num_attention_heads
    if family.heads_divide_hidden and size % heads:
        raise ConfigError(
            f"hidden_size in the model's config must be a multiple of num_attention_heads ({heads})"
            f", got {size}."
        )
    if "num_key_value_heads" not in said:
        fields.num_key_value_heads = heads
    if "head_dim" not in said:
        fields.head_dim = size // heads
    if family.windows == "switched" and not fields.use_sliding_window:
        fields.sliding_window = None
    fields.layer_types = given.get("layer_types") or _default_layer_types(family, fields)
    if family.ends_full:
        fields.layer_types = [*fields.layer_types[:-1], FULL]
    fields.rope_parameters = _ropes_of(family, fields)
    return fields


def _ropes_of(family: Family, fields: HFFields) -> dict[str, Any]:
    if family.ropes_by_layer:
        return _ropes_of_types(fields)
    rope, original = _single_rope(fields), "original_max_position_embeddings"
    if original in family.defaults and rope["rope_type"] != "default":
        rope[original] = fields.original_max_position_embeddings
    return rope


def _default_layer_types(family: Family, fields: HFFields) -> list[str]:
    """The type of each layer where the file names none; empty where all are alike."""
    layers = range(fields.num_hidden_layers)
    if family.windows == "by_layer":
        pattern = fields.sliding_window_pattern
        every = len(pattern) if isinstance(pattern, str) else pattern
        return [SLIDING if (i + 1) % every else FULL for i in layers]
    if family.windows == "unrotated":
        is_on = fields.use_sliding_window and fields.sliding_window
        slides = fields.unrotated_layers() if is_on else ()
        return [SLIDING if i in slides else FULL for i in layers]
    if family.windows == "switched":
        is_on = fields.sliding_window is not None
        first = fields.max_window_layers if is_on else fields.num_hidden_layers
        return [SLIDING if i >= first else FULL for i in layers]
    if family.convolves and fields.full_attn_idxs is not None:
        return [FULL if i in fields.full_attn_idxs else CONV for i in layers]
    if family.recurs:
        return [LINEAR if (i + 1) % fields.full_attention_interval else FULL for i in layers]
    return []


def _single_rope(fields: HFFields) -> dict[str, Any]:
    rope = fields.rope_scaling or fields.rope_parameters
    factor = fields.partial_rotary_factor
    outer = {} if factor is None else {"partial_rotary_factor": factor}
    return _complete_rope(fields, outer | rope, fields.rope_theta)


def _ropes_of_types(fields: HFFields) -> dict[str, Any]:
    """The rope of each type of layer; `rope_scaling` is that of full attention."""
    ropes: dict[str, dict[str, Any]] = fields.rope_parameters
    scaling = fields.rope_scaling or {}
    if scaling and FULL not in ropes:
        raise ConfigError(
            f"The model's config has rope_scaling, and rope_parameters without {FULL}."
        )
    full, local = ropes.get(FULL, {}) | scaling, ropes.get(SLIDING, {})
    return {
        FULL: _complete_rope(fields, full, fields.rope_theta),
        SLIDING: _complete_rope(fields, local, fields.rope_local_base_freq),
    }


def _complete_rope(fields: HFFields, rope: Mapping[str, Any], theta: float) -> dict[str, Any]:
    complete = {"rope_type": "default", "rope_theta": theta, **rope}
    if complete["rope_type"] in ("llama3", "yarn", "longrope"):
        complete.setdefault("original_max_position_embeddings", fields.max_position_embeddings)
    return complete


def _layer_windows(family: Family, fields: HFFields) -> tuple[int | None, ...]:
    """The window of each layer. Raises `ConfigError` where fields contradict each other."""
    window = None if family.windows == "none" else fields.sliding_window
    if family.windows == "unrotated" and not fields.use_sliding_window:
        window = None
    types = fields.layer_types
    if family.windows in ("none", "one") or not types:
        alike = FULL if window is None else SLIDING
        if any(kind not in (alike, CONV, LINEAR) for kind in types):
            raise UnsupportedModelError(
                f"layer_types that are not all {alike} are not supported for {family.model_type} "
                f"with sliding_window {window}."
            )
        types = [alike] * fields.num_hidden_layers
    if SLIDING in types and window is None:
        raise ConfigError(
            f"sliding_window in the model's config is null, and layer_types names {SLIDING}."
        )
    return tuple(window if kind == SLIDING else None for kind in types)


def _checkpoint_dtype(source: Mapping[str, Any]) -> str | None:
    name = source.get("dtype") or source.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")
