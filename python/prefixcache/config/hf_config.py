"""A config.json, checked, of which nothing is left to defaults.

A file means what transformers' configuration classes make of it: the defaults of its family, both
spellings of ropes, the type of each layer. Each family is one row of `FAMILIES`, and transformers
is not needed. What its classes take without a word is checked too: fields that are missing, and
numbers that no model has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from annotated_types import Ge, Le

from prefixcache.config.checked import MAX_INT, Count, PositiveFloat, PositiveInt, adapter, check
from prefixcache.exceptions import ConfigError, FieldError, UnsupportedModelError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
NumLayers = Annotated[PositiveInt, Le(1 << 16)]
TokenId = Annotated[int, Ge(-MAX_INT), Le(MAX_INT)]

FULL = "full_attention"
SLIDING = "sliding_attention"
CONV = "conv"
LINEAR = "linear_attention"
_MLP = "mlp"
_OLD_LAYER_TYPES = {"attention": FULL, "mamba": LINEAR}
# Those of `hybrid_override_pattern`.
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": "moe"}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_OTHER_SIZES = tuple(size for size in _SIZES if size != "intermediate_size")
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(_SIZES, PositiveInt),
    "num_hidden_layers": NumLayers,
    "num_key_value_heads": PositiveInt,
    "head_dim": PositiveInt,
    "rms_norm_eps": PositiveFloat,
    "query_pre_attn_scalar": PositiveInt,
    "rope_theta": PositiveFloat,
    "rope_local_base_freq": PositiveFloat,
    "partial_rotary_factor": PositiveFloat,
    "original_max_position_embeddings": PositiveInt,
    "sliding_window": PositiveInt,
    "use_sliding_window": bool,
    "max_window_layers": Count,
    "sliding_window_pattern": PositiveInt | Literal["LLLG"],
    "layer_types": list[str],
    "no_rope_layers": list[int],
    "no_rope_layer_interval": PositiveInt,
    "attention_bias": bool,
    "attention_out_bias": bool,
    "qkv_bias": bool,
    "mlp_bias": bool,
    "tie_word_embeddings": bool,
    "bos_token_id": TokenId,
    "embedding_multiplier": PositiveFloat,
    "attention_multiplier": PositiveFloat,
    "residual_multiplier": PositiveFloat,
    "logits_scaling": PositiveFloat,
    "shared_intermediate_size": Count,
    "shared_expert_intermediate_size": PositiveInt,
    "num_local_experts": Count,
    "num_experts": Count,
    "num_experts_per_tok": PositiveInt,
    "top_k_experts": PositiveInt,
    "enable_moe_block": bool,
    "moe_intermediate_size": PositiveInt,
    "norm_topk_prob": bool,
    "decoder_sparse_step": PositiveInt,
    "mlp_only_layers": list[int],
    "swiglu_alpha": PositiveFloat,
    "swiglu_limit": PositiveFloat,
    "position_embedding_type": str,
    "norm_eps": PositiveFloat,
    "tie_embedding": bool,
    "full_attn_idxs": list[int],
    "conv_L_cache": PositiveInt,
    "conv_bias": bool,
    "block_ff_dim": PositiveInt,
    "block_auto_adjust_ff_dim": bool,
    "block_ffn_dim_multiplier": PositiveFloat,
    "block_multiple_of": PositiveInt,
    "num_dense_layers": Count,
    "use_expert_bias": bool,
    "routed_scaling_factor": PositiveFloat,
    "global_head_dim": PositiveInt,
    "num_global_key_value_heads": PositiveInt,
    "per_layer_config": dict[str, dict[str, PositiveInt]],
    "attention_k_eq_v": bool,
    "num_kv_shared_layers": Count,
    "use_double_wide_mlp": bool,
    "hidden_size_per_layer_input": Count,
    "vocab_size_per_layer_input": PositiveInt,
    "attn_logit_softcapping": PositiveFloat,
    "final_logit_softcapping": PositiveFloat,
    "use_bidirectional_attention": bool | str,
    "full_attention_interval": PositiveInt,
    "linear_conv_kernel_dim": PositiveInt,
    "linear_key_head_dim": PositiveInt,
    "linear_value_head_dim": PositiveInt,
    "linear_num_key_heads": PositiveInt,
    "linear_num_value_heads": PositiveInt,
    "linear_heads_tiled": bool,
    "mamba_n_heads": PositiveInt,
    "mamba_n_groups": PositiveInt,
    "mamba_d_head": PositiveInt | Literal["auto"],
    "mamba_d_state": PositiveInt,
    "mamba_d_conv": PositiveInt,
    "mamba_expand": PositiveInt,
    "mamba_conv_bias": bool,
    "mamba_proj_bias": bool,
    "time_step_limit": list[Any],
    "mamba_num_heads": PositiveInt,
    "mamba_head_dim": PositiveInt,
    "n_groups": PositiveInt,
    "ssm_state_size": PositiveInt,
    "conv_kernel": PositiveInt,
    "use_conv_bias": bool,
    "use_bias": bool,
    "layer_norm_epsilon": PositiveFloat,
    "layers_block_type": list[str],
    "hybrid_override_pattern": str,
    "linear_qkvz_apart": bool,
}
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
# What a field means that neither the file nor the row of its family gives, where that is not None.
# None of `num_key_value_heads` means one for each head, of `head_dim` that heads share the hidden
# size.
_DEFAULTS: dict[str, Any] = dict.fromkeys(_FIELDS) | {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": {},
    "rope_theta": 10_000.0,
    "rope_local_base_freq": 10_000.0,
    "use_sliding_window": False,
    "num_local_experts": 0,
}
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
class Family:
    """What the config.json of an architecture may say, and what it means without saying it.

    `model_type` is transformers' name for its configuration. `defaults` are values of fields that a
    file does not give, where they differ from those of most families. `required` are fields without
    which there is no model, `refused` those that must not be set, `ignored` those that say nothing.
    `biases` are those it may have: others ignore what the file says. With `heads_divide_hidden` the
    hidden size must be a multiple of the heads, even where `head_dim` is given.

    With `ends_full` the last layer has no window, whatever the file says of it.

    There are no windows; or one for all layers; or one `by_layer`, where layers are sliding but
    each `sliding_window_pattern`-th; or one for the layers from `max_window_layers` on, which
    `use_sliding_window` switches on; or one for layers that do not rotate, each
    `no_rope_layer_interval`-th, which it switches on too. `layer_types` of a file goes before both.
    `ropes_by_layer` says that ropes go by these types too. With `convolves` layers may be short
    convolutions; all but `full_attn_idxs` are where the file names no types. Layers may have the
    recurrence that `recurs` names; all but each `full_attention_interval`-th do where the file
    names no types. With `lone_parts` a layer of a file is a mixer or an MLP. `spellings` are other
    names of fields, which go before. Files of a family with `sees_images` may describe, and hold, a
    model of images next to the one of text. `flags` makes fields of `ModelConfig` of a whole
    config. `names` are those of modules that are called otherwise than Llama's: of a layer
    "input_norm", "attention", "mamba", "q_norm", "k_norm", "out", "mlp_norm", "gate", "up", "down",
    "router", "experts", "selection_bias", "shared", and "qkv" and "gate_up" where these are one
    tensor; of the model "norm". `renamed` are parts of tensors' names that we spell otherwise.
    `rope_kinds` are those of ropes that it knows, `rotates_partly` says that a head may be turned
    in part, `pairs_heads` that checkpoints have rotated pairs next to each other. `fused_experts`
    says of checkpoints with all experts of a layer in one tensor whether gates and what they let
    pass take turns or are halves there; its blocks may be those of the `quantization` that the file
    names.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    required: tuple[str, ...] = _SIZES
    biases: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    heads_divide_hidden: bool = False
    windows: Literal["none", "one", "by_layer", "switched", "unrotated"] = "none"
    ends_full: bool = False
    ropes_by_layer: bool = False
    convolves: bool = False
    recurs: Literal["gated delta rule", "Mamba-2"] | None = None
    lone_parts: bool = False
    spellings: Mapping[str, str] = field(default_factory=dict[str, str])
    sees_images: bool = False
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    flags: Callable[[Any], dict[str, Any]] = lambda _whole: {}
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    fused_experts: Literal["turns", "halves"] = "halves"
    quantization: str | None = None
    rope_kinds: tuple[RopeKind, ...] = get_args(RopeKind)[:-1]
    rotates_partly: bool = False
    pairs_heads: bool = False


def _unrotated(whole: Any) -> tuple[int, ...]:
    """The layers that do not rotate."""
    layers = range(whole.num_hidden_layers)
    if whole.no_rope_layers is None:
        return tuple(i for i in layers if (i + 1) % whole.no_rope_layer_interval == 0)
    return tuple(i for i in layers if not whole.no_rope_layers[i])


def _experts(whole: Any, intermediate_size: int, **more: Any) -> dict[str, Any]:
    """The fields of `ExpertsConfig`, where there are experts."""
    if not whole.num_local_experts:
        return {}
    return {
        "experts": {
            "count": whole.num_local_experts,
            "top_k": whole.num_experts_per_tok,
            "intermediate_size": intermediate_size,
            **more,
        }
    }


def _qwen_experts(whole: Any, **more: Any) -> dict[str, Any]:
    """Layers are dense that are named so, and but for each `decoder_sparse_step`-th."""
    layers = range(whole.num_hidden_layers)
    step, named = whole.decoder_sparse_step, whole.mlp_only_layers
    dense = tuple(i for i in layers if i in named or (i + 1) % step)
    more |= {"renormalise": whole.norm_topk_prob, "dense_layers": dense}
    experts = _experts(whole, whole.moe_intermediate_size, **more)
    return experts if len(dense) < len(layers) else {}


def _weighed_expert(whole: Any) -> dict[str, Any]:
    return {"shared_size": whole.shared_expert_intermediate_size, "shared_weight": True}


def _qwen2_moe_flags(whole: Any) -> dict[str, Any]:
    return {"qkv_bias": whole.qkv_bias} | _qwen_experts(whole, **_weighed_expert(whole))


def _olmoe_flags(whole: Any) -> dict[str, Any]:
    experts = _experts(whole, whole.intermediate_size, renormalise=whole.norm_topk_prob)
    return {"qk_norm": True, "whole_qk_norms": True} | experts


def _gpt_oss_flags(whole: Any) -> dict[str, Any]:
    for name, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if getattr(whole, name) != known:
            raise UnsupportedModelError(
                f"{name} {getattr(whole, name)!r} is not supported. Supported: {known}."
            )
    experts = _experts(whole, whole.intermediate_size, renormalise=True, router_bias=True)
    return {"mlp_bias": True, "sinks": True, "activation": "clamped_swiglu"} | experts


def _olmo2_flags(_whole: Any) -> dict[str, Any]:
    norms = {"qk_norm": True, "whole_qk_norms": True, "input_norms": False}
    return norms | {"sandwich_norms": True}


def _exaone4_flags(whole: Any) -> dict[str, Any]:
    """Layers without a window do not rotate where others have one."""
    slides = whole.sliding_window is not None
    unrotated = (i for i, kind in enumerate(whole.layer_types) if slides and kind == FULL)
    norms = {"qk_norm": True, "input_norms": False, "sandwich_norms": True}
    return norms | {"unrotated_layers": tuple(unrotated)}


def _granite_flags(whole: Any) -> dict[str, Any]:
    return {
        "embedding_scale": whole.embedding_multiplier,
        "attention_scale": whole.attention_multiplier,
        "residual_scale": whole.residual_multiplier,
        "logits_divisor": whole.logits_scaling,
    }


def _granite_moe_flags(whole: Any) -> dict[str, Any]:
    shared = getattr(whole, "shared_intermediate_size", None) or 0
    experts = _experts(whole, whole.intermediate_size, renormalise=True, shared_size=shared)
    return _granite_flags(whole) | experts


def _granite4_flags(whole: Any) -> dict[str, Any]:
    heads, values = whole.mamba_n_heads, whole.mamba_expand * whole.hidden_size
    head_dim = values // heads if whole.mamba_d_head == "auto" else whole.mamba_d_head
    if LINEAR in whole.layer_types and heads * head_dim != values:
        raise ConfigError(
            f"mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) in the model's config must "
            f"be mamba_expand times hidden_size ({values})."
        )
    rotates = whole.position_embedding_type == "rope"
    dense = {} if whole.num_local_experts else {"intermediate_size": whole.shared_intermediate_size}
    unrotated = () if rotates else tuple(range(whole.num_hidden_layers))
    found = _granite_moe_flags(whole) | _mamba_flags(whole, head_dim) | dense
    return found | {"unrotated_layers": unrotated}


# In each spelling of infinity.
_NO_TIME_LIMITS = (None, [0, inf], [0, {"__float__": "Infinity"}])


def _mamba_flags(whole: Any, head_dim: int) -> dict[str, Any]:
    layers = tuple(i for i, kind in enumerate(whole.layer_types) if kind == LINEAR)
    if not layers:
        return {}
    if whole.time_step_limit not in _NO_TIME_LIMITS:
        raise UnsupportedModelError(
            f"time_step_limit {whole.time_step_limit!r} is not supported. Supported: 0, infinity."
        )
    mamba = {
        "layers": layers,
        "key_heads": whole.mamba_n_groups,
        "value_heads": whole.mamba_n_heads,
        "key_dim": whole.mamba_d_state,
        "value_dim": head_dim,
        "taps": whole.mamba_d_conv,
        "conv_bias": whole.mamba_conv_bias,
        "bias": whole.mamba_proj_bias,
    }
    return {"mamba": mamba}


def _nemotron_h_flags(whole: Any) -> dict[str, Any]:
    return _mamba_flags(whole, whole.mamba_d_head) | {
        "activation": "squared_relu",
        "bare_layers": whole.bare_layers,
        "unrotated_layers": tuple(range(whole.num_hidden_layers)),
    }


def _conv_flags(whole: Any) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "rms_norm_eps": whole.norm_eps,
        "conv_layers": tuple(i for i, kind in enumerate(whole.layer_types) if kind == CONV),
        "conv_taps": whole.conv_L_cache,
        "conv_bias": whole.conv_bias,
    }


def _lfm2_flags(whole: Any) -> dict[str, Any]:
    return _conv_flags(whole) | {"intermediate_size": _lfm2_intermediate_size(whole)}


def _lfm2_moe_flags(whole: Any) -> dict[str, Any]:
    dense = tuple(range(min(whole.num_dense_layers, whole.num_hidden_layers)))
    experts = _experts(
        whole,
        whole.moe_intermediate_size,
        scores="sigmoid",
        selection_bias=whole.use_expert_bias,
        renormalise=whole.norm_topk_prob,
        added_to_sum=1e-6,
        scale=whole.routed_scaling_factor,
        dense_layers=dense,
    )
    return _conv_flags(whole) | (experts if len(dense) < whole.num_hidden_layers else {})


def _delta_flags(whole: Any) -> dict[str, Any]:
    layers = tuple(i for i, kind in enumerate(whole.layer_types) if kind == LINEAR)
    if not layers:
        return {}
    delta = {
        "layers": layers,
        "key_heads": whole.linear_num_key_heads,
        "value_heads": whole.linear_num_value_heads,
        "key_dim": whole.linear_key_head_dim,
        "value_dim": whole.linear_value_head_dim,
        "taps": whole.linear_conv_kernel_dim,
        "tiled": bool(getattr(whole, "linear_heads_tiled", None)),  # which GGUF files alone are
    }
    return {"delta": delta}


def _qwen3_5_flags(whole: Any) -> dict[str, Any]:
    norms = {"qk_norm": True, "norm_offset": 1.0}
    return norms | {"output_gate": True} | _delta_flags(whole)


def _qwen3_5_moe_flags(whole: Any) -> dict[str, Any]:
    size, shared = whole.moe_intermediate_size, _weighed_expert(whole)
    experts = _experts(whole, size, renormalise=True, **shared)
    # No layer has an MLP of its own.
    return _qwen3_5_flags(whole) | experts | {"intermediate_size": shared["shared_size"]}


def _qwen3_next_flags(whole: Any) -> dict[str, Any]:
    found = _qwen3_5_flags(whole) | _qwen_experts(whole, **_weighed_expert(whole))
    if "delta" not in found:
        return found
    apart = bool(getattr(whole, "linear_qkvz_apart", None))  # as in GGUF files alone
    return found | {"delta": found["delta"] | {"by_key_head": True, "qkvz_apart": apart}}


def _lfm2_intermediate_size(whole: Any) -> int:
    if not whole.block_auto_adjust_ff_dim:
        return whole.intermediate_size
    size = int(whole.block_ffn_dim_multiplier * int(2 * whole.intermediate_size / 3))
    return -(-size // whole.block_multiple_of) * whole.block_multiple_of


def _gemma2_flags(whole: Any) -> dict[str, Any]:
    return {
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": whole.hidden_size**0.5,
        "attention_scale": whole.query_pre_attn_scalar**-0.5,
        "attention_softcap": whole.attn_logit_softcapping,
        "logits_softcap": whole.final_logit_softcapping,
    }


def _gemma3_flags(whole: Any) -> dict[str, Any]:
    return _gemma2_flags(whole) | {"qk_norm": True}


# Of a head that layers without a window have, and how a file spells it for each of them.
_GLOBAL_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def _gemma4_flags(whole: Any) -> dict[str, Any]:
    if whole.use_bidirectional_attention == "all":
        raise UnsupportedModelError(
            "use_bidirectional_attention 'all' is not supported. Supported: none, 'vision'."
        )
    readers, inputs = whole.num_kv_shared_layers, whole.hidden_size_per_layer_input
    wide = whole.intermediate_size * 2 if whole.use_double_wide_mlp and readers else None
    return {
        **_gemma4_heads(whole),
        "keys_as_values": whole.attention_k_eq_v,
        "qk_norm": True,
        "value_norms": True,
        "sandwich_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": whole.hidden_size**0.5,
        "attention_scale": 1.0,
        "num_kv_readers": readers,
        "reader_intermediate_size": wide,
        "own_input_size": inputs,
        "own_input_vocab_size": whole.vocab_size_per_layer_input if inputs else 0,
        "layer_scales": True,
        "logits_softcap": whole.final_logit_softcapping,
        **(_gemma4_experts(whole) if whole.enable_moe_block else {}),
    }


def _gemma4_experts(whole: Any) -> dict[str, Any]:
    sizes = {
        "num_experts": whole.num_local_experts,
        "top_k_experts": whole.num_experts_per_tok,
        "moe_intermediate_size": whole.moe_intermediate_size,
    }
    for name, size in sizes.items():
        if not size:
            raise ConfigError(f"The model's config lacks {name}.")
    return _experts(whole, whole.moe_intermediate_size, renormalise=True, next_to_mlp=True)


def _gemma4_heads(whole: Any) -> dict[str, Any]:
    """Those of layers without a window, in either spelling."""
    heads = whole.global_head_dim, None
    if whole.attention_k_eq_v:
        heads = whole.global_head_dim, whole.num_global_key_value_heads
    if whole.per_layer_config is not None:
        names = tuple(_GLOBAL_HEADS)
        full = [i for i, kind in enumerate(whole.layer_types) if kind == FULL]
        said = {int(i): values for i, values in whole.per_layer_config.items() if i.isdigit()}
        same = {tuple(said.get(i, {}).get(name) for name in names) for i in full}
        if len(same) > 1 or said.keys() - set(full) or any(_others(said, names)):
            raise UnsupportedModelError(
                "per_layer_config that is not of full-attention layers' heads, alike in all of "
                "them, is not supported."
            )
        heads = next(iter(same), (None, None))
    return {"full_head_dim": heads[0], "full_kv_heads": heads[1]}


def _others(said: Mapping[int, Mapping[str, int]], names: tuple[str, ...]) -> Iterator[str]:
    return (name for values in said.values() for name in values if name not in names)


_QWEN3_5 = Family(
    model_type="qwen3_5_text",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    biases=("attention_bias",),
    recurs="gated delta rule",
    sees_images=True,
    rotates_partly=True,
    flags=_qwen3_5_flags,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe_text",
    required=_OTHER_SIZES,
    defaults={
        **_QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    flags=_qwen3_5_moe_flags,
)
_QWEN3_NEXT = replace(
    _QWEN3_5,
    model_type="qwen3_next",
    defaults={
        **_QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "num_local_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    sees_images=False,
    flags=_qwen3_next_flags,
)
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = Family(
    model_type="gemma2",
    # Published files of Gemma 3 leave out the others.
    required=("hidden_size", "intermediate_size", "num_hidden_layers"),
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    refused=("use_bidirectional_attention",),
    biases=("attention_bias",),
    ignored=("sliding_window_pattern",),
    heads_divide_hidden=True,
    windows="by_layer",
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    flags=_gemma2_flags,
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_parameters": {FULL: {}},
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
    },
    refused=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    ignored=(),
    ropes_by_layer=True,
    sees_images=True,
    flags=_gemma3_flags,
)
_GEMMA4 = Family(
    model_type="gemma4_text",
    required=("hidden_size", "intermediate_size", "num_hidden_layers"),
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
        "rope_theta": 1_000_000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "enable_moe_block": False,
        "num_experts_per_tok": None,  # which is said where there are experts
    },
    biases=("attention_bias",),
    windows="by_layer",
    ends_full=True,
    ropes_by_layer=True,
    sees_images=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    spellings={"top_k_experts": "num_experts_per_tok"},
    flags=_gemma4_flags,
    names={"router": "router.proj", "experts": "experts"},
    rope_kinds=("default", "linear", "proportional"),
)
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_GRANITE_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE_MOE = Family(
    model_type="granitemoe",
    defaults=_GRANITE_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2},
    biases=("attention_bias",),
    flags=_granite_moe_flags,
    names={
        "router": "block_sparse_moe.router.layer",
        "experts": "block_sparse_moe",
        "shared": "shared_mlp",
    },
    renamed={".router.weight": ".router.layer.weight"},
)
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
}
_LFM2_NAMES = {
    "input_norm": "operator_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "out": "self_attn.out_proj",
    "mlp_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "norm": "embedding_norm",
}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama", biases=("attention_bias", "mlp_bias"), heads_divide_hidden=True
    ),
    "MistralForCausalLM": Family(model_type="mistral", defaults=_MISTRAL_DEFAULTS, windows="one"),
    "Mistral3ForConditionalGeneration": Family(
        model_type="mistral", defaults=_MISTRAL_DEFAULTS, windows="one", sees_images=True
    ),
    "Ministral3ForCausalLM": Family(
        model_type="ministral3",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _MINISTRAL3_ROPE,
        },
        windows="one",
        sees_images=True,
        flags=lambda whole: {
            "query_growth": whole.rope_parameters.get("llama_4_scaling_beta") or 0.0
        },
    ),
    # It has a bias on q, k and v without saying so.
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        defaults=_QWEN_DEFAULTS,
        windows="switched",
        flags=lambda _: {"qkv_bias": True},
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        biases=("attention_bias",),
        windows="switched",
        flags=lambda _: {"qk_norm": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        defaults={
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
        },
        biases=("attention_bias",),
        refused=("use_sliding_window",),
        flags=lambda whole: {"qk_norm": True} | _qwen_experts(whole),
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        defaults={
            "num_key_value_heads": 16,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
            "qkv_bias": True,
        },
        refused=("use_sliding_window",),
        ignored=("sliding_window",),
        flags=_qwen2_moe_flags,
    ),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        defaults={
            "rms_norm_eps": 1e-5,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        biases=("attention_bias",),
        refused=("clip_qkv",),
        flags=_olmoe_flags,
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": _GPT_OSS_ROPE,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        biases=("attention_bias",),
        ignored=("sliding_window_pattern",),
        windows="by_layer",
        flags=_gpt_oss_flags,
        names={"router": "mlp.router"},
        fused_experts="turns",
        quantization="mxfp4",
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        defaults={
            "rms_norm_eps": 1e-5,
            # The file's own field goes before that of the rope.
            "original_max_position_embeddings": 4096,
        },
        windows="one",
        names={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        rope_kinds=("default", "longrope"),
        rotates_partly=True,
    ),
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        defaults={"rms_norm_eps": 1e-5},
        biases=("attention_bias",),
        flags=_olmo2_flags,
    ),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_parameters": {FULL: {}},
            "rope_theta": 500_000.0,
            "rope_local_base_freq": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        biases=("attention_bias",),
        ignored=("sliding_window_pattern", "rope_local_base_freq"),
        windows="by_layer",
        ropes_by_layer=True,
        flags=_olmo2_flags,
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        windows="by_layer",
        flags=_exaone4_flags,
    ),
    "ArceeForCausalLM": Family(
        model_type="arcee",
        defaults={"rms_norm_eps": 1e-5},
        biases=("attention_bias", "mlp_bias"),
        heads_divide_hidden=True,
        activation=("hidden_act", "relu2"),
        flags=lambda _: {"activation": "squared_relu"},
    ),
    "Ernie4_5ForCausalLM": Family(
        model_type="ernie4_5",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
            "use_bias": False,
        },
        flags=lambda whole: dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), whole.use_bias),
        pairs_heads=True,
    ),
    "HeliumForCausalLM": Family(
        model_type="helium",
        defaults={
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100_000.0,
        },
        biases=("attention_bias", "mlp_bias"),
        flags=lambda _: {"output_bias": False},
        pairs_heads=True,
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        biases=("attention_bias",),
        flags=lambda _: {"output_bias": False, "sandwich_norms": True},
        names={"gate_up": "mlp.gate_up_proj"},
        renamed={
            ".post_attention_layernorm": ".pre_feedforward_layernorm",
            ".post_self_attn_layernorm": ".post_attention_layernorm",
            ".post_mlp_layernorm": ".post_feedforward_layernorm",
        },
        rotates_partly=True,
        pairs_heads=True,
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        biases=("attention_bias", "mlp_bias"),
        flags=lambda whole: {"output_bias": whole.attention_out_bias},
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
        },
        biases=("attention_bias", "mlp_bias"),
        windows="unrotated",
        flags=lambda whole: {"unrotated_layers": _unrotated(whole)},
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        defaults=_GRANITE_DEFAULTS,
        biases=("attention_bias", "mlp_bias"),
        flags=_granite_flags,
    ),
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": replace(
        _GRANITE_MOE,
        model_type="granitemoeshared",
        defaults={**_GRANITE_MOE.defaults, "shared_intermediate_size": 0},
    ),
    "GraniteMoeHybridForCausalLM": replace(
        _GRANITE_MOE,
        model_type="granitemoehybrid",
        defaults=_GRANITE_DEFAULTS
        | {
            "num_experts_per_tok": 2,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_head": "auto",
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        required=(*_OTHER_SIZES, "shared_intermediate_size", "num_local_experts", "layer_types"),
        recurs="Mamba-2",
        flags=_granite4_flags,
        # Of the shared expert, which is all that there is where there are no others.
        names={
            **_GRANITE_MOE.names,
            **{one: f"shared_mlp.{one}_proj" for one in ("gate", "up", "down")},
        },
    ),
    "NemotronHForCausalLM": Family(
        model_type="nemotron_h",
        required=tuple(size for size in _SIZES if size != "num_hidden_layers"),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_n_groups": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        biases=("mlp_bias",),
        refused=("attention_bias", "sliding_window"),
        ignored=("mamba_proj_bias",),
        recurs="Mamba-2",
        lone_parts=True,
        spellings={
            "mamba_num_heads": "mamba_n_heads",
            "n_groups": "mamba_n_groups",
            "mamba_head_dim": "mamba_d_head",
            "ssm_state_size": "mamba_d_state",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
            "use_bias": "mamba_proj_bias",
            "layer_norm_epsilon": "rms_norm_eps",
            "layers_block_type": "layer_types",
        },
        activation=("mlp_hidden_act", "relu2"),
        flags=_nemotron_h_flags,
        names={
            "input_norm": "norm",
            "mlp_norm": "norm",
            "attention": "mixer",
            "mamba": "mixer",
            "out": "mixer.o_proj",
            "up": "mixer.up_proj",
            "down": "mixer.down_proj",
        },
        renamed={
            "backbone.": "model.",
            "model.embeddings.": "model.embed_tokens.",
            "model.norm_f.": "model.norm.",
        },
    ),
    "Lfm2ForCausalLM": Family(
        model_type="lfm2",
        defaults=_LFM2_DEFAULTS
        | {
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        convolves=True,
        spellings={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
        flags=_lfm2_flags,
        names=_LFM2_NAMES,
    ),
    "Lfm2MoeForCausalLM": Family(
        model_type="lfm2_moe",
        required=(*_SIZES, "layer_types"),
        defaults=_LFM2_DEFAULTS
        | {
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "num_dense_layers": 2,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
        convolves=True,
        spellings={"tie_embedding": "tie_word_embeddings"},
        flags=_lfm2_moe_flags,
        names=_LFM2_NAMES
        | {
            "router": "feed_forward.gate",
            "experts": "feed_forward.experts",
            "selection_bias": "feed_forward.expert_bias",
        },
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
}


# Architectures that see images, of whose parts that read text some are of another family.
_TEXT_ARCHITECTURES: dict[tuple[str, object], str] = {
    ("Mistral3ForConditionalGeneration", "ministral3"): "Ministral3ForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HFConfig:
    """The part of a config.json that describes the text model.

    `given` are the fields that the file has, checked; `whole` all that the family knows. Of ropes
    there is one, or one by the type of layer. `layer_windows` has an entry for each layer.
    """

    architecture: str
    given: Mapping[str, Any]
    whole: Any
    ropes: Mapping[str, Mapping[str, Any]]
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str | None

    @property
    def flags(self) -> dict[str, Any]:
        """Fields of `ModelConfig` in which the family differs from others."""
        family = FAMILIES[self.architecture]
        biases = ("attention_bias", "mlp_bias")
        attention, mlp = [name in family.biases and getattr(self.whole, name) for name in biases]
        found = {"qkv_bias": attention, "output_bias": attention, "mlp_bias": mlp}
        return found | family.flags(self.whole)


def read_hf_config(source: Mapping[str, Any]) -> HFConfig:
    """Reads a config.json's object.

    Raises `UnsupportedModelError` naming what is not supported, `ConfigError` for a missing or
    wrong field.
    """
    architecture = known_architecture(source.get("architectures"))
    if FAMILIES[architecture].sees_images:
        text = _text_config(source)
        if text is not source:
            architecture = _text_architecture(architecture, text.get("model_type"))
        source = text
    family = FAMILIES[architecture]
    _refuse_unsupported(family, source)
    source = {name: value for name, value in source.items() if name not in family.ignored}
    given = _read(_FIELDS, source) | _given_ropes(family, source)
    if "num_experts" in given:  # another spelling
        given["num_local_experts"] = given.pop("num_experts")
    # Null means that there is none, which families differ on where nothing is said.
    if "sliding_window" in source and source["sliding_window"] is None:
        given["sliding_window"] = None
    given |= {ours: given[theirs] for theirs, ours in family.spellings.items() if theirs in given}
    if family.lone_parts:
        given |= _whole_layers(given)
    for name in family.required:
        if name not in given:
            raise ConfigError(f"The model's config lacks {name}.")
    _check_layer_types(family, given)
    rotates = given.get("no_rope_layers")
    if rotates is not None and len(rotates) != given["num_hidden_layers"]:
        raise ConfigError("no_rope_layers in the model's config must have an entry for each layer.")
    whole = _whole(family, given)
    ropes = whole.rope_parameters
    return HFConfig(
        architecture=architecture,
        given=given,
        whole=whole,
        ropes=ropes if family.ropes_by_layer else {FULL: ropes},
        layer_windows=_layer_windows(family, whole),
        eos_token_ids=token_ids(source),
        checkpoint_dtype=_checkpoint_dtype(source),
    )


def known_architecture(names: object) -> str:
    """The first of them that is supported. Raises `UnsupportedModelError`."""
    listed = cast("list[object]", names) if isinstance(names, list) else []
    for name in listed:
        if isinstance(name, str) and name in FAMILIES:
            return name
    raise UnsupportedModelError(
        f"The architecture {', '.join(map(str, listed)) or '(none named)'} is not supported. "
        f"Supported: {', '.join(FAMILIES)}."
    )


def read_fields(
    readers: Mapping[str, TypeAdapter[Any]], source: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of those names that are given, as null is not. Raises `ConfigError`."""
    given = {name: source[name] for name in readers if source.get(name) is not None}
    try:
        return {name: check(readers[name], name, value) for name, value in given.items()}
    except FieldError as error:
        raise ConfigError(f"{error.field} in the model's config {error.problem}") from None


def _read(hints: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    return read_fields({name: adapter(hint) for name, hint in hints.items()}, source)


def token_ids(source: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, of either file. Raises `ConfigError`."""
    name = "eos_token_id"
    value = source.get(name)
    listed = {name: value if isinstance(value, list) else [value]}
    return () if value is None else tuple(_read({name: list[TokenId]}, listed)[name])


def _text_config(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that reads images too: the part that reads text, with what is said of both."""
    text = _read({"text_config": dict[str, Any]}, source).get("text_config")
    if text is None:
        return source
    outer = {name: source[name] for name in _OUTER_FIELDS if source.get(name) is not None}
    return text | outer


def _text_architecture(outer: str, text_type: object) -> str:
    """The architecture of that part, which may be another's. Raises `UnsupportedModelError`."""
    if text_type in (None, FAMILIES[outer].model_type):
        return outer
    if (outer, text_type) in _TEXT_ARCHITECTURES:
        return _TEXT_ARCHITECTURES[outer, text_type]
    raise UnsupportedModelError(f"A text_config of {text_type!r} is not supported in {outer}.")


def _refuse_unsupported(family: Family, source: Mapping[str, Any]) -> None:
    quantization = source.get("quantization_config")
    if quantization is not None and not _is_known(family, quantization):
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


def _is_known(family: Family, quantization: object) -> bool:
    method = cast("dict[str, object]", quantization).get("quant_method", "")
    return family.quantization is not None and method == family.quantization


def _given_ropes(family: Family, source: Mapping[str, Any]) -> dict[str, Any]:
    """The ropes in either spelling, with checked fields. Raises `UnsupportedModelError`."""
    ropes = _read(dict.fromkeys(("rope_parameters", "rope_scaling"), dict[str, Any]), source)
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
    given = _read(dict.fromkeys((FULL, SLIDING), dict[str, Any]), ropes)
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
    return _read(_ROPE_FIELDS, rope) | {"rope_type": kind}


def _whole_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of a mixer, and of the MLP that follows it: `bare_layers` are those without one."""
    pattern = [_LETTERS.get(one, one) for one in given.get("hybrid_override_pattern", "")]
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
    known = (FULL, CONV if family.convolves else LINEAR if family.recurs else SLIDING)
    if unknown := [kind for kind in types if kind not in known]:
        raise UnsupportedModelError(
            f"layer_types {unknown[0]!r} is not supported. Supported: {', '.join(known)}."
        )
    if len(types) != given["num_hidden_layers"]:
        raise ConfigError(
            "layer_types in the model's config must have an entry for each of "
            f"{given['num_hidden_layers']} layers (num_hidden_layers), got {len(types)}."
        )


def _whole(family: Family, given: dict[str, Any]) -> SimpleNamespace:
    """The fields with nothing left to defaults, in one spelling. Raises `ConfigError`."""
    whole = SimpleNamespace(**_DEFAULTS | dict(family.defaults) | given)
    size, heads = whole.hidden_size, whole.num_attention_heads
    if family.heads_divide_hidden and size % heads:
        raise ConfigError(
            f"hidden_size in the model's config must be a multiple of num_attention_heads ({heads})"
            f", got {size}."
        )
    if whole.num_key_value_heads is None:
        whole.num_key_value_heads = heads
    if whole.head_dim is None:
        whole.head_dim = size // heads
    if family.windows == "switched" and not whole.use_sliding_window:
        whole.sliding_window = None
    whole.layer_types = given.get("layer_types") or _default_layer_types(family, whole)
    if family.ends_full:
        whole.layer_types = [*whole.layer_types[:-1], FULL]
    ropes = _ropes_of_types(whole, given) if family.ropes_by_layer else _one_rope(whole, given)
    original = "original_max_position_embeddings"
    if original in family.defaults and ropes["rope_type"] != "default":
        ropes[original] = getattr(whole, original)
    whole.rope_parameters = ropes
    return whole


def _default_layer_types(family: Family, whole: SimpleNamespace) -> list[str]:
    """The type of each layer where the file names none; empty where all are alike."""
    layers = range(whole.num_hidden_layers)
    if family.windows == "by_layer":
        pattern = whole.sliding_window_pattern
        every = len(pattern) if isinstance(pattern, str) else pattern
        return [SLIDING if (i + 1) % every else FULL for i in layers]
    if family.windows == "unrotated":
        slides = _unrotated(whole) if whole.use_sliding_window and whole.sliding_window else ()
        return [SLIDING if i in slides else FULL for i in layers]
    if family.windows == "switched":
        first = whole.num_hidden_layers if whole.sliding_window is None else whole.max_window_layers
        return [SLIDING if i >= first else FULL for i in layers]
    if family.convolves and whole.full_attn_idxs is not None:
        return [FULL if i in whole.full_attn_idxs else CONV for i in layers]
    if family.recurs:
        return [LINEAR if (i + 1) % whole.full_attention_interval else FULL for i in layers]
    return []


def _one_rope(whole: SimpleNamespace, given: Mapping[str, Any]) -> dict[str, Any]:
    rope = given.get("rope_scaling") or whole.rope_parameters
    factor = getattr(whole, "partial_rotary_factor", None)
    outer = {} if factor is None else {"partial_rotary_factor": factor}
    return _whole_rope(whole, outer | rope, whole.rope_theta)


def _ropes_of_types(whole: SimpleNamespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """The rope of each type of layer; `rope_scaling` is that of full attention."""
    ropes: dict[str, dict[str, Any]] = whole.rope_parameters
    scaling = given.get("rope_scaling", {})
    if scaling and FULL not in ropes:
        raise ConfigError(
            f"The model's config has rope_scaling, and rope_parameters without {FULL}."
        )
    full, local = ropes.get(FULL, {}) | scaling, ropes.get(SLIDING, {})
    return {
        FULL: _whole_rope(whole, full, whole.rope_theta),
        SLIDING: _whole_rope(whole, local, whole.rope_local_base_freq),
    }


def _whole_rope(whole: SimpleNamespace, rope: Mapping[str, Any], theta: float) -> dict[str, Any]:
    found = {"rope_type": "default", "rope_theta": theta, **rope}
    if found["rope_type"] in ("llama3", "yarn", "longrope"):
        found.setdefault("original_max_position_embeddings", whole.max_position_embeddings)
    return found


def _layer_windows(family: Family, whole: Any) -> tuple[int | None, ...]:
    """The window of each layer. Raises `ConfigError` where fields contradict each other."""
    window = None if family.windows == "none" else whole.sliding_window
    if family.windows == "unrotated" and not whole.use_sliding_window:
        window = None
    types: list[str] = whole.layer_types
    if family.windows in ("none", "one") or not types:
        alike = FULL if window is None else SLIDING
        if any(kind not in (alike, CONV, LINEAR) for kind in types):
            raise UnsupportedModelError(
                f"layer_types that are not all {alike} are not supported for {family.model_type} "
                f"with sliding_window {window}."
            )
        types = [alike] * whole.num_hidden_layers
    if SLIDING in types and window is None:
        raise ConfigError(
            f"sliding_window in the model's config is null, and layer_types names {SLIDING}."
        )
    return tuple(window if kind == SLIDING else None for kind in types)


def _checkpoint_dtype(source: Mapping[str, Any]) -> str | None:
    name = source.get("dtype") or source.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")
