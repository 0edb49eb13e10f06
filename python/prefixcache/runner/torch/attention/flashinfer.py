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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prefixcache.exceptions import ConfigError, how_to_install
from prefixcache.runner.torch.attention.base import AttentionBatch, AttentionSpec, kv_shape_nhd
from prefixcache.runner.torch.attention.flashinfer_kernels import (
    LAYOUT,
    KernelMaker,
    PoolTable,
    SharedMemory,
    needed_workspace,
)
from prefixcache.runner.torch.attention.flashinfer_plan import can_pack_heads, check_supported
from prefixcache.runner.torch.attention.flashinfer_planner import GraphTables, KernelPart, Planner
from prefixcache.runner.torch.ops.cuda import fused_kernels, is_hopper
from prefixcache.runner.torch.ops.rope import apply_rope
from prefixcache.runner.torch.typed import split

logger = logging.getLogger(__name__)

_BUILD_PAGE = 16


class FlashInferAttention:
    """FlashInfer behind the protocol of `attention/base.py`.

    With `batch_invariant`, chunks and decodes run in the FA3 kernel, whose key tiles start at
    position 0 and are never split: the bits of a row depend on its own sequence alone. FA3 computes
    tiles of 128 rows of one head, so in a decode the query heads of a key-value head are packed as
    rows of one head, unless there is a window. Without it decodes run in the FA2 kernel, whose keys
    are split unless the workspace has no room for the parts of a captured decode.

    Tables of a window leave out the pages behind it, by a number that grows with the step's
    positions: with `batch_invariant` by whole tiles of FA3 (see `align_tables`).

    The attribute `batch_invariant` is what is kept: without FA3, which is for Hopper devices alone,
    it is false. `kernels` is the flashinfer module or its stand-in.
    `memory` is that of the model's other groups; None makes some of `workspace_bytes`. A `leader`
    is the backend of a group with the same spec that is bound and planned before this one each
    time: tables of one spec have the same lengths, so its plan serves both.
    """

    kv_shape = staticmethod(kv_shape_nhd)

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Any,
        batch_invariant: bool = False,
        hopper: bool = True,
        memory: SharedMemory | None = None,
        workspace_bytes: int | None = None,
        leader: FlashInferAttention | None = None,
    ) -> None:
        self.name = "flashinfer"
        self.batch_invariant = batch_invariant and hopper
        self._kernels = kernels
        self._device = device
        self._kv: Sequence[Tensor] = ()
        self._pool_table: PoolTable | None = None
        self._graph_tables: GraphTables | None = None
        self._step: _Step | None = None
        self._leads = leader is None
        if leader is not None:
            self.memory, self.planner = leader.memory, leader.planner
            return
        workspace_bytes = workspace_bytes or needed_workspace([spec], device)
        self.memory = memory or SharedMemory(device, workspace_bytes)
        makes = KernelMaker(
            spec,
            dtype,
            device,
            kernels,
            prefill_backend="fa3" if hopper else "fa2",
            splits_keys=not self.batch_invariant,
            memory=self.memory,
        )
        if self.batch_invariant:
            make_decode = makes.packed_decode if can_pack_heads(spec) else None
        else:
            make_decode = makes.decode
        aligns = self.batch_invariant and spec.sliding_window is not None
        self.planner = Planner(makes, make_decode, aligns_tables=aligns, device=device)

    def bind(self, kv_layers: Sequence[Tensor]) -> None:
        """Takes the KV tensors. Raises `ConfigError` when their slots exceed FlashInfer's int32."""
        num_pages, _, page_size = kv_layers[0].shape[:3]
        if num_pages * page_size >= 2**31:
            raise ConfigError(
                f"FlashInfer addresses at most {2**31 - 1} KV cache slots, "
                f"got {num_pages} blocks of {page_size}."
            )
        self._kv = kv_layers
        self._graph_tables = self._step = None
        self._pool_table = self.memory.pool_table(num_pages, page_size)
        if self._leads:
            self.planner.bind(page_size)

    def plan(self, batch: AttentionBatch) -> None:
        """Plans the step's kernels, after the copies of the plan before have left their buffers."""
        plan = self.planner.plan(batch) if self._leads else self.planner.follow()
        slots = batch.slot_mapping.to(torch.int32)
        indices = plan.listed_of(batch).kv_indices.to(self._device, non_blocking=True)
        self._step = _Step(slots, torch.zeros_like(slots), indices, plan.parts)

    def reserve_graphs(self, sizes: Sequence[int], max_page_indices: int) -> None:
        """Makes tables of fixed addresses for captured decodes of `sizes` rows.

        `max_page_indices` bounds the page indices of a step, before rows are added to it.
        """
        most = max_page_indices + max(sizes) * self.planner.left_out_multiple
        self._graph_tables = GraphTables(max(sizes), most, self._device)
        if self._leads:
            self.planner.reserve_graphs(sizes, self._graph_tables)

    def plan_graph(self, batch: AttentionBatch, size: int) -> None:
        """Plans a pure decode with rows added to make `size`; those use the null block alone.

        Until the next plan, `run` takes `size` rows and touches fixed addresses only: it can be
        captured, and replayed after the next `plan_graph` of the same size.
        """
        tables = self._graph_tables
        if tables is None:
            raise RuntimeError("plan_graph needs reserve_graphs before it.")
        if self._leads:
            plan = self.planner.plan_graph(batch, size, tables.indices)
        else:
            plan = self.planner.follow()
        tables.load(plan.listed_of(batch), size)
        self._step = _Step(tables.slots[:size], tables.zeros[:size], tables.indices, plan.parts)

    def run(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        sinks_H: Tensor | None = None,  # noqa: ARG002  (refused)
    ) -> Tensor:
        """Writes k and v to their slots, then attends; returns [T, H, D]."""
        step, kv = self._require_step(), self._kv[layer]
        assert self._pool_table is not None
        if k_TKD is not None:
            self._kernels.append_paged_kv_cache(
                k_TKD, v_TKD, step.zeros, step.slots, kv, *self._pool_table, LAYOUT
            )
        return self._attend(step, q_THD, kv)

    def rotate_and_run(
        self, layer: int, qk_TND: Tensor, v_TKD: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """`run` of queries and keys [T, H + K, D] that it rotates, in one kernel with the write."""
        step, kv = self._require_step(), self._kv[layer]
        is_whole = 2 * rotation[0].shape[-1] == qk_TND.shape[-1]
        if not is_whole or (fused := fused_kernels(qk_TND)) is None:
            num_queries = qk_TND.shape[1] - v_TKD.shape[1]
            rotated = apply_rope(qk_TND, *rotation)
            return self.run(layer, rotated[:, :num_queries], rotated[:, num_queries:], v_TKD)
        q_THD = fused.rotate_and_append(qk_TND, v_TKD, rotation, step.slots, kv)
        return self._attend(step, q_THD, kv)

    def _attend(self, step: _Step, q_THD: Tensor, kv: Tensor) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for part in step.parts:
            part.kernel.run(q_THD[part.rows], kv, step.indices[part.pages], out_THD[part.rows])
        return out_THD

    def _require_step(self) -> _Step:
        if self._step is None:
            raise RuntimeError("run needs a plan before it.")
        return self._step


@dataclass(frozen=True, slots=True)
class _Step:
    """A planned step of a group: int32 slots of its tokens, as many zeros, its page indices."""

    slots: Tensor
    zeros: Tensor
    indices: Tensor
    parts: tuple[KernelPart, ...]


def make_flashinfer(
    specs: Sequence[AttentionSpec],
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
) -> list[FlashInferAttention]:
    """FlashInfer's own kernels on a CUDA device, one backend for each group of a model's layers.

    Raises `ConfigError` that says what to install, or which shape or type has no kernel.
    """
    kernels = load_kernels(device)
    for spec in specs:
        check_supported(spec, dtype)
    make = partial(
        FlashInferAttention,
        dtype=dtype,
        device=device,
        kernels=kernels,
        batch_invariant=batch_invariant,
        hopper=is_hopper(device),
        memory=SharedMemory(device, needed_workspace(specs, device)),
    )
    leaders: dict[AttentionSpec, FlashInferAttention] = {}
    backends: list[FlashInferAttention] = []
    for spec in specs:
        backends.append(make(spec, leader=leaders.get(spec)))
        leaders.setdefault(spec, backends[-1])
    for spec, leader in leaders.items():
        build_kernels(leader, spec, dtype, device)
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
    q, k, v = split(rows, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
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
            f"FlashInfer is not installed ({error}): {how_to_install('cuda')}."
        ) from error
