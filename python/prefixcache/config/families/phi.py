"""Phi-3 and 4, whose LongRoPE is that of the file."""

from __future__ import annotations

from typing import Any

from prefixcache.config.family import Family, GgufModel, GgufRow


def _gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    window = model.shape("attention.sliding_window", 0) or None
    return {"sliding_window": window} | model.partly_rotated(config)


FAMILIES = {
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        defaults={
            "rms_norm_eps": 1e-5,
            # The file's own field goes before that of the rope.
            "original_max_position_embeddings": 4096,
        },
        windows="one",
        exceeds_context=True,  # as in files of Phi-4
        names={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        rope_kinds=("default", "longrope"),
        rotates_partly=True,
        gguf=GgufRow(architecture="phi3", config=_gguf),
    ),
}
