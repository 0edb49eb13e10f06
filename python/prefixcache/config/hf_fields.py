"""The fields of a config.json that say what a model computes, in one spelling."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from prefixcache.config.checked import MAX_INT, Count, PositiveFloat, PositiveInt
from prefixcache.exceptions import UnsupportedModelError

NumLayers = Annotated[PositiveInt, Le(1 << 16)]
TokenId = Annotated[int, Ge(-MAX_INT), Le(MAX_INT)]

FULL = "full_attention"
SLIDING = "sliding_attention"
CONV = "conv"
LINEAR = "linear_attention"

# The default of what only families read whose files or rows give it: None, whatever the type says.
_GIVEN: Any = None

# In each spelling of infinity.
_NO_TIME_LIMITS = (None, [0, inf], [0, {"__float__": "Infinity"}])


@dataclass(slots=True, kw_only=True)
class HFFields:
    """Values by transformers' names: of the file, else of its family's row, else those here.

    The types are what a file may say.
    """

    # Sizes. Heads share the hidden size where no size of them is given.
    vocab_size: PositiveInt = _GIVEN
    hidden_size: PositiveInt = _GIVEN
    intermediate_size: PositiveInt = _GIVEN
    num_hidden_layers: NumLayers = _GIVEN
    num_attention_heads: PositiveInt = _GIVEN
    num_key_value_heads: PositiveInt = _GIVEN
    head_dim: PositiveInt = _GIVEN
    max_position_embeddings: PositiveInt = _GIVEN

    # The stream, and what its ends are multiplied by.
    rms_norm_eps: PositiveFloat = 1e-6
    norm_eps: PositiveFloat = _GIVEN
    tie_word_embeddings: bool = False
    bos_token_id: TokenId | None = None
    embedding_multiplier: PositiveFloat = _GIVEN
    residual_multiplier: PositiveFloat = _GIVEN
    logits_scaling: PositiveFloat = _GIVEN
    final_logit_softcapping: PositiveFloat | None = None
    hidden_size_per_layer_input: Count = _GIVEN
    vocab_size_per_layer_input: PositiveInt = _GIVEN

    # Biases.
    attention_bias: bool = False
    attention_out_bias: bool = False
    qkv_bias: bool = _GIVEN
    mlp_bias: bool = False
    use_bias: bool = _GIVEN

    # What each layer is. `bare_layers` have no MLP, and are counted from the file's layers.
    layer_types: list[str] = _GIVEN
    hybrid_override_pattern: str = _GIVEN
    bare_layers: tuple[Count, ...] = ()
    full_attn_idxs: list[int] | None = None
    full_attention_interval: PositiveInt = _GIVEN

    # Attention.
    query_pre_attn_scalar: PositiveInt = _GIVEN
    attention_multiplier: PositiveFloat = _GIVEN
    attn_logit_softcapping: PositiveFloat | None = None
    use_bidirectional_attention: bool | str | None = None
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool = False
    max_window_layers: Count = _GIVEN
    sliding_window_pattern: PositiveInt | Literal["LLLG"] = _GIVEN
    # Of layers without a window, of one of all layers, and of layers that read others' keys.
    global_head_dim: PositiveInt | None = None
    num_global_key_value_heads: PositiveInt | None = None
    per_layer_config: dict[str, dict[str, PositiveInt]] | None = None
    attention_k_eq_v: bool = _GIVEN
    num_kv_shared_layers: Count = _GIVEN
    use_double_wide_mlp: bool = _GIVEN

    # Rotation.
    rope_theta: PositiveFloat = 10_000.0
    rope_local_base_freq: PositiveFloat = 10_000.0
    rope_parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt = _GIVEN
    position_embedding_type: str | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: PositiveInt = _GIVEN

    # Experts.
    num_local_experts: Count = 0
    num_experts_per_tok: PositiveInt = _GIVEN
    enable_moe_block: bool = _GIVEN
    moe_intermediate_size: PositiveInt = _GIVEN
    shared_intermediate_size: Count = 0
    shared_expert_intermediate_size: PositiveInt = _GIVEN
    norm_topk_prob: bool = _GIVEN
    decoder_sparse_step: PositiveInt = _GIVEN
    mlp_only_layers: list[int] = _GIVEN
    num_dense_layers: Count = _GIVEN
    use_expert_bias: bool = _GIVEN
    routed_scaling_factor: PositiveFloat = _GIVEN
    swiglu_alpha: PositiveFloat = _GIVEN
    swiglu_limit: PositiveFloat = _GIVEN

    # Short convolutions, and the size of MLPs next to them.
    conv_L_cache: PositiveInt = _GIVEN  # noqa: N815
    conv_bias: bool = _GIVEN
    block_auto_adjust_ff_dim: bool = _GIVEN
    block_ffn_dim_multiplier: PositiveFloat = _GIVEN
    block_multiple_of: PositiveInt = _GIVEN

    # The gated delta rule. Only what GGUF files became says `linear_heads_tiled`, that value heads
    # of a key head are apart, and `linear_qkvz_apart`, that z is a tensor of its own.
    linear_conv_kernel_dim: PositiveInt = _GIVEN
    linear_key_head_dim: PositiveInt = _GIVEN
    linear_value_head_dim: PositiveInt = _GIVEN
    linear_num_key_heads: PositiveInt = _GIVEN
    linear_num_value_heads: PositiveInt = _GIVEN
    linear_heads_tiled: bool = False
    linear_qkvz_apart: bool = False

    # Mamba-2.
    mamba_n_heads: PositiveInt = _GIVEN
    mamba_n_groups: PositiveInt = _GIVEN
    mamba_d_head: PositiveInt | Literal["auto"] = _GIVEN
    mamba_d_state: PositiveInt = _GIVEN
    mamba_d_conv: PositiveInt = _GIVEN
    mamba_expand: PositiveInt = _GIVEN
    mamba_conv_bias: bool = _GIVEN
    mamba_proj_bias: bool = _GIVEN
    time_step_limit: list[Any] | None = None

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """The layers of this type."""
        return tuple(i for i, name in enumerate(self.layer_types) if name == kind)

    def unrotated_layers(self) -> tuple[int, ...]:
        """The layers that do not rotate."""
        layers = range(self.num_hidden_layers)
        if self.no_rope_layers is None:
            return tuple(i for i in layers if (i + 1) % self.no_rope_layer_interval == 0)
        return tuple(i for i in layers if not self.no_rope_layers[i])

    def experts(self, intermediate_size: int, **more: Any) -> dict[str, Any]:
        """The fields of `ExpertsConfig`, where there are experts."""
        if not self.num_local_experts:
            return {}
        sizes = {
            "count": self.num_local_experts,
            "top_k": self.num_experts_per_tok,
            "intermediate_size": intermediate_size,
        }
        return {"experts": sizes | more}

    def mamba(self, head_dim: int | str) -> dict[str, Any]:
        """The fields of `MambaConfig`, where layers have it. Raises `UnsupportedModelError`."""
        layers = self.layers_of(LINEAR)
        if not layers:
            return {}
        if self.time_step_limit not in _NO_TIME_LIMITS:
            limits = f"time_step_limit {self.time_step_limit!r}"
            raise UnsupportedModelError(f"{limits} is not supported. Supported: 0, infinity.")
        mamba = {
            "layers": layers,
            "key_heads": self.mamba_n_groups,
            "value_heads": self.mamba_n_heads,
            "key_dim": self.mamba_d_state,
            "value_dim": head_dim,
            "taps": self.mamba_d_conv,
            "conv_bias": self.mamba_conv_bias,
            "bias": self.mamba_proj_bias,
        }
        return {"mamba": mamba}
