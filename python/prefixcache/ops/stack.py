"""The weights of a decoder layer as a set of ops sees them, to compute many layers in one call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from prefixcache.ops.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Attention, then a gated MLP with SiLU, each behind a norm and with a residual connection.

    E hidden size, H query heads, K key-value heads, D head size. `qkv` holds the projections of
    queries, keys and values one after the other, `gate_up` those of gates and of what they let
    pass. Tensors and linears are the model's own: whoever replaces weights writes into them.
    """

    input_norm_E: Tensor
    qkv: Linear
    qk_norm_HKD: Tensor | None  # [H + K, D]
    out: Linear
    post_norm_E: Tensor
    gate_up: Linear
    down: Linear
