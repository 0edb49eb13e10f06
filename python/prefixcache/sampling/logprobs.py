"""Log probabilities as they are reported: of the model's own logits, before any adjustment.

Letters of shapes: R rows, V vocabulary, N alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.request import TokenLogprobs
from prefixcache.sampling.upload import Upload
from prefixcache.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class ComputedLogprobs:
    """Log probabilities on the device, for as many rows as were asked about."""

    token_ids_R: Tensor
    taken_R: Tensor
    ranks_R: Tensor
    top_ids_RN: Tensor
    top_RN: Tensor

    def packed(self) -> Tensor:
        """All numbers as one row of int64, for `unpack`."""
        parts = (
            self.token_ids_R,
            self.taken_R.double().view(torch.int64),
            self.ranks_R,
            self.top_ids_RN.flatten(),
            self.top_RN.flatten().double().view(torch.int64),
        )
        return torch.cat(parts)


def compute_logprobs(logits_RV: Tensor, token_ids_R: Tensor, count: int) -> ComputedLogprobs:
    """Each row's token's log probability and rank, and the `count` likeliest tokens."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    taken_R1 = logprobs_RV.gather(1, token_ids_R.unsqueeze(1))
    top_RN = logprobs_RV.topk(min(count, logits_RV.shape[1]), dim=1)
    return ComputedLogprobs(
        token_ids_R=token_ids_R,
        taken_R=taken_R1.squeeze(1),
        ranks_R=(logprobs_RV > taken_R1).sum(dim=1) + 1,
        top_ids_RN=top_RN.indices,
        top_RN=top_RN.values,
    )


def unpack(numbers: npt.NDArray[np.int64], num_rows: int) -> tuple[TokenLogprobs, ...]:
    """What `ComputedLogprobs.packed` holds, on the host."""
    token_ids, taken, ranks = numbers[: 3 * num_rows].reshape(3, num_rows)
    top_ids, top = numbers[3 * num_rows :].reshape(2, num_rows, -1)
    columns = (
        token_ids.tolist(),
        taken.view(np.float64).tolist(),
        ranks.tolist(),
        map(tuple, top_ids.tolist()),
        map(tuple, np.ascontiguousarray(top).view(np.float64).tolist()),
    )
    return tuple(TokenLogprobs(*row) for row in zip(*columns, strict=True))


def token_logprobs(logits_RV: Tensor, token_ids: TokenIds, count: int) -> tuple[TokenLogprobs, ...]:
    """For each row its token's log probability and rank, and the `count` likeliest tokens.

    Waits for the device.
    """
    upload = Upload()
    ids_at = upload.integers(token_ids)
    token_ids_R = ids_at(upload.send(logits_RV.device))
    packed = compute_logprobs(logits_RV, token_ids_R, count).packed()
    return unpack(packed.cpu().numpy(), len(token_ids))
