"""Paged attention in plain torch: gathers a sequence's blocks, then SDPA.

The straightforward form, which other backends are checked against. Letters of shapes: see
`base.py`; N keys of a sequence, L query rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.runner.torch.attention.base import (
    AttentionBatch,
    AttentionSpec,
    BatchSequence,
    kv_shape_nhd,
)


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
        self._sequences: list[BatchSequence] = []
        self._visible: list[Tensor | None] = []
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
        self._sequences = batch.sequences(self._block_size)
        self._visible = [self._keys_seen(sequence) for sequence in self._sequences]

    def _keys_seen(self, sequence: BatchSequence) -> Tensor | None:
        """Which keys each query sees, [L, N]; None where every one sees all.

        Raises `ValueError` where the first query sees a page before the first one listed.
        """
        window, start, stop = self._spec.sliding_window, sequence.start, sequence.stop
        first_page, size = sequence.first_page, self._block_size
        seen = 0 if window is None else max(start + 1 - window, 0)
        if not 0 <= first_page <= seen // size:
            raise ValueError(
                f"first_pages leaves out {first_page} pages before a query that sees keys from "
                f"position {seen} on"
            )
        first_key, device = first_page * size, sequence.pages.device
        if stop - start == 1 and (window is None or window >= stop - first_key):
            return None
        query_L1 = torch.arange(start, stop, device=device).unsqueeze(1)
        key_1N = torch.arange(first_key, stop, device=device).unsqueeze(0)
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
        for sequence, visible_LN in zip(self._sequences, self._visible, strict=True):
            rows, num_keys = sequence.rows, sequence.stop - sequence.first_page * self._block_size
            kv_N2BKD = kv_P2BKD.index_select(0, sequence.pages)
            k_1KND, v_1KND = (
                kv_N2BKD[:, half].flatten(0, 1)[:num_keys].transpose(0, 1).unsqueeze(0)
                for half in range(2)
            )
            q_1HLD = q_THD[rows].transpose(0, 1).unsqueeze(0)
            out_1HLD = self._attend(q_1HLD, k_1KND, v_1KND, visible_LN, sinks_H)
            out_THD[rows] = out_1HLD.squeeze(0).transpose(0, 1)
        return out_THD

    def _attend(
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
