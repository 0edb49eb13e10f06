"""Nemotron-H: layers of Mamba-2, of attention, or of an MLP alone."""

from __future__ import annotations

from typing import Any

from prefixcache.config.checked import is_list
from prefixcache.config.family import SIZES, Family, GgufModel, GgufRow
from prefixcache.config.hf_fields import LINEAR, HFFields
from prefixcache.exceptions import ModelLoadError


def _flags(fields: HFFields) -> dict[str, Any]:
    return fields.mamba(fields.mamba_d_head) | {
        "activation": "squared_relu",
        "bare_layers": fields.bare_layers,
        "unrotated_layers": tuple(range(fields.num_hidden_layers)),
    }


def _gguf(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """Layers of a feed-forward are MLPs, and have no heads either."""
    mixers = model.layers_without_heads(config, LINEAR)
    sizes = config["intermediate_size"]
    if not is_list(sizes) or len(sizes) != config["num_hidden_layers"]:
        raise ModelLoadError("its nemotron_h.feed_forward_length has no number for each layer.")
    kinds = zip(mixers.pop("layer_types"), sizes, strict=True)
    return {
        **mixers,
        **model.mamba(config),
        "intermediate_size": max(sizes),
        "layers_block_type": ["mlp" if size else kind for kind, size in kinds],
    }


FAMILIES = {
    "NemotronHForCausalLM": Family(
        model_type="nemotron_h",
        required=tuple(size for size in SIZES if size != "num_hidden_layers"),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_n_groups": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        biases=("mlp_bias",),
        refused=("attention_bias", "sliding_window"),
        ignored=("mamba_proj_bias",),
        recurs="Mamba-2",
        lone_parts=True,
        spellings={
            "mamba_num_heads": "mamba_n_heads",
            "n_groups": "mamba_n_groups",
            "mamba_head_dim": "mamba_d_head",
            "ssm_state_size": "mamba_d_state",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
            "use_bias": "mamba_proj_bias",
            "layer_norm_epsilon": "rms_norm_eps",
            "layers_block_type": "layer_types",
        },
        activation=("mlp_hidden_act", "relu2"),
        flags=_flags,
        names={
            "input_norm": "norm",
            "mlp_norm": "norm",
            "attention": "mixer",
            "mamba": "mixer",
            "out": "mixer.o_proj",
            "up": "mixer.up_proj",
            "down": "mixer.down_proj",
        },
        renamed={
            "backbone.": "model.",
            "model.embeddings.": "model.embed_tokens.",
            "model.norm_f.": "model.norm.",
        },
        gguf=GgufRow(architecture="nemotron_h", config=_gguf, pairs_rows=True),
    ),
}
