"""The gated delta rule, token by token.

Letters of shapes: T tokens, C channels that pass the convolution, H value heads, K and V numbers of
a key and of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.config.model_config import DeltaConfig
from prefixcache.models.parameters import StateWeights

_LENGTH_EPS = 1e-6


def gated_delta_rule(
    delta: DeltaConfig, weights: StateWeights, eps: float, x_TI: Tensor, state: Tensor
) -> Tensor:
    """What tokens read, normalised and gated: float32 [T, H * V].

    `x_TI` are a token's queries, keys and values, z, b and a, in float32; `state` holds the
    matrices and the last inputs of the convolution, and is brought behind the last token.
    """
    heads = delta.value_heads
    sizes = [delta.channels, delta.values, heads, heads]
    qkv_TC, z_TV, b_TH, a_TH = x_TI.split(sizes, dim=-1)
    matrices, before = state.split(
        [delta.values * delta.key_dim, (delta.taps - 1) * qkv_TC.shape[1]]
    )
    s_HKV = matrices.view(heads, delta.key_dim, delta.value_dim)
    q_THK, k_THK, v_THV = _convolved(delta, weights, qkv_TC, before.view(-1, qkv_TC.shape[1]))
    decay_TH = (-weights.decay * F.softplus(a_TH + weights.time_bias)).exp()
    rate_TH = b_TH.sigmoid()
    read_THV = torch.empty_like(v_THV)
    for t in range(len(x_TI)):
        s_HKV *= decay_TH[t, :, None, None]
        known_HV = (s_HKV * k_THK[t, :, :, None]).sum(1)
        change_HV = (v_THV[t] - known_HV) * rate_TH[t, :, None]
        s_HKV += k_THK[t, :, :, None] * change_HV[:, None]
        read_THV[t] = (s_HKV * q_THK[t, :, :, None]).sum(1)
    scale = (read_THV.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (read_THV * scale * weights.norm).flatten(1) * F.silu(z_TV)


def _convolved(
    delta: DeltaConfig, weights: StateWeights, qkv_TC: Tensor, before_LC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of each value head; the last inputs are kept in `before_LC`."""
    inputs = torch.cat([before_LC, qkv_TC])
    before_LC.copy_(inputs[len(qkv_TC) :])
    sums = F.conv1d(inputs.T[None], weights.conv.T[:, None].contiguous(), groups=inputs.shape[1])
    keys = delta.key_heads * delta.key_dim
    q, k, v = F.silu(sums[0].T).split([keys, keys, delta.values], dim=-1)
    shared = delta.value_heads // delta.key_heads
    of_head = torch.arange(delta.value_heads, device=q.device)
    of_head = of_head % delta.key_heads if delta.tiled else of_head // shared
    q_THK, k_THK = (_of_length_1(x.unflatten(1, (-1, delta.key_dim)))[:, of_head] for x in (q, k))
    return q_THK * delta.key_dim**-0.5, k_THK, v.unflatten(1, (-1, delta.value_dim))


def _of_length_1(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt()
