"""The row of a model family, and flags that several families have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_args

from prefixcache.config.gguf_row import GgufRow
from prefixcache.config.hf_fields import LINEAR, HFFields
from prefixcache.exceptions import UnsupportedModelError

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
# In each spelling of infinity.
_NO_TIME_LIMITS = (None, [0, inf], [0, {"__float__": "Infinity"}])


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the config.json of an architecture may say, and what it means without saying it."""

    model_type: str
    """transformers' name for its configuration."""

    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of fields that a file does not give, where they are not those of `HFFields`."""

    required: tuple[str, ...] = SIZES
    """Fields without which there is no model."""

    biases: tuple[str, ...] = ()
    """Those of "attention_bias" and "mlp_bias" that count: others' files are ignored on them."""

    refused: tuple[str, ...] = ()
    """Fields that must not be set."""

    ignored: tuple[str, ...] = ()
    """Fields that say nothing."""

    spellings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of fields, which go before."""

    heads_divide_hidden: bool = False
    """Whether heads must divide the hidden size, even where `head_dim` is given."""

    windows: Literal["none", "one", "by_layer", "switched", "unrotated"] = "none"
    """Which layers see a window alone, where `layer_types` of the file does not say.

    All that `one` says. But each `sliding_window_pattern`-th `by_layer`. Those from
    `max_window_layers` on where `use_sliding_window` has `switched` them on, which it also does for
    `unrotated`: layers that do not rotate, each `no_rope_layer_interval`-th.
    """

    ends_full: bool = False
    """Whether the last layer has no window, whatever the file says of it."""

    exceeds_context: bool = False
    """Whether files may name a window that is longer than the context."""

    ropes_by_layer: bool = False
    """Whether ropes go by the types of layers."""

    rope_kinds: tuple[RopeKind, ...] = get_args(RopeKind)[:-1]

    rotates_partly: bool = False
    """Whether a head may be turned in part."""

    pairs_heads: bool = False
    """Whether checkpoints have rotated pairs next to each other."""

    counts_scaling: bool = False
    """Whether the longest context counts the linear scaling of the rope already."""

    convolves: bool = False
    """Whether layers may be short convolutions; all but `full_attn_idxs` are by default."""

    recurs: Literal["gated delta rule", "Mamba-2"] | None = None
    """The recurrence that layers may have; all but each `full_attention_interval`-th by default."""

    lone_parts: bool = False
    """Whether a layer of a file is a mixer or an MLP."""

    sees_images: bool = False
    """Whether files may describe, and hold, a model of images next to the one of text."""

    text_families: Mapping[str, str] = field(default_factory=dict[str, str])
    """Architectures of parts that read text, by their `model_type`, where they are others'."""

    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    """The field that names it, and what it may be."""

    flags: Callable[[HFFields], dict[str, Any]] = lambda _fields: {}
    """Makes fields of `ModelConfig`."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modules where they are not `LLAMA_NAMES`, and "mlp_norm", "selection_bias".

    Where they are one tensor also "qkv" and "gate_up".
    """

    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Parts of tensors' names that we spell otherwise."""

    fused_experts: Literal["turns", "halves"] = "halves"
    """How gates and what they let pass stand in one tensor of all experts of a layer."""

    quantization: str | None = None
    """The `quantization_config` whose blocks such a tensor may have."""

    gguf: GgufRow | None = None

    @property
    def modules(self) -> dict[str, str]:
        """The names of all modules."""
        return LLAMA_NAMES | dict(self.names)


def unrotated_layers(fields: HFFields) -> tuple[int, ...]:
    """The layers that do not rotate."""
    layers = range(fields.num_hidden_layers)
    if fields.no_rope_layers is None:
        return tuple(i for i in layers if (i + 1) % fields.no_rope_layer_interval == 0)
    return tuple(i for i in layers if not fields.no_rope_layers[i])


def experts_flags(fields: HFFields, intermediate_size: int, **more: Any) -> dict[str, Any]:
    """The fields of `ExpertsConfig`, where there are experts."""
    if not fields.num_local_experts:
        return {}
    sizes = {
        "count": fields.num_local_experts,
        "top_k": fields.num_experts_per_tok,
        "intermediate_size": intermediate_size,
    }
    return {"experts": sizes | more}


def mamba_flags(fields: HFFields, head_dim: int | str) -> dict[str, Any]:
    """The fields of `MambaConfig`, where layers have it. Raises `UnsupportedModelError`."""
    layers = fields.layers_of(LINEAR)
    if not layers:
        return {}
    if fields.time_step_limit not in _NO_TIME_LIMITS:
        raise UnsupportedModelError(
            f"time_step_limit {fields.time_step_limit!r} is not supported. Supported: 0, infinity."
        )
    mamba = {
        "layers": layers,
        "key_heads": fields.mamba_n_groups,
        "value_heads": fields.mamba_n_heads,
        "key_dim": fields.mamba_d_state,
        "value_dim": head_dim,
        "taps": fields.mamba_d_conv,
        "conv_bias": fields.mamba_conv_bias,
        "bias": fields.mamba_proj_bias,
    }
    return {"mamba": mamba}
