"""Tokens that grammars leave out of a step's choice.

Letters of shapes: N rows with a mask, W words of a mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.runner.cuda.sampling.upload import Upload


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a step's rows."""

    rows_N: Sequence[int]
    words: Sequence[npt.NDArray[np.int32]]  # N of them, [W]

    def add_to(self, upload: Upload) -> Callable[[Tensor, Tensor], Tensor]:
        """Lets the masks be sent; what is sent and the step's logits then give the masked ones.

        The logits themselves are left alone. Without masks they are what comes of it.
        """
        if not self.words:
            return lambda _sent, logits_RV: logits_RV
        rows_at = upload.integers(self.rows_N)
        left_out_at = upload.int32(np.invert(np.concatenate(self.words)))
        return lambda sent, logits_RV: _masked(logits_RV, rows_at(sent), left_out_at(sent))


def _masked(logits_RV: Tensor, rows_N: Tensor, left_out: Tensor) -> Tensor:
    left_out_NV = _minus_infinity(left_out.view(len(rows_N), -1))[:, : logits_RV.shape[1]]
    if logits_RV.device.type == "cpu":
        return _added(logits_RV, rows_N, left_out_NV)
    masked_RV = logits_RV.clone()
    masked_RV[rows_N] += left_out_NV
    return masked_RV


def _added(logits_RV: Tensor, rows_N: Tensor, addends_NV: Tensor) -> Tensor:
    """By numpy: torch would wake its threads, and they keep the model's own from the processor."""
    if len(rows_N) == len(logits_RV):
        addends = addends_NV.numpy()
        with np.errstate(invalid="ignore"):  # a logit may be infinite, which fails its row
            return torch.from_numpy(np.add(logits_RV.numpy(), addends, out=addends))
    sums = logits_RV.numpy().copy()
    for row, addend in zip(rows_N.tolist(), addends_NV.numpy(), strict=True):
        with np.errstate(invalid="ignore"):
            sums[row] += addend
    return torch.from_numpy(sums)


def _minus_infinity(words_NW: Tensor) -> Tensor:
    """Minus infinity for each bit that is set, else 0: float32 [N, 32 * W].

    On a CPU eight of them are looked up at a time, without a branch whatever bits are set.
    """
    if words_NW.device.type == "cpu":
        by_byte = np.take(_OF_BYTES, words_NW.numpy().view(np.uint8), axis=0)
        return torch.from_numpy(by_byte.reshape(len(words_NW), -1))
    places_32 = torch.arange(32, dtype=torch.int32, device=words_NW.device)
    bits_NW32 = (words_NW.unsqueeze(-1) >> places_32).bitwise_and_(1)
    zeros = torch.zeros_like(bits_NW32, dtype=torch.float32)
    return zeros.masked_fill_(bits_NW32.bool(), -torch.inf).view(len(words_NW), -1)


_BITS_OF_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_OF_BYTES = np.where(_BITS_OF_BYTES, np.float32(-np.inf), np.float32(0))
