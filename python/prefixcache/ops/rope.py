"""Rotary position embedding (Su et al., 2021) and its scalings, from a float32 table.

Letters of shapes: T tokens, N heads, D head size, R = D / 2 rotated pairs. A pair is made of
elements r and r + R of a head, as Hugging Face checkpoints have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from prefixcache.config.model_config import RopeConfig
from prefixcache.ops.cuda import fused_kernels


class RotaryEmbedding:
    """Cosines and sines of every position, computed once: a position always gets the same bits."""

    def __init__(
        self, config: RopeConfig, head_dim: int, max_positions: int, device: torch.device
    ) -> None:
        if device.type == "meta":  # a model of shapes alone takes no memory
            self._cos_PR = self._sin_PR = torch.empty(max_positions, head_dim // 2, device=device)
            return
        inverse_R, magnitude = inverse_frequencies(config, head_dim)
        angles_PR = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_R)
        self._cos_PR = (angles_PR.cos() * magnitude).to(device)
        self._sin_PR = (angles_PR.sin() * magnitude).to(device)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the given positions: two float32 tensors [T, 1, R]."""
        return self._cos_PR[positions_T].unsqueeze(1), self._sin_PR[positions_T].unsqueeze(1)


def apply_rope(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotates every head, in float32; returns [T, N, D] in the type of `x_TND`."""
    if (fused := fused_kernels(x_TND)) is not None:
        return fused.apply_rope(x_TND, cos_T1R, sin_T1R)
    first, second = x_TND.float().chunk(2, dim=-1)
    rotated = (first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R)
    return torch.cat(rotated, dim=-1).to(x_TND.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position turns each pair by, float32 [R], and the factor on cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return _SCALINGS[config.kind](config, 1.0 / (config.theta**exponents))


def _unscaled(_config: RopeConfig, inverse_R: Tensor) -> tuple[Tensor, float]:
    return inverse_R, 1.0


def _linear(config: RopeConfig, inverse_R: Tensor) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al., 2023)."""
    return inverse_R / config.factor, 1.0


def _llama3(config: RopeConfig, inverse_R: Tensor) -> tuple[Tensor, float]:
    """Llama 3.1: slow pairs are slowed by `factor`, fast ones kept, a blend between."""
    turns_R = config.original_max_position * inverse_R / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep_R = ((turns_R - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - keep_R) * inverse_R / config.factor + keep_R * inverse_R, 1.0


def _yarn(config: RopeConfig, inverse_R: Tensor) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): pairs are interpolated by how often they turn in the context."""
    low = _yarn_pair(config, config.beta_fast, 2 * len(inverse_R))
    high = _yarn_pair(config, config.beta_slow, 2 * len(inverse_R))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(inverse_R) - 1)
    span = high - low or 0.001
    slow_R = ((torch.arange(len(inverse_R), dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    scaled_R = slow_R * inverse_R / config.factor + (1 - slow_R) * inverse_R
    return scaled_R, _yarn_magnitude(config)


def _yarn_pair(config: RopeConfig, turns: float, head_dim: int) -> float:
    """The (fractional) pair that makes `turns` turns within the original context."""
    wavelength = config.original_max_position / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(config.theta))


def _yarn_magnitude(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(config, config.mscale) / _yarn_scale(config, config.mscale_all_dim)
    return _yarn_scale(config, 1.0)


def _yarn_scale(config: RopeConfig, mscale: float) -> float:
    return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0


_Scaling = Callable[[RopeConfig, Tensor], tuple[Tensor, float]]
_SCALINGS: dict[str, _Scaling] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
