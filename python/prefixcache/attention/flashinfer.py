"""Paged attention on CUDA by FlashInfer's kernels, over the core's block tables.

A step is planned once: its decodes go to one kernel, its prompt chunks to another. The kernels
come from an object with FlashInfer's interface, so that `tests/reference/flashinfer_reference.py`
can stand in for them on a CPU. Works with FlashInfer 0.6.14 and newer. Letters of shapes: T tokens
in the step, H query heads, K key-value heads, D head size, P pages, B tokens a page, N page
indices.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from prefixcache.attention.base import AttentionBatch, AttentionSpec, kv_shape_nhd
from prefixcache.attention.fence import Fence
from prefixcache.attention.flashinfer_kernels import (
    LAYOUT,
    WORKSPACE_BYTES,
    FixedRows,
    Kernel,
    KernelMaker,
    MakeKernel,
    PoolTable,
    SharedMemory,
)
from prefixcache.attention.flashinfer_plan import (
    KernelRows,
    align_tables,
    can_pack_heads,
    check_supported,
    grid_pages,
    pad_decodes,
    select_sequences,
)
from prefixcache.exceptions import ConfigError
from prefixcache.ops.cuda import fused_kernels
from prefixcache.ops.rope import apply_rope

Invariance = Literal["off", "split", "unified"]

logger = logging.getLogger(__name__)

_BUILD_PAGE = 16
_HOPPER = 9


class FlashInferAttention:
    """FlashInfer behind the protocol of `attention/base.py`.

    `invariance` says what stays bit-equal whatever else is in the batch:

    - "off": nothing; the fastest kernels.
    - "split": prompt chunks run in the FA3 kernel, whose key tiles start at position 0 and are
      never split, and decodes in the FA2 kernel without split keys. Each is independent of batch
      and chunks, but a decode's keys and values differ in bits from a prefill's, so only blocks
      that a prefill wrote may be shared.
    - "unified": decodes run in the FA3 kernel too, and everything is equal. FA3 computes tiles of
      128 rows of one head: with `packs_heads` the query heads of a key-value head are rows of one.

    Tables of a window leave out the pages behind it, by a number that grows with the step's
    positions: in the invariant modes by whole tiles of FA3 (see `align_tables`).

    In mode "off", `tensor_cores` takes FA2's tensor-core kernel for decodes of all groups of query
    heads, and captured decodes of `whole_keys_from` rows or more do not split keys.

    `batch_invariant` and `decode_matches_prefill` tell what is really kept: without FA3, which is
    for Hopper devices alone, nothing is. `kernels` is the flashinfer module or its stand-in.
    `memory` is that of the model's other groups; None makes some of `workspace_bytes`.
    """

    stack_kernel = None

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Any,
        invariance: Invariance = "off",
        packs_heads: bool = False,
        tensor_cores: bool = False,
        whole_keys_from: int | None = None,
        hopper: bool = True,
        memory: SharedMemory | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        self.name = "flashinfer"
        self.batch_invariant = invariance != "off" and hopper
        self.decode_matches_prefill = invariance == "unified" and hopper
        self._kernels = kernels
        self._device = device
        self._aligns_tables = self.batch_invariant and spec.sliding_window is not None
        self._memory = memory or SharedMemory(device, workspace_bytes)
        self._makes = KernelMaker(
            spec,
            dtype,
            device,
            kernels,
            prefill_backend="fa3" if hopper else "fa2",
            split_keys=invariance == "off",
            whole_keys_from=whole_keys_from,
            tensor_cores=tensor_cores,
            memory=self._memory,
        )
        self._make_decode: MakeKernel | None = self._makes.decode
        if invariance == "unified":
            packs = packs_heads and hopper and can_pack_heads(spec)
            self._make_decode = self._makes.packed_decode if packs else None
        self._fence = Fence(device)
        self._kv: Sequence[Tensor] = ()
        self._bound: _Bound | None = None
        self._graphs: _Graphs | None = None
        self._step: _Step | None = None

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """[P, 2, B, K, D]: FlashInfer's NHD layout, keys and values of a page together."""
        return kv_shape_nhd(num_blocks, block_size, num_kv_heads, head_dim)

    def bind(self, kv_layers: Sequence[Tensor]) -> None:
        """Takes the KV tensors. Raises `ConfigError` when their slots exceed FlashInfer's int32."""
        num_pages, _, page_size = kv_layers[0].shape[:3]
        if num_pages * page_size >= 2**31:
            raise ConfigError(
                f"FlashInfer addresses at most {2**31 - 1} KV cache slots, "
                f"got {num_pages} blocks of {page_size}."
            )
        self._kv = kv_layers
        self._graphs = self._step = None
        self._bound = _Bound(
            prefill=self._makes.prefill(page_size),
            decode=self._make_decode and self._make_decode(page_size),
            page_size=page_size,
            left_out_multiple=grid_pages(page_size) if self._aligns_tables else 1,
            pool_table=self._memory.pool_table(num_pages, page_size),
        )

    def plan(self, batch: AttentionBatch) -> None:
        """Plans the step's kernels, after the copies of the plan before have left their buffers."""
        bound = self._require_bound()
        count = len(batch.last_page_len)
        split = 0 if bound.decode is None else batch.num_decodes
        self._fence.wait()
        batch = align_tables(batch, bound.left_out_multiple)
        indices = batch.kv_indices.to(self._device, non_blocking=True)
        slots = batch.slot_mapping.to(torch.int32)
        parts: list[_Part] = []
        if bound.decode is not None and split:
            rows = select_sequences(batch, 0, split)
            parts.append(_planned(bound.decode, rows, indices, first_row=0))
        if split < count:
            rows = select_sequences(batch, split, count)
            parts.append(_planned(bound.prefill, rows, indices, first_row=split))
        self._fence.mark()
        self._step = _Step(slots, torch.zeros_like(slots), tuple(parts))

    def reserve_graphs(self, sizes: Sequence[int], max_page_indices: int) -> None:
        """Makes tables of fixed addresses for captured decodes of `sizes` rows.

        `max_page_indices` bounds the page indices of a step, before rows are added to it.
        """
        bound = self._require_bound()
        self._makes.check_workspace(sizes)
        most = max_page_indices + max(sizes) * bound.left_out_multiple
        tables = _GraphTables(max(sizes), most, self._device)
        make = self._make_decode or self._makes.prefill
        kernels = {size: make(bound.page_size, tables.rows(size)) for size in sizes}
        self._graphs = _Graphs(tables, kernels)

    def plan_graph(self, batch: AttentionBatch, size: int) -> None:
        """Plans a pure decode with rows added to make `size`; those use the null block alone.

        Until the next plan, `run` takes `size` rows and touches fixed addresses only: it can be
        captured, and replayed after the next `plan_graph` of the same size.
        """
        if self._graphs is None:
            raise RuntimeError("plan_graph needs reserve_graphs before it.")
        tables = self._graphs.tables
        self._fence.wait()
        batch = align_tables(batch, self._require_bound().left_out_multiple)
        rows = pad_decodes(batch, size)
        tables.load(batch, rows)
        part = _planned(self._graphs.kernels[size], rows, tables.indices, first_row=0)
        self._fence.mark()
        self._step = _Step(tables.slots[:size], tables.zeros[:size], (part,))

    def run(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Writes k and v to their slots, then attends; returns [T, H, D]."""
        step, kv = self._require_step(), self._kv[layer]
        pool_table = self._require_bound().pool_table
        self._kernels.append_paged_kv_cache(
            k_TKD, v_TKD, step.zeros, step.slots, kv, *pool_table, LAYOUT
        )
        return self._attend(step, q_THD, kv)

    def rotate_and_run(
        self, layer: int, qk_TND: Tensor, v_TKD: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """`run` of queries and keys [T, H + K, D] that it rotates, in one kernel with the write."""
        step, kv = self._require_step(), self._kv[layer]
        if (fused := fused_kernels(qk_TND)) is None:
            num_queries = qk_TND.shape[1] - v_TKD.shape[1]
            rotated = apply_rope(qk_TND, *rotation)
            return self.run(layer, rotated[:, :num_queries], rotated[:, num_queries:], v_TKD)
        q_THD = fused.rotate_and_append(qk_TND, v_TKD, rotation, step.slots, kv)
        return self._attend(step, q_THD, kv)

    def _attend(self, step: _Step, q_THD: Tensor, kv: Tensor) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for part in step.parts:
            part.kernel.run(q_THD[part.rows], kv, out_THD[part.rows])
        return out_THD

    def _require_step(self) -> _Step:
        if self._step is None:
            raise RuntimeError("run needs a plan before it.")
        return self._step

    def _require_bound(self) -> _Bound:
        if self._bound is None:
            raise RuntimeError("FlashInferAttention needs bind before it plans or runs.")
        return self._bound


@dataclass(frozen=True, slots=True)
class _Part:
    """Query rows of a step and the kernel that is planned for them."""

    rows: slice
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class _Step:
    """A planned step: int32 slots of its tokens, as many zeros, and its kernels."""

    slots: Tensor
    zeros: Tensor
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """What depends on the KV tensors. Without `decode`, the prefill kernel computes all rows.

    Pages are left out of a table in multiples of `left_out_multiple`.
    """

    prefill: Kernel
    decode: Kernel | None
    page_size: int
    left_out_multiple: int
    pool_table: PoolTable


@dataclass(frozen=True, slots=True)
class _Graphs:
    tables: _GraphTables
    kernels: Mapping[int, Kernel]


class _GraphTables:
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

    def load(self, batch: AttentionBatch, rows: KernelRows) -> None:
        """Writes slots and page indices; those of added rows are 0, the null block."""
        count, pages = len(batch.last_page_len), int(batch.kv_indptr[-1])
        self.slots[:count].copy_(batch.slot_mapping, non_blocking=True)
        self.slots[count : rows.num_sequences].zero_()
        self.indices[:pages].copy_(batch.kv_indices[:pages], non_blocking=True)
        self.indices[pages : rows.pages.stop].zero_()


def make_flashinfer(
    specs: Sequence[AttentionSpec],
    *,
    dtype: torch.dtype,
    device: torch.device,
    invariance: Invariance = "off",
    packs_heads: bool = False,
) -> list[FlashInferAttention]:
    """FlashInfer's own kernels on a CUDA device, one backend for each group of a model's layers.

    Raises `ConfigError` that says what to install, or which shape or type has no kernel.
    """
    kernels = load_kernels(device)
    for spec in specs:
        check_supported(spec, dtype)
    major, _ = torch.cuda.get_device_capability(device)
    memory = SharedMemory(device)
    backends = [
        FlashInferAttention(
            spec,
            dtype=dtype,
            device=device,
            kernels=kernels,
            invariance=invariance,
            packs_heads=packs_heads,
            hopper=major == _HOPPER,
            memory=memory,
        )
        for spec in specs
    ]
    for spec, attention in dict(zip(specs, backends, strict=True)).items():
        build_kernels(attention, spec, dtype, device)
    return backends


def build_kernels(
    attention: FlashInferAttention, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
) -> None:
    """Runs each kernel once on a page of its own: what is not prebuilt is compiled here.

    Leaves `attention` bound to that page. Raises `ConfigError` when a kernel cannot be had.
    """
    logger.info(
        "Loading FlashInfer's kernels for head_dim %d; those that are not prebuilt are compiled "
        "once, for minutes.",
        spec.head_dim,
    )
    begun = time.perf_counter()
    shape = attention.kv_shape(1, _BUILD_PAGE, spec.num_kv_heads, spec.head_dim)
    rows = torch.zeros(3, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim).to(device, dtype)
    q, k, v = rows.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    try:
        attention.bind([torch.zeros(shape, dtype=dtype, device=device)])
        attention.plan(_decode_and_chunk(device))
        attention.run(0, q.contiguous(), k.contiguous(), v.contiguous())
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(
            f"FlashInfer cannot build or load its kernels for head_dim {spec.head_dim} and "
            f"{dtype} ({reason}). Install prebuilt ones (flashinfer-jit-cache, from FlashInfer's "
            "own index for your CUDA), or a CUDA toolkit with nvcc, and ninja; or use "
            "--attention torch."
        ) from error
    logger.info("FlashInfer's kernels are there after %.0f s.", time.perf_counter() - begun)


def _decode_and_chunk(device: torch.device) -> AttentionBatch:
    """A decode and a chunk of two tokens, both in the first page."""

    def table(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return AttentionBatch(
        qo_indptr=table(0, 1, 3),
        kv_indptr=table(0, 1, 2),
        kv_indices=table(0, 0),
        last_page_len=table(1, 2),
        slot_mapping=torch.tensor([0, 0, 1], device=device),
        max_q_len=2,
        num_decodes=1,
    )


def load_kernels(device: torch.device) -> Any:
    """The flashinfer module. Raises `ConfigError` when it or the device is missing."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            f"FlashInfer needs a CUDA device, and torch {torch.__version__} finds none for "
            f"{str(device)!r}. Use --device cpu, or install a CUDA build of torch and a driver."
        )
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"FlashInfer is not installed ({error}). Run: pip install 'prefixcache[cuda]'"
        ) from error


def _planned(kernel: Kernel, rows: KernelRows, indices: Tensor, *, first_row: int) -> _Part:
    kernel.plan(rows, indices)
    return _Part(slice(first_row, first_row + rows.num_rows), kernel)
