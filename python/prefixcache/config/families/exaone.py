"""EXAONE 4."""

from __future__ import annotations

from typing import Any

from prefixcache.config.family import NORMS_AFTER, Family, GgufModel, GgufRow
from prefixcache.config.hf_fields import FULL, HFFields


def _flags(fields: HFFields) -> dict[str, Any]:
    """Layers without a window do not rotate where others have one."""
    unrotated = () if fields.sliding_window is None else fields.layers_of(FULL)
    norms = {"qk_norm": True, "input_norms": False, "sandwich_norms": True}
    return norms | {"unrotated_layers": unrotated}


FAMILIES = {
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        windows="by_layer",
        flags=_flags,
        gguf=GgufRow(architecture="exaone4", config=GgufModel.windows, modules=NORMS_AFTER),
    ),
}
