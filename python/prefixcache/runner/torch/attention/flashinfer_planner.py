"""Plans of FlashInfer's kernels, one for all groups of a model that have the same attention.

Letters of shapes as in `flashinfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixcache.runner.torch.attention.base import AttentionBatch
from prefixcache.runner.torch.attention.fence import Fence
from prefixcache.runner.torch.attention.flashinfer_kernels import (
    FixedRows,
    Kernel,
    KernelMaker,
    MakeKernel,
)
from prefixcache.runner.torch.attention.flashinfer_plan import (
    KernelRows,
    ListedPages,
    align_tables,
    grid_pages,
    have_equal_lengths,
    pad_decodes,
    select_sequences,
)


@dataclass(frozen=True, slots=True)
class KernelPart:
    """Query rows of a step, their part of its page indices, and the kernel planned for them."""

    rows: slice
    pages: slice
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What was planned of a step, from the batch of one group, `listed` with its pages."""

    batch: AttentionBatch
    listed: AttentionBatch
    pages: ListedPages
    parts: tuple[KernelPart, ...]

    def listed_of(self, batch: AttentionBatch) -> AttentionBatch:
        """A group's batch with the pages that were planned.

        Raises `RuntimeError` where its tables have other lengths than those that were planned.
        """
        if batch is self.batch:
            return self.listed
        if not have_equal_lengths(batch, self.batch):
            raise RuntimeError("Groups of one window must be given tables of the same lengths.")
        return self.pages.of(batch)


class GraphTables:
    """Device tensors of fixed addresses that graphs of all sizes share: only one runs at a time."""

    def __init__(self, max_rows: int, max_page_indices: int, device: torch.device) -> None:
        def table(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.indices = table(max_page_indices)
        self.slots = table(max_rows)
        self.zeros = table(max_rows)
        self._qo_indptr = table(max_rows + 1)
        self._kv_indptr = table(max_rows + 1)
        self._last_page_len = table(max_rows)

    def rows(self, size: int) -> FixedRows:
        """The tables of one graph size."""
        return FixedRows(
            qo_indptr=self._qo_indptr[: size + 1],
            kv_indptr=self._kv_indptr[: size + 1],
            last_page_len=self._last_page_len[:size],
            indices=self.indices,
        )

    def load(self, batch: AttentionBatch, size: int) -> None:
        """Writes slots and page indices; those of rows added to make `size` are the null block."""
        count, pages = len(batch.last_page_len), int(batch.kv_indptr[-1])
        self.slots[:count].copy_(batch.slot_mapping, non_blocking=True)
        self.slots[count:size].zero_()
        self.indices[:pages].copy_(batch.kv_indices[:pages], non_blocking=True)
        self.indices[pages : pages + size - count].zero_()


class Planner:
    """The kernels of one attention, over pages of one size, and what they are planned for.

    Without `make_decode`, the prefill kernel computes all rows. With `aligns_tables`, pages are
    left out of tables by whole tiles of FA3. The first group that has this attention plans; the
    others, whose tables have the same lengths, run by its plan.
    """

    def __init__(
        self,
        makes: KernelMaker,
        make_decode: MakeKernel | None,
        *,
        aligns_tables: bool,
        device: torch.device,
    ) -> None:
        self._makes = makes
        self._make_decode = make_decode
        self._aligns_tables = aligns_tables
        self._device = device
        self._fence = Fence(device)
        self._page_size = 0
        self._prefill: Kernel | None = None
        self._decode: Kernel | None = None
        self._graphs: dict[int, Kernel] = {}
        self._latest: KernelPlan | None = None

    def bind(self, page_size: int) -> None:
        """Makes the kernels; those of graphs go."""
        self._page_size = page_size
        self._prefill = self._makes.prefill(page_size)
        self._decode = None if self._make_decode is None else self._make_decode(page_size)
        self._graphs, self._latest = {}, None

    @property
    def left_out_multiple(self) -> int:
        """Pages are left out of a table in multiples of this number."""
        return grid_pages(self._page_size) if self._aligns_tables else 1

    def plan(self, batch: AttentionBatch) -> KernelPlan:
        """Plans the step's kernels, after the copies of the plan before have left their buffers."""
        if self._prefill is None:
            raise RuntimeError("FlashInferAttention needs bind before it plans or runs.")
        self._fence.wait()
        pages = align_tables(batch, self.left_out_multiple)
        listed = pages.of(batch)
        indices = listed.kv_indices.to(self._device, non_blocking=True)
        count = len(batch.last_page_len)
        split = 0 if self._decode is None else batch.num_decodes
        parts: list[KernelPart] = []
        if self._decode is not None and split:
            parts.append(_planned(self._decode, select_sequences(listed, 0, split), indices, 0))
        if split < count:
            rows = select_sequences(listed, split, count)
            parts.append(_planned(self._prefill, rows, indices, split))
        return self._keep(KernelPlan(batch, listed, pages, tuple(parts)))

    def reserve_graphs(self, sizes: Sequence[int], tables: GraphTables) -> None:
        """Makes the kernels of captured decodes of `sizes` rows, which read `tables`."""
        make = self._make_decode or self._makes.prefill
        self._graphs = {size: make(self._page_size, tables.rows(size)) for size in sizes}

    def plan_graph(self, batch: AttentionBatch, size: int, indices: Tensor) -> KernelPlan:
        """Plans a pure decode with rows of the null block added to make `size`."""
        self._fence.wait()
        pages = align_tables(batch, self.left_out_multiple)
        listed = pages.of(batch)
        part = _planned(self._graphs[size], pad_decodes(listed, size), indices, 0)
        # A replay reads the fixed table, whatever the step.
        all_layers = KernelPart(part.rows, slice(None), part.kernel)
        return self._keep(KernelPlan(batch, listed, pages, (all_layers,)))

    def follow(self) -> KernelPlan:
        """The plan of the group that was planned before. Raises `RuntimeError` without one."""
        if self._latest is None:
            raise RuntimeError("The first group of an attention is planned before the others.")
        return self._latest

    def _keep(self, plan: KernelPlan) -> KernelPlan:
        self._fence.mark()
        self._latest = plan
        return plan


def _planned(kernel: Kernel, rows: KernelRows, indices: Tensor, first_row: int) -> KernelPart:
    kernel.plan(rows, indices)
    return KernelPart(slice(first_row, first_row + rows.num_rows), rows.pages, kernel)
