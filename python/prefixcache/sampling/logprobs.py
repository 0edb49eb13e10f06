"""Log probabilities as they are reported: of the model's own logits, before any adjustment.

Letters of shapes: R rows, V vocabulary, N alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache.request import TokenLogprobs


def token_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], count: int
) -> tuple[TokenLogprobs, ...]:
    """For each row its token's log probability and rank, and the `count` likeliest tokens."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    ids_R1 = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device).unsqueeze(1)
    taken_R1 = logprobs_RV.gather(1, ids_R1)
    rank_R = (logprobs_RV > taken_R1).sum(dim=1) + 1
    top_RN = logprobs_RV.topk(min(count, logits_RV.shape[1]), dim=1)
    columns = (
        token_ids,
        taken_R1.squeeze(1).tolist(),
        rank_R.tolist(),
        map(tuple, top_RN.indices.tolist()),
        map(tuple, top_RN.values.tolist()),
    )
    return tuple(TokenLogprobs(*row) for row in zip(*columns, strict=True))
