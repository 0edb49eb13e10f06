"""GGUF files of a model family: how its row describes them, and what their headers say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixcache.config.hf_fields import FULL, SLIDING
from prefixcache.exceptions import ModelLoadError

NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Modules of norms of what attention and MLP add, by llama.cpp's names."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a file says of its model.

    `metadata` is the header's key-value part, `tensors` are the names of all tensors, and `factors`
    the numbers of those that divide the frequencies of rotated pairs.
    """

    metadata: Mapping[str, Any]
    tensors: Set[str] = frozenset()
    factors: Mapping[str, list[float]] = field(default_factory=dict[str, list[float]])

    @property
    def architecture(self) -> str:
        """llama.cpp's name of it."""
        return self.metadata.get("general.architecture", "")

    def shape(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture's own. Raises `ModelLoadError` without one."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"it lacks {self.architecture}.{key}.")
        return value

    def decimal(self, key: str, default: float) -> float:
        """A float32 as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self.shape(key, default))))


GgufConfig = Callable[[GgufModel, dict[str, Any]], dict[str, Any]]
"""Fields of a config.json that a family reads in its own way, from the file and common fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRow:
    """How llama.cpp writes a family's models, where that is not as Llama's."""

    architecture: str
    """llama.cpp's name; of two families with one name the first is meant, unless `config` says."""

    config: GgufConfig = lambda _model, _config: {}

    renormalise: bool | None = None
    """Whether the weights of a token's experts are divided by their sum, which no file says.

    None where not all models have experts.
    """

    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modules of a layer by llama.cpp's names, where the family's `names` do not say them."""

    pairs_rows: bool = False
    """Whether rows of queries and keys that are a rotated pair stand side by side."""

    norm_offset: float = 0.0
    """What weights of norms are greater by than in a checkpoint."""

    reads_factors: bool = False
    """Whether `config` reads `factors`: they are not those of a LongRoPE then."""


def experts_config(model: GgufModel, *, renormalise: bool | None) -> dict[str, Any]:
    """Sizes of experts. Raises `ModelLoadError` where they are missing."""
    size = model.shape("expert_feed_forward_length", model.shape("feed_forward_length"))
    shared = model.shape("expert_shared_feed_forward_length", 0) or None
    return {
        "shared_expert_intermediate_size": shared,
        "num_local_experts": model.shape("expert_count"),
        "num_experts_per_tok": model.shape("expert_used_count"),
        "moe_intermediate_size": size,
        "norm_topk_prob": renormalise,
    }


def layers_without_heads(model: GgufModel, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Layers without heads of keys are of this kind."""
    heads = config["num_key_value_heads"]
    if not isinstance(heads, list) or len(heads) != config["num_hidden_layers"]:
        key = f"{model.architecture}.attention.head_count_kv"
        raise ModelLoadError(f"its {key} has no number for each layer.")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if count else kind for count in heads],
    }


def mamba_config(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of Mamba-2."""
    values, heads = model.shape("ssm.inner_size"), model.shape("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_n_groups": model.shape("ssm.group_count"),
        "mamba_d_head": values // heads,
        "mamba_d_state": model.shape("ssm.state_size"),
        "mamba_d_conv": model.shape("ssm.conv_kernel"),
        "mamba_expand": values // config["hidden_size"],
    }


def partly_rotated(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """The part of a head that is turned."""
    rotated = model.shape("rope.dimension_count", config["head_dim"])
    part = {"partial_rotary_factor": rotated / config["head_dim"]}
    return {"rope_parameters": config["rope_parameters"] | part}


def windows(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """The window, and the type of each layer; all are full where there is none."""
    window = model.shape("attention.sliding_window", 0) or None
    slides: list[bool] = [False] * config["num_hidden_layers"]
    if window:
        slides = model.shape("attention.sliding_window_pattern")
    return {"sliding_window": window, "layer_types": layer_types(slides)}


def layer_types(slides: Sequence[bool]) -> list[str]:
    """The type of each layer, of whether it has a window."""
    return [SLIDING if has_window else FULL for has_window in slides]
