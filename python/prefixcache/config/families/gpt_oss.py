"""gpt-oss."""

from __future__ import annotations

from typing import Any

from prefixcache.config.family import Family, GgufModel, GgufRow
from prefixcache.config.hf_fields import HFFields
from prefixcache.exceptions import UnsupportedModelError


def _flags(fields: HFFields) -> dict[str, Any]:
    for name, supported in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if (value := getattr(fields, name)) != supported:
            raise UnsupportedModelError(
                f"{name} {value!r} is not supported. Supported: {supported}."
            )
    size = fields.intermediate_size
    experts = fields.experts(size, renormalise=True, router_bias=True)
    return {"mlp_bias": True, "sinks": True, "activation": "clamped_swiglu"} | experts


def _gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """Every second layer has a window; YaRN's bounds are not whole numbers."""
    return {
        "intermediate_size": config["moe_intermediate_size"],
        "sliding_window": model.shape("attention.sliding_window"),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


FAMILIES = {
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
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
        flags=_flags,
        names={"router": "mlp.router"},
        fused_experts="turns",
        quantization="mxfp4",
        gguf=GgufRow(
            architecture="gpt-oss",
            config=_gguf,
            renormalise=True,
            modules={
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks": "self_attn.sinks",
            },
        ),
    ),
}
