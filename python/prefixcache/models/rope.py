"""Rotary position embedding (Su et al., 2021) and its scalings, as float32 tables.

Letters of shapes: P positions, D numbers of a head that are rotated, the first ones, R = D / 2
pairs of them. A pair is made of elements r and r + R of a head, as Hugging Face checkpoints have
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixcache.config.rope_config import RopeConfig

Angles: TypeAlias = npt.NDArray[np.floating[Any]]

_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a layer turns its queries or its keys: by a rope, or not at all where there is none.

    It turns `rotated` numbers of a head. With a `growth` it scales them too, by
    1 + growth * ln(1 + position // original context).
    """

    rope: RopeConfig | None
    growth: float = 0.0
    rotated: int = 0

    def tables(self, head_dim: int, max_positions: int) -> tuple[Angles, Angles]:
        """Cosines and sines of every position, [P, R] each, with what they scale by."""
        if self.rope is None:
            shape = (max_positions, head_dim // 2)
            return np.ones(shape, np.float32), np.zeros(shape, np.float32)
        cos_PR, sin_PR = rotation_tables(self.rope, head_dim, max_positions)
        if self.growth:
            contexts_P = np.arange(max_positions) // self.rope.original_max_position
            scale_P1 = (1 + self.growth * np.log1p(contexts_P)).astype(np.float32)[:, None]
            cos_PR *= scale_P1
            sin_PR *= scale_P1
        return cos_PR, sin_PR


def rotation_tables(config: RopeConfig, head_dim: int, max_positions: int) -> tuple[Angles, Angles]:
    """Cosines and sines of every position, [P, R] each: a position always gets the same bits.

    They are computed in float64 and rounded once, so that no processor's own functions show.
    """
    inverse_R, magnitude = inverse_frequencies(config, head_dim)
    cos_PR = np.empty((max_positions, head_dim // 2), np.float32)
    sin_PR = np.empty_like(cos_PR)
    for start in range(0, max_positions, _CHUNK):
        part = slice(start, min(start + _CHUNK, max_positions))
        positions = np.arange(part.start, part.stop, dtype=np.float32)
        angles = np.outer(positions, inverse_R).astype(np.float64)
        cos_PR[part] = np.cos(angles) * magnitude
        sin_PR[part] = np.sin(angles) * magnitude
    return cos_PR, sin_PR


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Angles, float]:
    """Radians a position turns each pair by, float32 [R], and the factor on cosine and sine."""
    exponents = np.arange(0, head_dim, 2) / head_dim
    inverse_R = (1.0 / config.theta**exponents).astype(np.float32)
    scaled_R, magnitude = _SCALINGS[config.kind](config, inverse_R)
    return scaled_R.astype(np.float32), magnitude


def _unscaled(_config: RopeConfig, inverse_R: Angles) -> tuple[Angles, float]:
    return inverse_R, 1.0


def _linear(config: RopeConfig, inverse_R: Angles) -> tuple[Angles, float]:
    """Position interpolation (Chen et al., 2023)."""
    return inverse_R / config.factor, 1.0


def _llama3(config: RopeConfig, inverse_R: Angles) -> tuple[Angles, float]:
    """Llama 3.1: slow pairs are slowed by `factor`, fast ones kept, a blend between."""
    turns_R = config.original_max_position * inverse_R / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep_R = np.clip((turns_R - config.low_freq_factor) / span, 0.0, 1.0)
    return (1 - keep_R) * inverse_R / config.factor + keep_R * inverse_R, 1.0


def _yarn(config: RopeConfig, inverse_R: Angles) -> tuple[Angles, float]:
    """YaRN (Peng et al., 2023): pairs are interpolated by how often they turn in the context."""
    low = _yarn_pair(config, config.beta_fast, 2 * len(inverse_R))
    high = _yarn_pair(config, config.beta_slow, 2 * len(inverse_R))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(inverse_R) - 1)
    span = high - low or 0.001
    slow_R = np.clip((np.arange(len(inverse_R)) - low) / span, 0.0, 1.0)
    scaled_R = slow_R * inverse_R / config.factor + (1 - slow_R) * inverse_R
    return scaled_R, _yarn_magnitude(config)


def _longrope(config: RopeConfig, inverse_R: Angles) -> tuple[Angles, float]:
    """LongRoPE (Ding et al., 2024): each pair is slowed by a factor of its own."""
    factors_R = np.array(config.short_factor or config.long_factor, np.float32)
    magnitude = config.attention_factor
    if magnitude is None:
        stretch = math.log(max(config.factor, 1.0)) / math.log(config.original_max_position)
        magnitude = math.sqrt(1 + stretch)
    return inverse_R / factors_R, magnitude


def _proportional(config: RopeConfig, inverse_R: Angles) -> tuple[Angles, float]:
    """The slowest pairs are not turned."""
    turned = int(config.partial_rotary_factor * 2 * len(inverse_R) // 2)
    return np.where(np.arange(len(inverse_R)) < turned, inverse_R / config.factor, 0.0), 1.0


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


_Scaling = Callable[[RopeConfig, Angles], tuple[Angles, float]]
_SCALINGS: dict[str, _Scaling] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
