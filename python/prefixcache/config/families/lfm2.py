"""LFM2, dense and of experts: short convolutions in the place of most attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prefixcache.config.family import SIZES, Family, GgufModel, GgufRow
from prefixcache.config.hf_fields import CONV, HFFields


def _conv_flags(fields: HFFields) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "rms_norm_eps": fields.norm_eps,
        "conv_layers": fields.layers_of(CONV),
        "conv_taps": fields.conv_L_cache,
        "conv_bias": fields.conv_bias,
    }


def _intermediate_size(fields: HFFields) -> int:
    if not fields.block_auto_adjust_ff_dim:
        return fields.intermediate_size
    size = int(fields.block_ffn_dim_multiplier * int(2 * fields.intermediate_size / 3))
    return -(-size // fields.block_multiple_of) * fields.block_multiple_of


def _moe_flags(fields: HFFields) -> dict[str, Any]:
    dense = tuple(range(min(fields.num_dense_layers, fields.num_hidden_layers)))
    experts = fields.experts(
        fields.moe_intermediate_size,
        scores="sigmoid",
        selection_bias=fields.use_expert_bias,
        renormalise=fields.norm_topk_prob,
        added_to_sum=1e-6,
        scale=fields.routed_scaling_factor,
        dense_layers=dense,
    )
    return _conv_flags(fields) | (experts if len(dense) < fields.num_hidden_layers else {})


def _gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return model.layers_without_heads(config, CONV) | {
        "conv_L_cache": model.shape("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": model.shape("leading_dense_block_count", 0),
        "routed_scaling_factor": model.decimal("expert_weights_scale", 1.0),
    }


_DEFAULTS = {
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
}
_LFM2 = Family(
    model_type="lfm2",
    defaults={
        **_DEFAULTS,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    convolves=True,
    spellings={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    flags=lambda fields: _conv_flags(fields) | {"intermediate_size": _intermediate_size(fields)},
    names={
        "input_norm": "operator_norm",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "out": "self_attn.out_proj",
        "mlp_norm": "ffn_norm",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
        "norm": "embedding_norm",
    },
    gguf=GgufRow(architecture="lfm2", config=_gguf),
)
FAMILIES = {
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        model_type="lfm2_moe",
        required=(*SIZES, "layer_types"),
        defaults={
            **_DEFAULTS,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "num_dense_layers": 2,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
        spellings={"tie_embedding": "tie_word_embeddings"},
        flags=_moe_flags,
        names={
            **_LFM2.names,
            "router": "feed_forward.gate",
            "experts": "feed_forward.experts",
            "selection_bias": "feed_forward.expert_bias",
        },
        gguf=GgufRow(architecture="lfm2moe", config=_gguf, renormalise=True),
    ),
}
