"""From a `StepPlan` to the tensors of a forward pass.

Letters of shapes: T tokens in the step, S sequences, R rows of logits, P pages (blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixcache.attention.base import AttentionBatch
from prefixcache.attention.fence import Fence
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's inputs. `sampled_rows_R` are the rows of T whose logits choose a token."""

    token_ids_T: Tensor
    positions_T: Tensor
    sampled_rows_R: Tensor
    attention: AttentionBatch


class StepBuffers:
    """Host tensors for the largest possible step, filled anew in each one.

    Pinned when the device is a GPU, so that copies to it need not wait, those of the attention
    backend included; `block_tables` waits until the step that was last `launched` from here is
    computed. It holds numpy views, one set for each KV cache group, that the cache writes into.
    `max_pages` is the number of pages of one sequence.
    """

    def __init__(
        self, *, max_tokens: int, max_seqs: int, max_pages: int, device: torch.device
    ) -> None:
        self._device = device
        self._token_ids = self._host(max_tokens, torch.int64)
        self._positions = self._host(max_tokens, torch.int64)
        self._slot_mapping = self._host(max_tokens, torch.int64)
        self._qo_indptr = self._host(max_seqs + 1, torch.int32)
        self._kv_indptr = self._host(max_seqs + 1, torch.int32)
        self._kv_indices = self._host(max_seqs * max_pages, torch.int32)
        self._last_page_len = self._host(max_seqs, torch.int32)
        self._sampled_rows = self._host(max_seqs, torch.int64)
        self._launched = Fence(device)
        self._block_tables = (
            BlockTableBuffers(
                indptr=self._kv_indptr.numpy(),
                indices=self._kv_indices.numpy(),
                last_page_len=self._last_page_len.numpy(),
                slot_mapping=self._slot_mapping.numpy(),
            ),
        )

    @property
    def block_tables(self) -> Sequence[BlockTableBuffers]:
        """Views for the cache to fill."""
        self._launched.wait()
        return self._block_tables

    def launched(self) -> None:
        """To be called when all work of a step is on its way to the device."""
        self._launched.mark()

    def load(self, plan: StepPlan, sampled_R: Tensor) -> Batch:
        """The step's tensors, after the cache has filled `block_tables` for the same plan.

        `sampled_R` are the tokens that the step before sampled, on the device: the plan's tokens
        below zero stand for them.
        """
        counts = np.array([sequence.num_tokens for sequence in plan.sequences])
        starts = np.array([sequence.start for sequence in plan.sequences])
        ends = np.cumsum(counts)
        num_tokens, num_seqs = plan.num_tokens, len(ends)
        self._token_ids.numpy()[:num_tokens] = plan.token_ids
        self._positions.numpy()[:num_tokens] = np.arange(num_tokens) + np.repeat(
            starts - (ends - counts), counts
        )
        self._qo_indptr.numpy()[1 : num_seqs + 1] = ends
        sampled = ends[[sequence.sampling is not None for sequence in plan.sequences]] - 1
        self._sampled_rows.numpy()[: len(sampled)] = sampled
        return Batch(
            token_ids_T=self._tokens_on_device(plan, sampled_R),
            positions_T=self._on_device(self._positions[:num_tokens]),
            sampled_rows_R=self._on_device(self._sampled_rows[: len(sampled)]),
            attention=self._attention_batch(plan, num_tokens, num_seqs),
        )

    def _tokens_on_device(self, plan: StepPlan, sampled_R: Tensor) -> Tensor:
        token_ids = self._on_device(self._token_ids[: plan.num_tokens])
        return token_ids if plan.token_ids.min() >= 0 else resolve_pending(token_ids, sampled_R)

    def _attention_batch(self, plan: StepPlan, num_tokens: int, num_seqs: int) -> AttentionBatch:
        num_pages = int(self._kv_indptr[num_seqs])
        return AttentionBatch(
            qo_indptr=self._qo_indptr[: num_seqs + 1],
            kv_indptr=self._kv_indptr[: num_seqs + 1],
            kv_indices=self._kv_indices[:num_pages],
            last_page_len=self._last_page_len[:num_seqs],
            slot_mapping=self._on_device(self._slot_mapping[:num_tokens]),
            max_q_len=max(sequence.num_tokens for sequence in plan.sequences),
            num_decodes=plan.num_decodes,
        )

    def _host(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def resolve_pending(token_ids_T: Tensor, sampled_R: Tensor) -> Tensor:
    """Puts the i-th sampled token in the place of -1 - i; an unusable one becomes token 0.

    The sequence of an unusable token ends with an error, whatever is computed of it here.
    """
    sampled_T = sampled_R[(-1 - token_ids_T).clamp_(min=0)].clamp_(min=0)
    return torch.where(token_ids_T < 0, sampled_T, token_ids_T)
