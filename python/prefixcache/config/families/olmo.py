"""OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from typing import Any

from prefixcache.config.family import NORMS_AFTER, Family, GgufModel, GgufRow
from prefixcache.config.hf_fields import FULL, SLIDING, HFFields


def _olmoe_flags(fields: HFFields) -> dict[str, Any]:
    size, renormalise = fields.intermediate_size, fields.norm_topk_prob
    return _QK_NORMS | fields.experts(size, renormalise=renormalise)


def _olmo2_gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 is OLMo 2 with windows; their layers turn by the rope without its scaling."""
    layers = model.windows(config)
    if not layers["sliding_window"]:
        return {}
    rope = config["rope_parameters"]
    local = {"rope_theta": rope["rope_theta"], "rope_type": "default"}
    return layers | {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {FULL: rope, SLIDING: local},
    }


_QK_NORMS = {"qk_norm": True, "whole_qk_norms": True}
_OLMO2_FLAGS = _QK_NORMS | {"input_norms": False, "sandwich_norms": True}
_OLMO2_GGUF = GgufRow(architecture="olmo2", config=_olmo2_gguf, modules=NORMS_AFTER)
FAMILIES = {
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        defaults={"rms_norm_eps": 1e-5},
        biases=("attention_bias",),
        flags=lambda _: _OLMO2_FLAGS,
        gguf=_OLMO2_GGUF,
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
        flags=lambda _: _OLMO2_FLAGS,
        gguf=_OLMO2_GGUF,
    ),
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
        gguf=GgufRow(architecture="olmoe", renormalise=False),
    ),
}
