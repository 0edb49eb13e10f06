"""From a `StepPlan` to the tensors of a forward pass.

Letters of shapes: T tokens in the step, S sequences, R rows of logits, P pages (blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.runner.cuda.attention.base import AttentionBatch
from prefixcache.runner.cuda.sampling.upload import Upload
from prefixcache.types.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's inputs. `sampled_rows_R` are the rows of T whose logits choose a token.

    `attention` has an entry for each KV cache group.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    sampled_rows_R: Tensor
    attention: tuple[AttentionBatch, ...]


class StepBuffers:
    """Block tables of the largest possible step, one set for each KV cache group.

    The cache fills them before each `load`; nothing reads them after the step is launched.
    `max_pages` has for each group the most pages of a sequence in a step.
    """

    def __init__(
        self, *, max_tokens: int, max_seqs: int, max_pages: Sequence[int], device: torch.device
    ) -> None:
        self._device = device
        self.block_tables = tuple(
            BlockTableBuffers.of_size(max_tokens=max_tokens, max_seqs=max_seqs, max_pages=most)
            for most in max_pages
        )

    def load(self, plan: StepPlan, sampled_R: Tensor) -> Batch:
        """The step's tensors; those that the device reads go there in one copy.

        `sampled_R` are the tokens that the step before sampled, on the device: the plan's tokens
        below zero stand for them.
        """
        counts = np.array([sequence.num_tokens for sequence in plan.sequences])
        starts = np.array([sequence.start for sequence in plan.sequences])
        num_tokens, num_seqs = plan.num_tokens, len(counts)
        qo_indptr = np.zeros(num_seqs + 1, np.int32)
        ends = np.cumsum(counts, out=qo_indptr[1:])
        upload = Upload()
        token_ids = upload.integers(plan.token_ids)
        positions = upload.integers(
            np.arange(num_tokens) + np.repeat(starts - (ends - counts), counts)
        )
        samples = [sequence.sampling is not None for sequence in plan.sequences]
        sampled_rows = upload.integers(ends[samples] - 1)
        attention = [
            _attention_batch(plan, tables, torch.from_numpy(qo_indptr), upload)
            for tables in self.block_tables
        ]
        sent = upload.send(self._device)
        return Batch(
            token_ids_T=_resolved(plan, token_ids(sent), sampled_R),
            positions_T=positions(sent),
            sampled_rows_R=sampled_rows(sent),
            attention=tuple(batch(sent) for batch in attention),
        )


def _attention_batch(
    plan: StepPlan, tables: BlockTableBuffers, qo_indptr: Tensor, upload: Upload
) -> Callable[[Tensor], AttentionBatch]:
    """Adds a group's pages and slots to what is uploaded; the result picks them out of it."""
    num_seqs = len(plan.sequences)
    slots = upload.integers(tables.slot_mapping[: plan.num_tokens])
    pages = upload.int32(tables.indices[: tables.indptr[num_seqs]])
    return lambda sent: AttentionBatch(
        qo_indptr=qo_indptr,
        kv_indptr=torch.from_numpy(tables.indptr[: num_seqs + 1]),
        kv_indices=pages(sent),
        last_page_len=torch.from_numpy(tables.last_page_len[:num_seqs]),
        slot_mapping=slots(sent),
        num_decodes=plan.num_decodes,
        first_pages=torch.from_numpy(tables.first_pages[:num_seqs]),
    )


def _resolved(plan: StepPlan, token_ids_T: Tensor, sampled_R: Tensor) -> Tensor:
    return token_ids_T if plan.token_ids.min() >= 0 else resolve_pending(token_ids_T, sampled_R)


def resolve_pending(token_ids_T: Tensor, sampled_R: Tensor) -> Tensor:
    """Puts the i-th sampled token in the place of -1 - i; an unusable one becomes token 0.

    The sequence of an unusable token ends with an error, whatever is computed of it here.
    """
    sampled_T = sampled_R[(-1 - token_ids_T).clamp_(min=0)].clamp_(min=0)
    return torch.where(token_ids_T < 0, sampled_T, token_ids_T)
