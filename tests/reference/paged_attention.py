"""Causal attention over a paged cache, one query and one head at a time, from the definition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixcache.runner.torch.attention.base import AttentionBatch, AttentionSpec


@dataclass(frozen=True)
class SlowSequence:
    """One sequence of a step: `start` tokens are cached, `count` follow; pages in order.

    The first `left_out` of the pages are not listed: they are behind the window.
    """

    start: int
    count: int
    pages: tuple[int, ...]
    is_decode: bool = False
    left_out: int = 0

    def slot(self, position: int, page_size: int) -> int:
        return self.pages[position // page_size] * page_size + position % page_size


def batch_of(sequences: list[SlowSequence], page_size: int) -> AttentionBatch:
    """The step's arrays, written out sequence by sequence."""
    qo, kv, indices, last, slots = [0], [0], [], [], []
    for one in sequences:
        total = one.start + one.count
        used = one.pages[one.left_out : math.ceil(total / page_size)]
        qo.append(qo[-1] + one.count)
        kv.append(kv[-1] + len(used))
        indices.extend(used)
        last.append(total - (one.left_out + len(used) - 1) * page_size)
        slots.extend(one.slot(p, page_size) for p in range(one.start, total))
    decodes = next((i for i, s in enumerate(sequences) if not s.is_decode), len(sequences))
    return AttentionBatch(
        qo_indptr=torch.tensor(qo, dtype=torch.int32),
        kv_indptr=torch.tensor(kv, dtype=torch.int32),
        kv_indices=torch.tensor(indices, dtype=torch.int32),
        last_page_len=torch.tensor(last, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        num_decodes=decodes,
        first_pages=torch.tensor([one.left_out for one in sequences], dtype=torch.int32),
    )


def slow_attention(
    spec: AttentionSpec, sequences: list[SlowSequence], kv: Tensor, q: Tensor
) -> Tensor:
    """[T, H, D] in float64; the cache already holds the step's own keys and values."""
    page_size = kv.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    row = 0
    for one in sequences:
        for position in range(one.start, one.start + one.count):
            first = 0 if spec.sliding_window is None else position - spec.sliding_window + 1
            seen = range(max(first, 0), position + 1)
            places = [divmod(one.slot(p, page_size), page_size) for p in seen]
            keys = torch.stack([kv[page, 0, at] for page, at in places]).double()
            values = torch.stack([kv[page, 1, at] for page, at in places]).double()
            for head in range(spec.num_heads):
                out[row, head] = _head(spec, q[row, head].double(), keys, values, head)
            row += 1
    return out


def _head(spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, head: int) -> Tensor:
    shared = head // (spec.num_heads // spec.num_kv_heads)
    scores = keys[:, shared] @ query * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return torch.softmax(scores, dim=0) @ values[:, shared]
