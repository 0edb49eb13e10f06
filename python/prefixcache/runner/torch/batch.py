"""From a `StepPlan` to the tensors of a forward pass.

A decode with guesses is computed as a sequence for each of its tokens, of one query row: by the
very kernels, and the very graphs, of a decode without. Its guesses are keys of the rows after them.

Letters of shapes: T tokens in the step, S sequences, R rows of logits, P pages (blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.runner.ranges import indptr_of, ranges
from prefixcache.runner.torch.attention.base import AttentionBatch, AttentionGroup
from prefixcache.runner.torch.sampling.upload import Upload
from prefixcache.runner.torch.typed import from_numpy
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
    `max_pages` has for each of `groups` the most pages of a sequence in a step.
    """

    def __init__(
        self,
        *,
        groups: Sequence[AttentionGroup],
        block_size: int,
        max_tokens: int,
        max_seqs: int,
        max_pages: Sequence[int],
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._block_size = block_size
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
        num_sampled = np.array([sequence.sampling is not None for sequence in plan.sequences], int)
        for row, drafts in plan.drafts:
            num_sampled[row] += len(drafts)
        upload = Upload()
        token_ids = upload.integers(plan.token_ids)
        positions = upload.integers(ranges(starts, counts))
        sampled_rows = upload.integers(ranges(np.cumsum(counts) - num_sampled, num_sampled))
        attention = [
            self._attention_batch(plan, starts, counts, *of_group, upload)
            for of_group in zip(self._groups, self.block_tables, strict=True)
        ]
        sent = upload.send(self._device)
        return Batch(
            token_ids_T=_resolved(plan, token_ids(sent), sampled_R),
            positions_T=positions(sent),
            sampled_rows_R=sampled_rows(sent),
            attention=tuple(batch(sent) for batch in attention),
        )

    def _attention_batch(
        self,
        plan: StepPlan,
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        group: AttentionGroup,
        tables: BlockTableBuffers,
        upload: Upload,
    ) -> Callable[[Tensor], AttentionBatch]:
        """Adds a group's pages and slots to what is uploaded; the result picks them out of it."""
        num_decodes = plan.num_decodes
        if group.attends and (num_apart := _num_apart(plan)):
            of_apart = counts[:num_apart]
            ends_R = ranges(starts[:num_apart], of_apart) + 1
            tables = _tables_apart(
                tables, of_apart, ends_R, len(counts), group.spec.sliding_window, self._block_size
            )
            counts = np.concatenate([np.ones_like(ends_R), counts[num_apart:]])
            num_decodes = len(ends_R)
        num_seqs = len(counts)
        qo_indptr = from_numpy(indptr_of(counts))
        slots = upload.integers(tables.slot_mapping[: plan.num_tokens])
        pages = upload.int32(tables.indices[: tables.indptr[num_seqs]])
        return lambda sent: AttentionBatch(
            qo_indptr=qo_indptr,
            kv_indptr=from_numpy(tables.indptr[: num_seqs + 1]),
            kv_indices=pages(sent),
            last_page_len=from_numpy(tables.last_page_len[:num_seqs]),
            slot_mapping=slots(sent),
            num_decodes=num_decodes,
            first_pages=from_numpy(tables.first_pages[:num_seqs]),
        )


def _num_apart(plan: StepPlan) -> int:
    """How many sequences, the first ones, are computed as one for each of their tokens."""
    return plan.num_decodes if plan.drafts else 0


def _tables_apart(
    tables: BlockTableBuffers,
    counts: npt.NDArray[np.int64],
    ends_R: npt.NDArray[np.int64],
    num_seqs: int,
    window: int | None,
    block_size: int,
) -> BlockTableBuffers:
    """The block tables where each token of the first sequences, of which `counts` are computed, is
    a sequence that ends with it, and has the pages that a decode of it alone would have.

    `ends_R` is how many tokens that is.
    """
    num_apart = len(counts)
    owners_R = np.repeat(np.arange(num_apart), counts)
    first_R = 0 * ends_R if window is None else np.maximum(ends_R - window, 0) // block_size
    pages_R = -(-ends_R // block_size) - first_R
    places = ranges(tables.indptr[owners_R] + first_R - tables.first_pages[owners_R], pages_R)
    rest, pages = slice(num_apart, num_seqs), tables.indptr[num_apart : num_seqs + 1]
    return BlockTableBuffers(
        indptr=indptr_of(np.concatenate([pages_R, np.diff(pages)])),
        indices=np.concatenate([tables.indices[places], tables.indices[pages[0] : pages[-1]]]),
        last_page_len=_int32((ends_R - 1) % block_size + 1, tables.last_page_len[rest]),
        slot_mapping=tables.slot_mapping,
        first_pages=_int32(first_R, tables.first_pages[rest]),
    )


def _int32(*parts: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    return np.concatenate(parts).astype(np.int32)


def _resolved(plan: StepPlan, token_ids_T: Tensor, sampled_R: Tensor) -> Tensor:
    return token_ids_T if plan.token_ids.min() >= 0 else resolve_pending(token_ids_T, sampled_R)


def resolve_pending(token_ids_T: Tensor, sampled_R: Tensor) -> Tensor:
    """Puts the i-th sampled token in the place of -1 - i; an unusable one becomes token 0.

    The sequence of an unusable token ends with an error, whatever is computed of it here.
    """
    sampled_T = sampled_R[(-1 - token_ids_T).clamp_(min=0)].clamp_(min=0)
    return torch.where(token_ids_T < 0, sampled_T, token_ids_T)
