"""The row of a model family: its config.json, its GGUF files, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from prefixcache.config.checked import is_list
from prefixcache.config.hf_fields import FULL, SLIDING, HFFields
from prefixcache.exceptions import ModelLoadError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
OTHER_SIZES = tuple(size for size in SIZES if size != "intermediate_size")

LLAMA_NAMES = {
    "input_norm": "input_layernorm",
    "attention": "self_attn",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "experts": "mlp.experts",
    "shared": "mlp.shared_expert",
    "mamba": "mamba",
    "norm": "norm",
}
"""Names of modules in a checkpoint: the last is the model's own, the others are of a layer."""

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
        import numpy as np

        return float(str(np.float32(self.shape(key, default))))

    def experts(self, *, renormalise: bool | None) -> dict[str, Any]:
        """Sizes of experts. Raises `ModelLoadError` where they are missing."""
        size = self.shape("expert_feed_forward_length", self.shape("feed_forward_length"))
        shared = self.shape("expert_shared_feed_forward_length", 0) or None
        return {
            "shared_expert_intermediate_size": shared,
            "num_local_experts": self.shape("expert_count"),
            "num_experts_per_tok": self.shape("expert_used_count"),
            "moe_intermediate_size": size,
            "norm_topk_prob": renormalise,
        }

    def layers_without_heads(self, config: dict[str, Any], kind: str) -> dict[str, Any]:
        """Layers without heads of keys are of this kind."""
        heads = config["num_key_value_heads"]
        if not is_list(heads) or len(heads) != config["num_hidden_layers"]:
            key = f"{self.architecture}.attention.head_count_kv"
            raise ModelLoadError(f"its {key} has no number for each layer.")
        return {
            "num_key_value_heads": max(heads),
            "layer_types": [FULL if count else kind for count in heads],
        }

    def mamba(self, config: dict[str, Any]) -> dict[str, Any]:
        """Sizes of Mamba-2."""
        values, heads = self.shape("ssm.inner_size"), self.shape("ssm.time_step_rank")
        return {
            "mamba_n_heads": heads,
            "mamba_n_groups": self.shape("ssm.group_count"),
            "mamba_d_head": values // heads,
            "mamba_d_state": self.shape("ssm.state_size"),
            "mamba_d_conv": self.shape("ssm.conv_kernel"),
            "mamba_expand": values // config["hidden_size"],
        }

    def partly_rotated(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of a head that is turned."""
        rotated = self.shape("rope.dimension_count", config["head_dim"])
        part = {"partial_rotary_factor": rotated / config["head_dim"]}
        return {"rope_parameters": config["rope_parameters"] | part}

    def windows(self, config: dict[str, Any]) -> dict[str, Any]:
        """The window, and the type of each layer; all are full where there is none."""
        window = self.shape("attention.sliding_window", 0) or None
        slides: list[bool] = [False] * config["num_hidden_layers"]
        if window:
            slides = self.shape("attention.sliding_window_pattern")
        return {"sliding_window": window, "layer_types": layer_types(slides)}


def layer_types(slides: Sequence[bool]) -> list[str]:
    """The type of each layer, of whether it has a window."""
    return [SLIDING if has_window else FULL for has_window in slides]


GgufConfig = Callable[[GgufModel, dict[str, Any]], dict[str, Any]]
"""Fields of a config.json that a family reads in its own way, from the file and common fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRow:
    """How llama.cpp writes a family's models, where that is not as Llama's."""

    # llama.cpp's name; of two families with one name the first is meant, unless `config` says.
    architecture: str
    config: GgufConfig = lambda _model, _config: {}
    # Whether the weights of a token's experts are divided by their sum, which no file says.
    # None where not all models have experts.
    renormalise: bool | None = None
    # Modules of a layer by llama.cpp's names, where the family's `names` do not say them.
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    # Whether rows of queries and keys that are a rotated pair stand side by side.
    pairs_rows: bool = False
    # What weights of norms are greater by than in a checkpoint.
    norm_offset: float = 0.0
    # Whether `config` reads `factors`: they are not those of a LongRoPE then.
    reads_factors: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the config.json of an architecture may say, and what it means without saying it."""

    # transformers' name for its configuration.
    model_type: str
    # Values of fields that a file does not give, where they are not those of `HFFields`.
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Fields without which there is no model.
    required: tuple[str, ...] = SIZES
    # Those of "attention_bias" and "mlp_bias" that count: others' files are ignored on them.
    biases: tuple[str, ...] = ()
    # Fields that must not be set.
    refused: tuple[str, ...] = ()
    # Fields that say nothing.
    ignored: tuple[str, ...] = ()
    # Fields by other names of files, which go before.
    spellings: Mapping[str, str] = field(default_factory=dict[str, str])
    # Whether the hidden size must be a multiple of the heads, even where `head_dim` is given.
    heads_divide_hidden: bool = False
    # Which layers have a window, where `layer_types` of the file does not say: all with "one"; all
    # but each `sliding_window_pattern`-th "by_layer"; where `use_sliding_window` is true with
    # "switched" those from `max_window_layers` on, with "unrotated" those that do not rotate.
    windows: Literal["none", "one", "by_layer", "switched", "unrotated"] = "none"
    # Whether the last layer has no window, whatever the file says of it.
    ends_full: bool = False
    # Whether files may name a window that is longer than the context.
    exceeds_context: bool = False
    # Whether ropes go by the types of layers.
    ropes_by_layer: bool = False
    rope_kinds: tuple[RopeKind, ...] = get_args(RopeKind)[:-1]
    # Whether a head may be turned in part.
    rotates_partly: bool = False
    # Whether checkpoints have rotated pairs next to each other.
    pairs_heads: bool = False
    # Whether the longest context counts the linear scaling of the rope already.
    counts_scaling: bool = False
    # Whether layers may be short convolutions; all but `full_attn_idxs` are by default.
    convolves: bool = False
    # The recurrence that layers may have; all but each `full_attention_interval`-th by default.
    recurs: Literal["gated delta rule", "Mamba-2"] | None = None
    # Whether a layer of a file is a mixer or an MLP.
    lone_parts: bool = False
    # Whether files may describe, and hold, a model of images next to the one of text.
    sees_images: bool = False
    # Architectures of parts that read text, by their `model_type`, where they are others'.
    text_families: Mapping[str, str] = field(default_factory=dict[str, str])
    # The field that names it, and what it may be.
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    # Makes fields of `ModelConfig`.
    flags: Callable[[HFFields], dict[str, Any]] = lambda _fields: {}
    # Modules where they are not `LLAMA_NAMES`, and "mlp_norm", "selection_bias".
    # Where they are one tensor also "qkv" and "gate_up".
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    # Parts of tensors' names that we spell otherwise.
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    # How gates and what they let pass stand in one tensor of all experts of a layer.
    fused_experts: Literal["turns", "halves"] = "halves"
    # The `quantization_config` whose blocks such a tensor may have.
    quantization: str | None = None
    gguf: GgufRow | None = None

    @property
    def modules(self) -> dict[str, str]:
        """The names of all modules."""
        return LLAMA_NAMES | dict(self.names)
