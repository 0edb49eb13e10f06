"""Random numbers that are a pure function of (seed, position, vocabulary index).

Nothing is drawn from a generator with a state, so that a token's noise is the same whatever else is
in the batch, however the prompt was chunked, and on a resume after preemption.

The noise is made block by block (see `tiles`), so that the least of a block is known without its
members: of sixteen standard exponential variables the least is a sixteenth of one, any member may
be it, and by how much the others exceed it are again standard exponential variables, all of them
independent. Letters of shapes: R rows, B blocks, N anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from prefixcache.runner.torch.sampling.tiles import MEMBERS, token_ids

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): SplitMix64.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1

# From this number of rows on numpy computes the keys sooner than Python's own integers.
_MANY_ROWS = 8

Keys = npt.NDArray[np.int64]


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> tuple[Keys, Keys]:
    """What the noise of blocks and that of tokens is made from, int64 [R] each.

    Those of row r depend on `seeds[r]` (any integer, taken modulo 2**64) and `positions[r]` alone.
    """
    if len(seeds) < _MANY_ROWS:
        keys = [_row_key(seed, at) for seed, at in zip(seeds, positions, strict=True)]
        return _int64(keys), _int64([_mix_int(key ^ _MIX_1) for key in keys])
    mixed = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    block_keys = _mix(mixed + np.array(positions, dtype=np.uint64) * np.uint64(_GOLDEN))
    return block_keys.view(np.int64), _mix(block_keys ^ np.uint64(_MIX_1)).view(np.int64)


class RowNoise:
    """Standard exponential variables, one for each row and token, none of them 0.

    The keys are those of `row_keys`, on the device.
    """

    def __init__(self, block_keys_R: Tensor, token_keys_R: Tensor) -> None:
        self.block_keys_R = block_keys_R
        self.token_keys_R = token_keys_R

    def of_members(self, rows_N: Tensor, blocks_N: Tensor, members_N: Tensor) -> Tensor:
        """The noise of single tokens: members of blocks, each in its row; float64 [N]."""
        block_bits_N = _bits(self.block_keys_R[rows_N], blocks_N)
        tokens_N = token_ids(blocks_N, members_N)
        excess_N = _exponential(_bits(self.token_keys_R[rows_N], tokens_N))
        is_least_N = members_N == (block_bits_N & (MEMBERS - 1))
        least_N = _exponential(block_bits_N).mul_(1 / MEMBERS)
        return least_N + excess_N.masked_fill_(is_least_N, 0.0)


def _exponential(bits: Tensor) -> Tensor:
    """From the upper 53 bits."""
    uniform = _shift_right(bits, 11).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().clamp_min_(2.0**-54)


def _row_key(seed: int, position: int) -> int:
    return _mix_int(_mix_int(seed & _MASK) + position * _GOLDEN & _MASK)


def _mix_int(x: int) -> int:
    x = (x ^ x >> 30) * _MIX_1 & _MASK
    x = (x ^ x >> 27) * _MIX_2 & _MASK
    return x ^ x >> 31


def _int64(keys: Sequence[int]) -> Keys:
    return np.array(keys, dtype=np.uint64).view(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ x >> np.uint64(30)) * np.uint64(_MIX_1)
    x = (x ^ x >> np.uint64(27)) * np.uint64(_MIX_2)
    return x ^ x >> np.uint64(31)


def _bits(keys: Tensor, counters: Tensor) -> Tensor:
    """SplitMix64's numbers on int64, whose multiplication wraps as that of uint64 does."""
    x = keys + (counters + 1) * _signed(_GOLDEN)
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(_MIX_1))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(_MIX_2))
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, count: int) -> Tensor:
    """A shift that fills with zeros, which int64 alone does not have."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
