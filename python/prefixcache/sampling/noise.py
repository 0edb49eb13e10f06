"""Random numbers that are a pure function of (seed, position, vocabulary index).

Nothing is drawn from a generator with a state, so that a token's noise is the same whatever else is
in the batch, however the prompt was chunked, and on a resume after preemption. Letters of shapes: R
rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): SplitMix64.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def exponential_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device
) -> Tensor:
    """Standard exponential variables, float64 [R, V], none of them 0.

    Row r depends on `seeds[r]` (any integer, taken modulo 2**64) and `positions[r]` alone.
    """
    keys = [_signed(_row_key(seed, at)) for seed, at in zip(seeds, positions, strict=True)]
    keys_R1 = torch.tensor(keys, dtype=torch.int64, device=device).unsqueeze(1)
    counter_V = torch.arange(1, vocab_size + 1, device=device) * _signed(_GOLDEN)
    bits_RV = _mix(keys_R1 + counter_V)
    uniform_RV = _shift_right(bits_RV, 11).double().add_(0.5).mul_(2.0**-53)
    return uniform_RV.log_().neg_().clamp_min_(2.0**-54)


def _row_key(seed: int, position: int) -> int:
    return _mix_int(_mix_int(seed & _MASK) + position * _GOLDEN & _MASK)


def _mix_int(x: int) -> int:
    x = (x ^ x >> 30) * _MIX_1 & _MASK
    x = (x ^ x >> 27) * _MIX_2 & _MASK
    return x ^ x >> 31


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, whose multiplication wraps as that of uint64 does."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """A shift that fills with zeros, which int64 alone does not have."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
