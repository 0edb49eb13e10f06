"""Mistral and Ministral. GGUF files of the former say that they are Llama's."""

from __future__ import annotations

from dataclasses import replace

from prefixcache.config.family import Family, GgufRow

_MISTRAL = Family(
    model_type="mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows="one",
)
FAMILIES = {
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(
        _MISTRAL, sees_images=True, text_families={"ministral3": "Ministral3ForCausalLM"}
    ),
    "Ministral3ForCausalLM": Family(
        model_type="ministral3",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        windows="one",
        sees_images=True,
        flags=lambda fields: {
            "query_growth": fields.rope_parameters.get("llama_4_scaling_beta") or 0.0
        },
        gguf=GgufRow(architecture="mistral3", pairs_rows=True),
    ),
}
