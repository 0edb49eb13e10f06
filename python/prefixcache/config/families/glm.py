"""GLM-4."""

from __future__ import annotations

from prefixcache.config.family import Family, GgufModel, GgufRow

FAMILIES = {
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
        gguf=GgufRow(
            architecture="glm4",
            config=GgufModel.partly_rotated,
            modules={
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
        ),
    ),
}
