"""Tokens that grammars leave out of a step's choice.

Letters of shapes: N rows with a mask, W words of a mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.runner.torch.sampling.upload import Upload


def add_masks(
    upload: Upload, masks: Mapping[int, npt.NDArray[np.int32]]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Lets the masks, [W] words by row, be sent.

    What is sent and the step's logits then give the masked ones. The logits themselves are left
    alone. Without masks they are what comes of it.
    """
    if not masks:
        return lambda _sent, logits_RV: logits_RV
    rows_at = upload.integers([*masks])
    left_out_at = upload.int32(np.invert(np.concatenate([*masks.values()])))
    return lambda sent, logits_RV: _masked(logits_RV, rows_at(sent), left_out_at(sent))


def _masked(logits_RV: Tensor, rows_N: Tensor, left_out: Tensor) -> Tensor:
    left_out_NV = _minus_infinity(left_out.view(len(rows_N), -1))[:, : logits_RV.shape[1]]
    masked_RV = logits_RV.clone()
    masked_RV[rows_N] += left_out_NV
    return masked_RV


def _minus_infinity(words_NW: Tensor) -> Tensor:
    """Minus infinity for each bit that is set, else 0: float32 [N, 32 * W]."""
    places_32 = torch.arange(32, dtype=torch.int32, device=words_NW.device)
    bits_NW32 = (words_NW.unsqueeze(-1) >> places_32).bitwise_and_(1)
    zeros = torch.zeros_like(bits_NW32, dtype=torch.float32)
    return zeros.masked_fill_(bits_NW32.bool(), -torch.inf).view(len(words_NW), -1)
