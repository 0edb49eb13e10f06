"""The gated delta rule and Mamba-2, token by token.

Letters of shapes: T tokens, C channels that pass the convolution, H value heads, K and V numbers of
a key and of a value, L tokens before that the convolution sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.config.model_config import DeltaConfig, MambaConfig
from prefixcache.models.decoder.parameters import StateWeights
from prefixcache.runner.torch.typed import split, unflatten

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
    qkv_TC, z_TV, b_TH, a_TH = split(x_TI, sizes, -1)
    s_HKV, before_LC = _parts(delta, state)
    q_THK, k_THK, v_THV = _convolved(delta, weights, qkv_TC, before_LC)
    q_THK, k_THK = _of_length_1(q_THK) * delta.key_dim**-0.5, _of_length_1(k_THK)
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


def mamba2(
    mamba: MambaConfig, weights: StateWeights, eps: float, x_TI: Tensor, state: Tensor
) -> Tensor:
    """What tokens read, gated and normalised: float32 [T, H * V].

    `x_TI` are a token's C, B, x, z and dt, in float32; `state` as for `gated_delta_rule`.
    """
    sizes = [mamba.channels, mamba.values, mamba.value_heads]
    cbx_TC, z_TV, dt_TH = split(x_TI, sizes, -1)
    s_HKV, before_LC = _parts(mamba, state)
    c_THK, b_THK, x_THV = _convolved(mamba, weights, cbx_TC, before_LC)
    time_TH = F.softplus(dt_TH + weights.time_bias)
    decay_TH = (-weights.decay * time_TH).exp()
    change_THV = x_THV * time_TH[..., None]
    read_THV = torch.empty_like(x_THV)
    for t in range(len(x_TI)):
        s_HKV *= decay_TH[t, :, None, None]
        s_HKV += b_THK[t, :, :, None] * change_THV[t, :, None]
        read_THV[t] = (s_HKV * c_THK[t, :, :, None]).sum(1)
    read_THV += x_THV * weights.skip[:, None]
    groups = (read_THV.flatten(1) * F.silu(z_TV)).unflatten(1, (mamba.key_heads, -1))
    scale = (groups.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (groups * scale).flatten(1) * weights.norm


def _parts(states: DeltaConfig | MambaConfig, state: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices [H, K, V], and the last inputs of the convolution [L, C]."""
    heads, dims = states.value_heads, (states.key_dim, states.value_dim)
    numbers = heads * dims[0] * dims[1]
    before = state[numbers:][: (states.taps - 1) * states.channels]
    return state[:numbers].view(heads, *dims), before.view(-1, states.channels)


def _convolved(
    states: DeltaConfig | MambaConfig, weights: StateWeights, qkv_TC: Tensor, before_LC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of each value head; the last inputs are kept in `before_LC`."""
    inputs = torch.cat([before_LC, qkv_TC])
    before_LC.copy_(inputs[len(qkv_TC) :])
    kernel = weights.conv.T[:, None].contiguous()
    sums = F.conv1d(inputs.T[None], kernel, weights.conv_bias, groups=inputs.shape[1])
    keys = states.key_heads * states.key_dim
    q, k, v = split(F.silu(sums[0].T), [keys, keys, states.values], -1)
    of_head = torch.arange(states.value_heads, device=q.device)
    if isinstance(states, DeltaConfig) and states.tiled:
        of_head %= states.key_heads
    else:
        of_head //= states.value_heads // states.key_heads
    q_THK, k_THK = (unflatten(x, 1, (-1, states.key_dim))[:, of_head] for x in (q, k))
    return q_THK, k_THK, unflatten(v, 1, (-1, states.value_dim))


def _of_length_1(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt()
