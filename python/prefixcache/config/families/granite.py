"""Granite: dense, of experts, and Granite 4 with Mamba-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prefixcache.config.family import OTHER_SIZES, Family, GgufModel, GgufRow
from prefixcache.config.hf_fields import LINEAR, HFFields
from prefixcache.exceptions import ConfigError

_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _granite_flags(fields: HFFields) -> dict[str, Any]:
    return {
        "embedding_scale": fields.embedding_multiplier,
        "attention_scale": fields.attention_multiplier,
        "residual_scale": fields.residual_multiplier,
        "logits_divisor": fields.logits_scaling,
    }


def _moe_flags(fields: HFFields) -> dict[str, Any]:
    size, shared = fields.intermediate_size, fields.shared_intermediate_size
    return _granite_flags(fields) | fields.experts(size, renormalise=True, shared_size=shared)


def _hybrid_flags(fields: HFFields) -> dict[str, Any]:
    heads, values = fields.mamba_n_heads, fields.mamba_expand * fields.hidden_size
    head_dim = values // heads if fields.mamba_d_head == "auto" else fields.mamba_d_head
    if LINEAR in fields.layer_types and heads * head_dim != values:
        raise ConfigError(
            f"mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) in the model's config must "
            f"be mamba_expand times hidden_size ({values})."
        )
    flags = _moe_flags(fields) | fields.mamba(head_dim)
    if not fields.num_local_experts:
        flags["intermediate_size"] = fields.shared_intermediate_size
    if fields.position_embedding_type != "rope":
        flags["unrotated_layers"] = tuple(range(fields.num_hidden_layers))
    return flags


def _multipliers(model: GgufModel) -> dict[str, Any]:
    return {ours: model.decimal(key, 1.0) for ours, key in _KEYS.items()}


def _granite_gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    given = _multipliers(model)
    shared = model.shape("expert_shared_feed_forward_length", 0)
    if not shared:
        return given
    name = config["architectures"][0].replace("Moe", "MoeShared")
    return given | {"architectures": [name], "shared_intermediate_size": shared}


def _hybrid_gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    count = model.shape("expert_count", 0)
    experts = model.experts(renormalise=True) if count else {}
    multipliers = _multipliers(model)
    shared = model.shape("expert_shared_feed_forward_length", config["intermediate_size"])
    rotates = model.shape("rope.scaling.finetuned", True)
    return {
        **experts,
        **multipliers,
        **model.layers_without_heads(config, LINEAR),
        **model.mamba(config),
        "num_local_experts": count,
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if rotates else "nope",
    }


_DEFAULTS = dict.fromkeys(_KEYS, 1.0)
_MOE = Family(
    model_type="granitemoe",
    defaults=_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2},
    biases=("attention_bias",),
    flags=_moe_flags,
    names={
        "router": "block_sparse_moe.router.layer",
        "experts": "block_sparse_moe",
        "shared": "shared_mlp",
    },
    renamed={".router.weight": ".router.layer.weight"},
    gguf=GgufRow(
        architecture="granitemoe", config=_granite_gguf, renormalise=True, pairs_rows=True
    ),
)
FAMILIES = {
    "GraniteForCausalLM": Family(
        model_type="granite",
        defaults=_DEFAULTS,
        biases=("attention_bias", "mlp_bias"),
        flags=_granite_flags,
        gguf=GgufRow(architecture="granite", config=_granite_gguf, pairs_rows=True),
    ),
    "GraniteMoeForCausalLM": _MOE,
    "GraniteMoeSharedForCausalLM": replace(_MOE, model_type="granitemoeshared"),
    "GraniteMoeHybridForCausalLM": replace(
        _MOE,
        model_type="granitemoehybrid",
        defaults=_DEFAULTS
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
        required=(*OTHER_SIZES, "shared_intermediate_size", "num_local_experts", "layer_types"),
        recurs="Mamba-2",
        flags=_hybrid_flags,
        # Of the shared expert, which is all that there is where there are no others.
        names={
            **_MOE.names,
            **{part: f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        gguf=GgufRow(architecture="granitehybrid", config=_hybrid_gguf, pairs_rows=True),
    ),
}
