"""Qwen 2 and 3, dense and of experts; Qwen3-Next and 3.5 with the gated delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prefixcache.config.family import OTHER_SIZES, Family, GgufModel, GgufRow
from prefixcache.config.hf_fields import LINEAR, HFFields


def _experts(fields: HFFields, **more: Any) -> dict[str, Any]:
    """Layers are dense that are named so, and but for each `decoder_sparse_step`-th."""
    layers = range(fields.num_hidden_layers)
    step, named = fields.decoder_sparse_step, fields.mlp_only_layers
    dense = tuple(i for i in layers if i in named or (i + 1) % step)
    more |= {"renormalise": fields.norm_topk_prob, "dense_layers": dense}
    experts = fields.experts(fields.moe_intermediate_size, **more)
    return experts if len(dense) < len(layers) else {}


def _weighed_expert(fields: HFFields) -> dict[str, Any]:
    return {"shared_size": fields.shared_expert_intermediate_size, "shared_weight": True}


def _qwen3_5_flags(fields: HFFields) -> dict[str, Any]:
    flags: dict[str, Any] = {"qk_norm": True, "norm_offset": 1.0, "output_gate": True}
    if layers := fields.layers_of(LINEAR):
        flags["delta"] = {
            "layers": layers,
            "key_heads": fields.linear_num_key_heads,
            "value_heads": fields.linear_num_value_heads,
            "key_dim": fields.linear_key_head_dim,
            "value_dim": fields.linear_value_head_dim,
            "taps": fields.linear_conv_kernel_dim,
            "tiled": fields.linear_heads_tiled,
        }
    return flags


def _qwen3_5_moe_flags(fields: HFFields) -> dict[str, Any]:
    size, shared = fields.moe_intermediate_size, _weighed_expert(fields)
    experts = fields.experts(size, renormalise=True, **shared)
    # No layer has an MLP of its own.
    return _qwen3_5_flags(fields) | experts | {"intermediate_size": shared["shared_size"]}


def _qwen3_next_flags(fields: HFFields) -> dict[str, Any]:
    flags = _qwen3_5_flags(fields) | _experts(fields, **_weighed_expert(fields))
    if "delta" in flags:
        flags["delta"] |= {"by_key_head": True, "qkvz_apart": fields.linear_qkvz_apart}
    return flags


def _delta_gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """Layers that guess stand behind the others, and Qwen3.5's value heads of a key head apart."""
    value_heads = model.shape("ssm.time_step_rank")
    guessing = model.shape("nextn_predict_layers", 0)
    return model.partly_rotated(config) | {
        "num_hidden_layers": config["num_hidden_layers"] - guessing,
        "full_attention_interval": model.shape("full_attention_interval", 4),
        "linear_conv_kernel_dim": model.shape("ssm.conv_kernel"),
        "linear_key_head_dim": model.shape("ssm.state_size"),
        "linear_value_head_dim": model.shape("ssm.inner_size") // value_heads,
        "linear_num_key_heads": model.shape("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_heads_tiled": True,
    }


def _qwen3_next_gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    apart = any(name.endswith(".attn_gate.weight") for name in model.tensors)
    own = {"linear_heads_tiled": False, "linear_qkvz_apart": apart}
    return _delta_gguf(model, config) | own


_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_MOE_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}
_DELTA_MODULES = {"post_attention_norm": "post_attention_layernorm"}
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
    gguf=GgufRow(
        architecture="qwen35", config=_delta_gguf, modules=_DELTA_MODULES, norm_offset=1.0
    ),
)
_QWEN3_5_EXPERTS = {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe_text",
    required=OTHER_SIZES,
    defaults={**_QWEN3_5.defaults, **_QWEN3_5_EXPERTS},
    flags=_qwen3_5_moe_flags,
    gguf=GgufRow(
        architecture="qwen35moe",
        config=_delta_gguf,
        renormalise=True,
        modules=_DELTA_MODULES,
        norm_offset=1.0,
    ),
)
FAMILIES = {
    # It has a bias on q, k and v without saying so.
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        defaults=_DEFAULTS,
        windows="switched",
        flags=lambda _: {"qkv_bias": True},
        gguf=GgufRow(architecture="qwen2"),
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        defaults={
            **_MOE_DEFAULTS,
            "num_key_value_heads": 16,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        refused=("use_sliding_window",),
        ignored=("sliding_window",),
        flags=lambda fields: (
            {"qkv_bias": fields.qkv_bias} | _experts(fields, **_weighed_expert(fields))
        ),
        gguf=GgufRow(architecture="qwen2moe", renormalise=False),
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults=_DEFAULTS | {"head_dim": 128},
        biases=("attention_bias",),
        windows="switched",
        flags=lambda _: {"qk_norm": True},
        gguf=GgufRow(architecture="qwen3"),
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        defaults={
            **_MOE_DEFAULTS,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        biases=("attention_bias",),
        refused=("use_sliding_window",),
        flags=lambda fields: {"qk_norm": True} | _experts(fields),
        gguf=GgufRow(architecture="qwen3moe", renormalise=True),
    ),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5,
        model_type="qwen3_next",
        defaults={
            **_QWEN3_5.defaults,
            **_QWEN3_5_EXPERTS,
            **_MOE_DEFAULTS,
            "num_local_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        sees_images=False,
        flags=_qwen3_next_flags,
        gguf=GgufRow(
            architecture="qwen3next",
            config=_qwen3_next_gguf,
            renormalise=True,
            modules=_DELTA_MODULES,
            norm_offset=1.0,
        ),
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
}
