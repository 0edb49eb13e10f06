"""Llama, and dense models that differ from it in what flags say."""

from __future__ import annotations

from prefixcache.config.family import Family, GgufRow

FAMILIES = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        biases=("attention_bias", "mlp_bias"),
        heads_divide_hidden=True,
        gguf=GgufRow(architecture="llama", pairs_rows=True),
    ),
    "ArceeForCausalLM": Family(
        model_type="arcee",
        defaults={"rms_norm_eps": 1e-5},
        biases=("attention_bias", "mlp_bias"),
        heads_divide_hidden=True,
        activation=("hidden_act", "relu2"),
        flags=lambda _: {"activation": "squared_relu"},
        gguf=GgufRow(architecture="arcee", pairs_rows=True),
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
        flags=lambda fields: dict.fromkeys(
            ("qkv_bias", "output_bias", "mlp_bias"), fields.use_bias
        ),
        pairs_heads=True,
        gguf=GgufRow(
            architecture="ernie4_5", config=lambda _, config: {"use_bias": config["mlp_bias"]}
        ),
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
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        biases=("attention_bias", "mlp_bias"),
        flags=lambda fields: {"output_bias": fields.attention_out_bias},
        gguf=GgufRow(
            architecture="seed_oss", modules={"post_attention_norm": "post_attention_layernorm"}
        ),
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
        flags=lambda fields: {"unrotated_layers": fields.unrotated_layers()},
        gguf=GgufRow(architecture="smollm3", pairs_rows=True),
    ),
}
