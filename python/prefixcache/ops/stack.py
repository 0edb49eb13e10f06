"""The weights of a decoder layer as a set of ops sees them, to compute many layers in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from prefixcache.ops.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Attention, then a gated MLP, each after a norm and with a residual connection.

    Where there are out norms, they normalise what attention and MLP add to the residual.

    E hidden size, H query heads, K key-value heads, D head size. `qkv` holds the projections of
    queries, keys and values one after the other, `gate_up` those of gates and of what they let
    pass. `rope` is the number of the layer's rotation among the model's; `norm_offset` is added to
    the weights of all norms. Tensors and linears are the model's own: code that replaces weights
    writes into them.
    """

    input_norm_E: Tensor
    qkv: Linear
    qk_norm_HKD: Tensor | None  # [H + K, D]
    out: Linear
    attention_out_norm_E: Tensor | None = None
    mlp_norm_E: Tensor
    gate_up: Linear
    activation: Literal["silu", "gelu_tanh"] = "silu"
    down: Linear
    mlp_out_norm_E: Tensor | None = None
    norm_offset: float = 0.0
    rope: int = 0
