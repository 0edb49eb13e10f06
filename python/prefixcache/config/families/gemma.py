"""Gemma 2, 3 and 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from prefixcache.config.checked import is_list
from prefixcache.config.family import NORMS_AFTER, Family, GgufModel, GgufRow, layer_types
from prefixcache.config.hf_fields import FULL, SLIDING, HFFields
from prefixcache.exceptions import ConfigError, ModelLoadError, UnsupportedModelError

# Of a head that layers without a window have, and how a file spells it for each of them.
_GLOBAL_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
# What llama.cpp knows of Gemma 2 and 3 without writing it: every how many layers one has no window,
# and the number of layers of the model whose attention is scaled by its width, not its heads'.
_PATTERNS = {"gemma2": 2, "gemma3": 6}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# Factors from here on, of Gemma 4's slowest pairs, stand for no rotation; others are 1.
_UNTURNED = 1e20


def _gemma2_flags(fields: HFFields) -> dict[str, Any]:
    return {
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": fields.hidden_size**0.5,
        "attention_scale": fields.query_pre_attn_scalar**-0.5,
        "attention_softcap": fields.attn_logit_softcapping,
        "logits_softcap": fields.final_logit_softcapping,
    }


def _gemma3_flags(fields: HFFields) -> dict[str, Any]:
    return _gemma2_flags(fields) | {"qk_norm": True}


def _gemma4_flags(fields: HFFields) -> dict[str, Any]:
    if fields.use_bidirectional_attention == "all":
        raise UnsupportedModelError(
            "use_bidirectional_attention 'all' is not supported. Supported: none, 'vision'."
        )
    readers, inputs = fields.num_kv_shared_layers, fields.hidden_size_per_layer_input
    wide = fields.intermediate_size * 2 if fields.use_double_wide_mlp and readers else None
    return {
        **_gemma4_heads(fields),
        "keys_as_values": fields.attention_k_eq_v,
        "qk_norm": True,
        "value_norms": True,
        "sandwich_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": fields.hidden_size**0.5,
        "attention_scale": 1.0,
        "num_kv_readers": readers,
        "reader_intermediate_size": wide,
        "own_input_size": inputs,
        "own_input_vocab_size": fields.vocab_size_per_layer_input if inputs else 0,
        "layer_scales": True,
        "logits_softcap": fields.final_logit_softcapping,
        **(_gemma4_experts(fields) if fields.enable_moe_block else {}),
    }


def _gemma4_experts(fields: HFFields) -> dict[str, Any]:
    sizes = {
        "num_experts": fields.num_local_experts,
        "top_k_experts": fields.num_experts_per_tok,
        "moe_intermediate_size": fields.moe_intermediate_size,
    }
    for name, size in sizes.items():
        if not size:
            raise ConfigError(f"The model's config lacks {name}.")
    size = fields.moe_intermediate_size
    return fields.experts(size, renormalise=True, next_to_mlp=True)


def _gemma4_heads(fields: HFFields) -> dict[str, Any]:
    """Those of layers without a window, in either spelling."""
    heads = fields.global_head_dim, None
    if fields.attention_k_eq_v:
        heads = fields.global_head_dim, fields.num_global_key_value_heads
    if fields.per_layer_config is not None:
        names = tuple(_GLOBAL_HEADS)
        full = fields.layers_of(FULL)
        said = {int(i): values for i, values in fields.per_layer_config.items() if i.isdigit()}
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


def _gemma2_gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    if num_layers == _LAYERS_OF_27B[model.architecture]:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    window = model.shape("attention.sliding_window", 0)
    pattern = _PATTERNS[model.architecture]
    slides = [bool(window and (i + 1) % pattern) for i in range(num_layers)]
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        "query_pre_attn_scalar": head_dim,
        **{name: cap for name in caps if (cap := model.shape(name, 0.0))},
        "sliding_window": window or None,
        "layer_types": layer_types(slides),
    }


def _gemma3_gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    ropes = {FULL: config["rope_parameters"], SLIDING: _local_rope(model)}
    return _gemma2_gguf(model, config) | {"rope_parameters": ropes}


def _local_rope(model: GgufModel) -> dict[str, Any]:
    """That of layers with a window."""
    theta = model.decimal("rope.freq_base_swa", 10_000.0)
    return {"rope_theta": theta, "rope_type": "default"}


def _gemma4_gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    slides: list[bool] = model.shape("attention.sliding_window_pattern")
    full = [i for i, has_window in enumerate(slides) if not has_window]
    if len(slides) != config["num_hidden_layers"] or not full:
        raise ModelLoadError("its gemma4.attention.sliding_window_pattern is not one of its layers")
    of_layers = {
        name: values if is_list(values := config[name]) else [values] * len(slides)
        for name in ("num_key_value_heads", "intermediate_size")
    }
    if any(len(values) != len(slides) for values in of_layers.values()):
        raise ModelLoadError("it lacks sizes of some of its layers.")
    heads, sizes = of_layers["num_key_value_heads"], of_layers["intermediate_size"]
    has_experts = bool(model.shape("expert_count", 0))
    turned = [factor < _UNTURNED for factor in model.factors.get("rope_freqs.weight", [1.0])]
    share = sum(turned) / len(turned)
    proportional = {"rope_type": "proportional", "partial_rotary_factor": share}
    sliding = next((i for i, has_window in enumerate(slides) if has_window), 0)
    return {
        "enable_moe_block": has_experts,
        **(model.experts(renormalise=None) if has_experts else {}),
        "head_dim": model.shape("attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": heads[sliding],
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in model.tensors,
        "num_kv_shared_layers": model.shape("attention.shared_kv_layers", 0),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "hidden_size_per_layer_input": model.shape("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": model.shape("final_logit_softcapping", 0.0) or None,
        "sliding_window": model.shape("attention.sliding_window"),
        "layer_types": layer_types(slides),
        "rope_parameters": {
            FULL: config["rope_parameters"] | proportional,
            SLIDING: _local_rope(model),
        },
    }


# Four norms a layer, of which two have the names of Llama's.
_MODULES = NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_DEFAULTS = {
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
        **_DEFAULTS,
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
    gguf=GgufRow(architecture="gemma2", config=_gemma2_gguf, modules=_MODULES, norm_offset=1.0),
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    defaults={
        **_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_parameters": {FULL: {}},
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
    },
    refused=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    ignored=(),
    ropes_by_layer=True,
    counts_scaling=True,
    sees_images=True,
    flags=_gemma3_flags,
    gguf=GgufRow(architecture="gemma3", config=_gemma3_gguf, modules=_MODULES, norm_offset=1.0),
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
    gguf=GgufRow(
        architecture="gemma4",
        config=_gemma4_gguf,
        modules={
            **_MODULES,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale": "layer_scalar",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        reads_factors=True,
    ),
)
FAMILIES = {
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
}
