"""Paged attention in plain torch: gathers a sequence's blocks, then SDPA.

The straightforward form, which other backends are checked against. Letters of shapes: see
`base.py`; N keys of a sequence, L query rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.runner.cuda.attention.base import AttentionBatch, AttentionSpec, kv_shape_nhd


@dataclass(frozen=True, slots=True)
class _SequencePlan:
    """One sequence of the step: its query rows, its blocks and who sees whom."""

    rows: slice
    blocks: Tensor  # int64, the sequence's blocks in order
    num_keys: int
    visible_LN: Tensor | None  # None: every query sees every key


class TorchAttention:
    """Attention of one group of layers by torch's `scaled_dot_product_attention`."""

    name = "torch"
    batch_invariant = False
    rotate_and_run = None
    kv_shape = staticmethod(kv_shape_nhd)

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._kv_layers: Sequence[Tensor] = ()
        self._block_size = 0
        self._sequences: list[_SequencePlan] = []
        self._slot_blocks_T = torch.empty(0, dtype=torch.int64)
        self._slot_offsets_T = torch.empty(0, dtype=torch.int64)

    def bind(self, kv_layers: Sequence[Tensor]) -> None:
        """Takes the KV tensors, one a layer."""
        self._kv_layers = kv_layers
        self._block_size = kv_layers[0].shape[2]

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares masks and block lists of the step."""
        self._slot_blocks_T = batch.slot_mapping // self._block_size
        self._slot_offsets_T = batch.slot_mapping % self._block_size
        qo_indptr: list[int] = batch.qo_indptr.tolist()
        kv_indptr: list[int] = batch.kv_indptr.tolist()
        last_page_len: list[int] = batch.last_page_len.tolist()
        zeros = [0] * len(last_page_len)
        first_pages = zeros if batch.first_pages is None else batch.first_pages.tolist()
        device = batch.slot_mapping.device
        blocks = batch.kv_indices.to(device=device, dtype=torch.int64)
        self._sequences = [
            self._plan_sequence(
                slice(qo_indptr[s], qo_indptr[s + 1]),
                blocks[kv_indptr[s] : kv_indptr[s + 1]],
                last_page_len[s],
                first_pages[s],
            )
            for s in range(len(last_page_len))
        ]

    def _plan_sequence(
        self, rows: slice, blocks: Tensor, last_page_len: int, first_page: int
    ) -> _SequencePlan:
        num_rows = rows.stop - rows.start
        num_keys = (len(blocks) - 1) * self._block_size + last_page_len
        self._check_left_out(first_page, first_page * self._block_size + num_keys - num_rows)
        visible_LN = self._visible(num_rows, num_keys, blocks.device)
        return _SequencePlan(rows, blocks, num_keys, visible_LN)

    def _check_left_out(self, first_page: int, start: int) -> None:
        """Raises `ValueError` where the query at position `start` sees a page before the first."""
        window = self._spec.sliding_window
        seen = 0 if window is None else max(start + 1 - window, 0)
        if not 0 <= first_page <= seen // self._block_size:
            raise ValueError(
                f"first_pages leaves out {first_page} pages before a query that sees keys from "
                f"position {seen} on"
            )

    def _visible(self, num_rows: int, num_keys: int, device: torch.device) -> Tensor | None:
        window = self._spec.sliding_window
        if num_rows == 1 and (window is None or window >= num_keys):
            return None
        query_L1 = torch.arange(num_keys - num_rows, num_keys, device=device).unsqueeze(1)
        key_1N = torch.arange(num_keys, device=device).unsqueeze(0)
        visible_LN = key_1N <= query_L1
        return visible_LN if window is None else visible_LN & (key_1N > query_L1 - window)

    def run(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Writes k and v to their slots, then attends; [T, H, D] in the type of `q_THD`."""
        kv_P2BKD = self._kv_layers[layer]
        for half, x_TKD in enumerate((k_TKD, v_TKD)):
            if x_TKD is not None:
                kv_P2BKD[self._slot_blocks_T, half, self._slot_offsets_T] = x_TKD
        out_THD = torch.empty_like(q_THD)
        for sequence in self._sequences:
            out_THD[sequence.rows] = self._attend(q_THD[sequence.rows], kv_P2BKD, sequence, sinks_H)
        return out_THD

    def _attend(
        self,
        q_LHD: Tensor,
        kv_P2BKD: Tensor,
        sequence: _SequencePlan,
        sinks_H: Tensor | None,
    ) -> Tensor:
        kv_N2BKD = kv_P2BKD.index_select(0, sequence.blocks)
        k_NKD = kv_N2BKD[:, 0].flatten(0, 1)[: sequence.num_keys]
        v_NKD = kv_N2BKD[:, 1].flatten(0, 1)[: sequence.num_keys]
        out_1HLD = self._scores_and_values(
            q_LHD.transpose(0, 1).unsqueeze(0),
            k_NKD.transpose(0, 1).unsqueeze(0),
            v_NKD.transpose(0, 1).unsqueeze(0),
            sequence.visible_LN,
            sinks_H,
        )
        return out_1HLD.squeeze(0).transpose(0, 1)

    def _scores_and_values(
        self,
        q_1HLD: Tensor,
        k_1KND: Tensor,
        v_1KND: Tensor,
        visible_LN: Tensor | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        if self._spec.softcap is not None or sinks_H is not None:
            return self._written_out(q_1HLD, k_1KND, v_1KND, visible_LN, sinks_H)
        return F.scaled_dot_product_attention(
            q_1HLD, k_1KND, v_1KND, visible_LN, scale=self._spec.scale, enable_gqa=True
        )

    def _written_out(
        self,
        q_1HLD: Tensor,
        k_1KND: Tensor,
        v_1KND: Tensor,
        visible_LN: Tensor | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """In float32, with a soft cap or sinks, neither of which SDPA has."""
        group = self._spec.num_heads // self._spec.num_kv_heads
        k_1HND = k_1KND.float().repeat_interleave(group, dim=1)
        v_1HND = v_1KND.float().repeat_interleave(group, dim=1)
        scores = q_1HLD.float() @ k_1HND.transpose(-1, -2) * self._spec.scale
        if (cap := self._spec.softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        if visible_LN is not None:
            scores = scores.masked_fill(~visible_LN, float("-inf"))
        if sinks_H is not None:
            sinks_1HL1 = sinks_H.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks_1HL1], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : k_1HND.shape[-2]]
        return (weights @ v_1HND).to(q_1HLD.dtype)
