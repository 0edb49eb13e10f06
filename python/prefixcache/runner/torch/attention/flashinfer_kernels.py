"""FlashInfer's wrappers as the backend plans and runs them.

Letters of shapes as in `flashinfer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.flashinfer_plan import (
    KernelRows,
    KeyCounts,
    needs_tensor_cores,
    parts_bytes,
    plan_options,
    planned_tiles_alone,
)
from prefixcache.runner.torch.typed import unflatten

LAYOUT = "NHD"
# Partial results of split keys. FlashInfer recommends 128 MiB; wide models take more in large
# batches.
_WORKSPACE_BYTES = 256 << 20
# What every FlashInfer wrapper makes for itself until it is given a shared one.
_PLAN_BYTES = 8 << 20
# A captured decode plans at most a tile for each head of each row, by seven int32 (PrefillSM90Plan
# of scheduler.cuh), and a few for each multiprocessor.
_PLAN_BYTES_OF_HEAD = 64
_PLAN_BYTES_OF_DEVICE = 256 << 10
_H200_MULTIPROCESSORS = 132

PoolTable = tuple[Tensor, Tensor, Tensor]


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere those of the one that plans are tried for."""
    if device.type != "cuda":
        return _H200_MULTIPROCESSORS
    properties = cast("Any", torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
    return properties.multi_processor_count


def needed_workspace(specs: Sequence[AttentionSpec], device: torch.device) -> int:
    """Room for the parts of captured decodes that split keys, in large batches of most models.

    In small ones of all models, since those need it to fill the device.
    """
    count = num_multiprocessors(device)
    return max(_WORKSPACE_BYTES, *(parts_bytes(spec, 1, count) for spec in specs))


class SharedMemory:
    """What the backends of all groups of a model have in common: one kernel runs at a time.

    A kernel writes its partial results to `workspace` and adds them up before the next one starts.
    What a plan leaves for the runs of a step lies in memory that each backend has of its own, since
    all groups are planned before the first one runs.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._pool_shape = (0, 0)
        self._pool_table: PoolTable = (self.workspace, self.workspace, self.workspace)

    def pool_table(self, num_pages: int, page_size: int) -> PoolTable:
        """The whole pool as the block table of one sequence: indices, indptr, last_page_len.

        Position p of that sequence is slot p, so the append kernel takes slots for positions.
        """
        if self._pool_shape != (num_pages, page_size):
            device = self.workspace.device
            self._pool_shape = (num_pages, page_size)
            self._pool_table = (
                torch.arange(num_pages, dtype=torch.int32, device=device),
                torch.tensor([0, num_pages], dtype=torch.int32, device=device),
                torch.tensor([page_size], dtype=torch.int32, device=device),
            )
        return self._pool_table


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRows:
    """Device tables of one graph size, for the wrapper to read in every replay."""

    qo_indptr: Tensor  # int32 [size + 1]
    kv_indptr: Tensor  # int32 [size + 1]
    last_page_len: Tensor  # int32 [size]
    indices: Tensor  # int32 [N]


class Kernel:
    """A planned wrapper. `fixed` are the arguments that are the same in every plan.

    `adds_tiles` tells that FlashInfer launches more tiles than it plans (see
    `planned_tiles_alone`), `pins` that tables are given in pinned memory.
    """

    def __init__(
        self,
        wrapper: Any,
        fixed: dict[str, Any],
        *,
        group_size: int,
        pins: bool,
        adds_tiles: bool = False,
    ) -> None:
        self._wrapper = wrapper
        self._fixed = fixed
        self._group_size = group_size
        self._adds_tiles = adds_tiles
        self._pins = pins

    def plan(self, rows: KernelRows, indices: Tensor) -> None:
        """Plans for the next runs."""
        lens = rows.kv_lens(self._fixed["page_size"])
        pinned = rows.pinned() if self._pins else rows
        pinned_lens = (lens.pin_memory() if self._pins else lens).as_subclass(KeyCounts)
        self._plan(pinned, indices[rows.pages], self._fixed | {"seq_lens": pinned_lens})
        if self._adds_tiles:
            self._wrapper._plan_info = planned_tiles_alone(  # noqa: SLF001 (no other way to it)
                self._wrapper._plan_info,  # noqa: SLF001
                rows.num_rows,
                self._group_size,
            )

    def run(self, q_THD: Tensor, kv: Tensor, indices: Tensor, out_THD: Tensor) -> None:
        """Computes the planned rows over the pages of `indices`, as many as were planned with."""
        # They are the one table of a plan that differs between groups. A graph's next plan writes
        # to the table that the wrapper was made with.
        planned = self._wrapper._paged_kv_indices_buf  # noqa: SLF001 (no other way to it)
        self._wrapper._paged_kv_indices_buf = indices  # noqa: SLF001
        self._wrapper.run(q_THD, kv, out=out_THD)
        self._wrapper._paged_kv_indices_buf = planned  # noqa: SLF001

    def _plan(self, rows: KernelRows, indices: Tensor, fixed: dict[str, Any]) -> None:
        raise NotImplementedError


class _Decode(Kernel):
    """One query row a sequence."""

    def _plan(self, rows: KernelRows, indices: Tensor, fixed: dict[str, Any]) -> None:
        self._wrapper.plan(rows.kv_indptr, indices, rows.last_page_len, **fixed)


class _Prefill(Kernel):
    """Any number of query rows a sequence, causal at its last token."""

    _causal = True

    def _plan(self, rows: KernelRows, indices: Tensor, fixed: dict[str, Any]) -> None:
        self._wrapper.plan(
            rows.qo_indptr,
            rows.kv_indptr,
            indices,
            rows.last_page_len,
            causal=self._causal,
            # FlashInfer would look for it entry by entry.
            max_token_per_sequence=int(rows.qo_indptr.diff().max()),
            **fixed,
        )


class _PackedDecode(_Prefill):
    """One query row a sequence, whose G heads a key-value head become G rows of that one head.

    All of them see all keys, as the row does: nothing is masked.
    """

    _causal = False

    def plan(self, rows: KernelRows, indices: Tensor) -> None:
        super().plan(replace(rows, qo_indptr=rows.qo_indptr * self._group_size), indices)

    def run(self, q_THD: Tensor, kv: Tensor, indices: Tensor, out_THD: Tensor) -> None:
        packed = unflatten(q_THD, 1, (-1, self._group_size)).transpose(1, 2).flatten(0, 1)
        out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
        super().run(packed, kv, indices, out)
        heads = unflatten(out, 0, (-1, self._group_size)).transpose(1, 2)
        unflatten(out_THD, 1, (-1, self._group_size)).copy_(heads)


MakeKernel = Callable[..., Kernel]


class KernelMaker:
    """Makes FlashInfer's wrappers of one group. Those of one kind share a plan's memory.

    Of one kind only one is planned in a step, be it of a graph or not.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Any,
        *,
        prefill_backend: str,
        splits_keys: bool,
        memory: SharedMemory,
    ) -> None:
        def plans() -> Tensor:
            return torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=device)

        self._kernels = kernels
        self._spec = spec
        self._prefill_backend = prefill_backend
        self._group_size = spec.num_heads // spec.num_kv_heads
        self._pins = device.type == "cuda"
        self._tensor_cores = needs_tensor_cores(spec)
        self._num_multiprocessors = num_multiprocessors(device)
        self._options = plan_options(spec, dtype) | {"disable_split_kv": not splits_keys}
        self._workspace = memory.workspace
        self._prefill_plans = plans()
        self._decode_plans = plans()

    def prefill(self, page_size: int, fixed_rows: FixedRows | None = None) -> _Prefill:
        """A kernel for chunks, over tables of fixed addresses when these are given."""
        sizes = self._sizes(page_size)
        return self._make_prefill(_Prefill, sizes, self._prefill_plans, fixed_rows)

    def packed_decode(self, page_size: int, fixed_rows: FixedRows | None = None) -> _Prefill:
        """The same kernel for single rows, their heads packed into rows."""
        sizes = self._sizes(page_size) | {"num_qo_heads": self._spec.num_kv_heads}
        return self._make_prefill(_PackedDecode, sizes, self._decode_plans, fixed_rows)

    def decode(self, page_size: int, fixed_rows: FixedRows | None = None) -> _Decode:
        """A kernel for single rows, over tables of fixed addresses when these are given.

        Always FA2: "auto" may become another one with the release or the shape of a step.
        """
        tables = _graph_tables(fixed_rows, "buffer")
        splits = self._splits(len(fixed_rows.last_page_len) if fixed_rows else 0)
        wrapper = self._kernels.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_tensor_cores=self._tensor_cores,
            backend="fa2",
            **tables,
        )
        plans = self._plan_memory(self._decode_plans, fixed_rows)
        wrapper.reset_workspace_buffer(self._workspace, plans)
        return _Decode(
            wrapper,
            self._sizes(page_size)
            | {"head_dim": self._spec.head_dim}
            | self._options
            | {"disable_split_kv": not splits},
            group_size=self._group_size,
            # It masks added tiles only with split keys.
            adds_tiles=fixed_rows is not None and not splits,
            pins=self._pins,
        )

    def _make_prefill(
        self,
        kind: type[_Prefill],
        sizes: dict[str, Any],
        plans: Tensor,
        fixed_rows: FixedRows | None,
    ) -> _Prefill:
        tables = _graph_tables(fixed_rows, "buf")
        if fixed_rows is not None:
            tables["qo_indptr_buf"] = fixed_rows.qo_indptr
        wrapper = self._kernels.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, backend=self._prefill_backend, **tables
        )
        plans = self._plan_memory(plans, fixed_rows)
        wrapper.reset_workspace_buffer(self._workspace, plans)
        return kind(
            wrapper,
            sizes | {"head_dim_qk": self._spec.head_dim} | self._options,
            group_size=self._group_size,
            pins=self._pins,
        )

    def _plan_memory(self, plans: Tensor, fixed_rows: FixedRows | None) -> Tensor:
        """The part of it that a plan can take: a wrapper pins as much on the host."""
        if fixed_rows is None:
            return plans
        rows = len(fixed_rows.last_page_len)
        return plans[: _PLAN_BYTES_OF_DEVICE + _PLAN_BYTES_OF_HEAD * rows * self._spec.num_heads]

    def _splits(self, captured_rows: int) -> bool:
        """Whether decodes split keys: not where a graph's parts have no room in the workspace.

        The kernel without tensor cores always splits them as it likes.
        """
        if not captured_rows or not self._tensor_cores:
            return True
        needed = parts_bytes(self._spec, captured_rows, self._num_multiprocessors)
        return needed <= len(self._workspace)

    def _sizes(self, page_size: int) -> dict[str, Any]:
        return {
            "num_qo_heads": self._spec.num_heads,
            "num_kv_heads": self._spec.num_kv_heads,
            "page_size": page_size,
        }


def _graph_tables(rows: FixedRows | None, ending: str) -> dict[str, Any]:
    """What both kinds of wrappers are given of fixed addresses, under names of this ending."""
    if rows is None:
        return {}
    return {
        "use_cuda_graph": True,
        f"paged_kv_indptr_{ending}": rows.kv_indptr,
        f"paged_kv_indices_{ending}": rows.indices,
        f"paged_kv_last_page_len_{ending}": rows.last_page_len,
    }
