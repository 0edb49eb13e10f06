"""Llama, and dense models that differ from it in what flags say."""

from __future__ import annotations

from typing import Any

from prefixcache.config.family import Family, unrotated_layers
from prefixcache.config.gguf_row import GgufModel, GgufRow
from prefixcache.config.hf_fields import HFFields


def _arcee_gguf(_model: GgufModel, _config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _ernie_flags(fields: HFFields) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), fields.use_bias)


def _ernie_gguf(_model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": config["mlp_bias"]}


def _smollm3_flags(fields: HFFields) -> dict[str, Any]:
    return {"unrotated_layers": unrotated_layers(fields)}


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
        gguf=GgufRow(architecture="arcee", config=_arcee_gguf, pairs_rows=True),
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
        flags=_ernie_flags,
        pairs_heads=True,
        gguf=GgufRow(architecture="ernie4_5", config=_ernie_gguf),
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
        flags=_smollm3_flags,
        gguf=GgufRow(architecture="smollm3", pairs_rows=True),
    ),
}
