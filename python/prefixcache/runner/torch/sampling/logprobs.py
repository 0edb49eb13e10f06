"""Log probabilities as they are reported: of the model's own logits, before any adjustment.

Letters of shapes: R rows, V vocabulary, N alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.types.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Log probabilities of some rows on the device, as one row of int64."""

    numbers: Tensor
    num_rows: int

    def unpack(self, numbers: npt.NDArray[np.int64]) -> tuple[TokenLogprobs, ...]:
        """What the numbers say, once they are on the host."""
        token_ids, taken, ranks = numbers[: 3 * self.num_rows].reshape(3, self.num_rows)
        top_ids, top = numbers[3 * self.num_rows :].reshape(2, self.num_rows, -1)
        columns = (
            token_ids.tolist(),
            taken.view(np.float64).tolist(),
            ranks.tolist(),
            map(tuple, top_ids.tolist()),
            map(tuple, np.ascontiguousarray(top).view(np.float64).tolist()),
        )
        return tuple(TokenLogprobs(*row) for row in zip(*columns, strict=True))


def compute_logprobs(logits_RV: Tensor, token_ids_R: Tensor, count: int) -> PackedLogprobs:
    """Each row's token's log probability and rank, and the `count` likeliest tokens."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    taken_R1 = logprobs_RV.gather(1, token_ids_R.unsqueeze(1))
    top_RN = logprobs_RV.topk(min(count, logits_RV.shape[1]), dim=1)
    parts = (
        token_ids_R,
        taken_R1.squeeze(1).double().view(torch.int64),
        (logprobs_RV > taken_R1).sum(dim=1) + 1,
        top_RN.indices.flatten(),
        top_RN.values.flatten().double().view(torch.int64),
    )
    return PackedLogprobs(torch.cat(parts), len(token_ids_R))
