"""FlashInfer's paged kernels in plain torch: what they compute, and how they must be called.

The same names, arguments and checks as the parts of the flashinfer module that
`attention/flashinfer.py` uses, from FlashInfer's documentation, so that tests, and dry runs of the
GPU bench, run everything but the CUDA kernels on a CPU. Slow: one sequence after another. The bits
of "fa3" depend on where its key tiles begin, as the kernel's do. Letters of shapes: S sequences, T
query rows, H query heads, K key-value heads, D head size, N key tiles, P pages, B tokens a page, L
keys of a sequence or tile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Of an H200: FA2 launches two blocks on each.
_NUM_MULTIPROCESSORS = 132
# Keys of a tile in FA3's paged kernels (prefill_sm90.cuh, BatchPrefillWithPagedKVCacheDispatched).
_FA3_KEYS = 96
_FA3_KEYS_OF_HEADS_OF_256 = 32
# Tiles that the decode kernel without tensor cores plans at most: 16 blocks a multiprocessor.
_PLAIN_TILES = 16 * _NUM_MULTIPROCESSORS
# A number for each plan, by which a run knows that its own stands in the int workspace.
_PLAN_NUMBERS = itertools.count(1)
# What memory that nobody wrote may hold.
_GARBAGE = 2**30


class _Wrapper:
    """What both wrappers share: the tables `run` reads, in fixed tensors for a graph.

    FA2 launches blocks by tiles of query rows. `_plan_info` and the sequence of each tile are as
    its planner leaves them; without a mask (which comes with split keys alone) a block that was
    added to a graph's grid reads an entry that the planner did not write.
    """

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        _check(kv_layout == "NHD", f"kv_layout {kv_layout}")
        _check(workspace.dtype == torch.uint8, "the workspace must be bytes")
        self.backend = backend
        self._device = workspace.device
        self._fixed: dict[str, Tensor] | None = None
        self._tables: dict[str, Tensor] = {}
        self._options: dict[str, Any] = {}
        self._plan_info: Sequence[int] = ()
        self._tile_sequences: Sequence[int] = ()
        self._int_workspace = torch.zeros(8 << 20, dtype=torch.uint8)
        self._plan_number = 0

    def reset_workspace_buffer(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        """Takes shared workspaces, of which this module uses the second alone."""
        _check(float_workspace.dtype == int_workspace.dtype == torch.uint8, "workspaces are bytes")
        self._int_workspace = int_workspace

    @property
    def _paged_kv_indices_buf(self) -> Tensor:
        return self._tables["indices"]

    @_paged_kv_indices_buf.setter
    def _paged_kv_indices_buf(self, indices: Tensor) -> None:
        self._tables = self._tables | {"indices": indices}

    def _leave_plan(self, num_entries: int) -> None:
        """Fills the int workspace, from its beginning, as each plan does."""
        needed = 4 * num_entries
        _check(needed <= len(self._int_workspace), f"a plan of {needed} bytes")
        self._plan_number = next(_PLAN_NUMBERS)
        self._int_workspace[:8].view(torch.int64).fill_(self._plan_number)

    def _store(self, **tables: Tensor) -> None:
        """Copies the tables of a plan to the device, and into the fixed ones of a graph."""
        for name, table in tables.items():
            _check(table.dtype == torch.int32, f"{name} must be int32")
            if name != "indices":
                _check(table.device.type == "cpu", f"{name} off the CPU makes the plan wait")
        if self._fixed is None:
            self._tables = {name: table.to(self._device) for name, table in tables.items()}
            return
        for name, table in tables.items():
            fixed = self._fixed[name]
            fits = len(table) <= len(fixed) if name == "indices" else len(table) == len(fixed)
            _check(fits, f"{name} has {len(table)} entries in a graph's table of {len(fixed)}")
            fixed[: len(table)].copy_(table)
        self._tables = self._fixed

    def _plan_fa2(self, qo_indptr: Tensor, group: int, *, splits_keys: bool, kv_heads: int) -> None:
        """`PrefillPlan` of FlashInfer's scheduler.cuh, as far as it decides what is launched."""
        lengths = (qo_indptr.diff() * group).tolist()
        longest = sum(lengths) // len(lengths)
        if self._fixed is not None:
            longest = (int(qo_indptr[-1]) - len(lengths) + 1) * group
        rows = next((size for size in (16, 64) if longest <= size), 128)
        owners = [s for s, length in enumerate(lengths) for _ in range(-(-length // rows))]
        launched = len(owners)
        if self._fixed is not None:
            most = -(-int(qo_indptr[-1]) * group // rows) + len(lengths) - 1
            launched = max(2 * _NUM_MULTIPROCESSORS // kv_heads, most)
        self._leave_plan(4 * launched + len(lengths) + int(qo_indptr[-1]) + 32)
        self._plan_info = [launched, 0, 0, rows, *[0] * 10, int(splits_keys)]
        self._tile_sequences = [*owners, *[_GARBAGE] * (launched - len(owners))]

    def _plan_fa3(self, qo_indptr: Tensor, heads: int, head_dim: int) -> None:
        """The room that `PrefillSM90Plan` takes: seven numbers a tile of each head."""
        tile = 192 if head_dim == 64 else 128
        tiles = int((-(-qo_indptr.diff() // tile)).sum())
        if self._fixed is not None:
            tiles = -(-int(qo_indptr[-1]) // tile) + len(qo_indptr) - 2
        self._leave_plan(7 * tiles * heads + _NUM_MULTIPROCESSORS + 33)

    def _launched_sequences(self, count: int) -> Sequence[int]:
        """Those whose rows are computed: all, but for FA2 those of the launched tiles."""
        if not self._plan_info:
            return range(count)
        launched = self._tile_sequences[: self._plan_info[0]]
        if self._plan_info[-1]:
            launched = [s for s in launched if s != _GARBAGE]  # by the mask
        _check(max(launched) < count, f"a block reads the tables of sequence {max(launched)}")
        return sorted(set(launched))

    def _attend(self, q_THD: Tensor, kv: Tensor, out: Tensor, qo_indptr: Tensor) -> Tensor:
        """Every sequence by itself; tables are read here, as a kernel does."""
        plan = int(self._int_workspace[:8].view(torch.int64))
        _check(plan == self._plan_number, "another plan stands in the int workspace")
        _check(q_THD.dtype == self._options["q_data_type"], "q_data_type")
        _check(kv.dtype == self._options["kv_data_type"], "kv_data_type")
        _check(kv.ndim == 5 and kv.shape[1] == 2, f"KV of shape {tuple(kv.shape)}")
        _check(kv.shape[2] == self._options["page_size"], "page_size")
        _check(out.is_contiguous() and out.shape == q_THD.shape, "out")
        rows, pages = qo_indptr.tolist(), self._tables["kv_indptr"].tolist()
        _check(rows[-1] == len(q_THD), f"{len(q_THD)} query rows, {rows[-1]} planned")
        last_page_len = self._tables["last_page_len"].tolist()
        out.fill_(math.nan)
        for s in self._launched_sequences(len(last_page_len)):
            last = last_page_len[s]
            _check(0 < last <= kv.shape[2], f"last_page_len {last}")
            table = self._tables["indices"][pages[s] : pages[s + 1]]
            keys_LKD, values_LKD = _gather(kv, table, last)
            query = slice(rows[s], rows[s + 1])
            attend = attend_in_tiles if self.backend == "fa3" else attend_at_once
            out[query] = attend(q_THD[query], keys_LKD, values_LKD, self._options)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Chunks of any length; with `causal` the mask is aligned at the last query and key."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        if use_cuda_graph:
            self._fixed = _require(
                qo_indptr=qo_indptr_buf,
                kv_indptr=paged_kv_indptr_buf,
                indices=paged_kv_indices_buf,
                last_page_len=paged_kv_last_page_len_buf,
            )

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        fixed_split_size: int | None = None,  # the order of additions is not modelled
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        """Takes one step's tables, on the CPU but for the page indices."""
        _check_lens(seq_lens, paged_kv_indptr, paged_kv_last_page_len, page_size)
        longest = int(qo_indptr.diff().max())
        _check(max_token_per_sequence in (None, longest), f"max_token_per_sequence of {longest}")
        _check(num_qo_heads % num_kv_heads == 0, "num_qo_heads must divide by num_kv_heads")
        self._options = {
            "scale": 1 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale,
            "window_left": window_left,
            "soft_cap": logits_soft_cap or 0.0,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "page_size": page_size,
            "causal": causal,
        }
        if self.backend == "fa2":
            group = num_qo_heads // num_kv_heads
            self._plan_fa2(
                qo_indptr, group, splits_keys=not disable_split_kv, kv_heads=num_kv_heads
            )
        else:
            self._plan_fa3(qo_indptr, num_qo_heads, head_dim_qk)
        self._store(
            qo_indptr=qo_indptr,
            kv_indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
        )

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Attention of [T, H, D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        return self._attend(q, paged_kv_cache, out, self._tables["qo_indptr"])


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query row a sequence, which sees all its keys or those of its window."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._fixed = _require(
                kv_indptr=paged_kv_indptr_buffer,
                indices=paged_kv_indices_buffer,
                last_page_len=paged_kv_last_page_len_buffer,
            )

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
    ) -> None:
        """Takes one step's tables, on the CPU but for the page indices."""
        _check_lens(seq_lens, indptr, last_page_len, page_size)
        group, rest = divmod(num_qo_heads, num_kv_heads)
        _check(rest == 0, "num_qo_heads must divide by num_kv_heads")
        _check(self._use_tensor_cores or group in (1, 2, 3, 4, 8), f"no plain kernel for {group}")
        _check(self._use_tensor_cores or fixed_split_size is None, "fixed_split_size")
        self._options = {
            "scale": 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale,
            "window_left": window_left,
            "soft_cap": logits_soft_cap or 0.0,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "page_size": page_size,
            "causal": True,
        }
        if self._use_tensor_cores:
            one_each = torch.arange(len(last_page_len) + 1)
            self._plan_fa2(one_each, group, splits_keys=not disable_split_kv, kv_heads=num_kv_heads)
        else:
            self._leave_plan(4 * max(_PLAIN_TILES, len(last_page_len)))
        self._store(kv_indptr=indptr, indices=indices, last_page_len=last_page_len)

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Attention of [S, H, D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        one_each = torch.arange(len(self._tables["last_page_len"]) + 1)
        return self._attend(q, paged_kv_cache, out, one_each)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes each token's key and value where its sequence's table puts its position."""
    _check(kv_layout == "NHD", f"kv_layout {kv_layout}")
    for table in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        _check(table.dtype == torch.int32, "tables must be int32")
    _check(len(kv_indptr) == len(kv_last_page_len) + 1, "kv_indptr")
    _check(len(batch_indices) == len(positions) == len(append_key), "one position a token")
    page_size = paged_kv_cache.shape[2]
    places = kv_indptr[batch_indices.long()].long() * page_size + positions
    pages = kv_indices[places // page_size].long()
    paged_kv_cache[pages, 0, places % page_size] = append_key
    paged_kv_cache[pages, 1, places % page_size] = append_value


def _check_lens(
    seq_lens: Tensor | None, indptr: Tensor, last_page_len: Tensor, page_size: int
) -> None:
    if seq_lens is not None:
        lens = (indptr.diff() - 1) * page_size + last_page_len
        _check(seq_lens.dtype == torch.int32 and torch.equal(seq_lens, lens), "seq_lens")


def _gather(kv: Tensor, table: Tensor, last_page_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values [L, K, D] of the pages, in order."""
    pages = kv[table.long()]
    length = (len(pages) - 1) * kv.shape[2] + last_page_len
    keys, values = pages[:, 0].flatten(0, 1), pages[:, 1].flatten(0, 1)
    return keys[:length], values[:length]


def attend_at_once(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, options: dict[str, Any]) -> Tensor:
    """Softmax attention in float32; the last query stands at the last key."""
    group = q_THD.shape[1] // k_LKD.shape[1]
    keys = k_LKD.float().repeat_interleave(group, dim=1)
    values = v_LKD.float().repeat_interleave(group, dim=1)
    scores_HTL = _scores(torch.einsum("thd,lhd->htl", q_THD.float(), keys), options)
    visible_TL = _visible(len(q_THD), len(k_LKD), options, q_THD.device)
    scores_HTL = scores_HTL.masked_fill(~visible_TL, -math.inf)
    out_THD = torch.einsum("htl,lhd->thd", torch.softmax(scores_HTL, dim=-1), values)
    return out_THD.to(q_THD.dtype)


def attend_in_tiles(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, options: dict[str, Any]) -> Tensor:
    """The same in FA3's order: tiles of keys that begin at the first key listed, the last first.

    A row is computed by itself, in operations of one shape, so that its bits depend on nothing
    else. Tiles of which it sees no key add exact zeros in the kernel, and are passed over here.
    """
    num_keys, _, head_dim = k_LKD.shape
    tile = _FA3_KEYS_OF_HEADS_OF_256 if head_dim == 256 else _FA3_KEYS
    group = q_THD.shape[1] // k_LKD.shape[1]
    missing = (0, 0, 0, 0, 0, -num_keys % tile)
    keys_NHLD, values_NHLD = (
        torch.nn.functional.pad(given.float().repeat_interleave(group, dim=1), missing)
        .unflatten(0, (-1, tile))
        .transpose(1, 2)
        .contiguous()
        for given in (k_LKD, v_LKD)
    )
    visible_TL = _visible(len(q_THD), num_keys, options, q_THD.device)
    visible_TNL = torch.nn.functional.pad(visible_TL, missing[-2:]).unflatten(1, (-1, tile))
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    for row_HD, visible_NL, out_HD in zip(q_THD.float(), visible_TNL, out_THD, strict=True):
        seen = [n for n in reversed(range(len(visible_NL))) if visible_NL[n].any()]
        out_HD.copy_(
            _attend_row(row_HD, keys_NHLD[seen], values_NHLD[seen], visible_NL[seen], options)
        )
    return out_THD


def _attend_row(
    q_HD: Tensor,
    keys_NHLD: Tensor,
    values_NHLD: Tensor,
    visible_NL: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Softmax over tiles, one after the other: what was summed is scaled to each new maximum."""
    out_HD = torch.zeros_like(q_HD)
    top_H1 = torch.full_like(q_HD[:, :1], -math.inf)
    sum_H1 = torch.zeros_like(top_H1)
    for keys_HLD, values_HLD, visible_L in zip(keys_NHLD, values_NHLD, visible_NL, strict=True):
        scores_HL = _scores((keys_HLD * q_HD.unsqueeze(1)).sum(-1), options)
        scores_HL = scores_HL.masked_fill(~visible_L, -math.inf)
        new_top_H1 = torch.maximum(top_H1, scores_HL.amax(-1, keepdim=True))
        weights_HL, kept_H1 = torch.exp(scores_HL - new_top_H1), torch.exp(top_H1 - new_top_H1)
        sum_H1 = sum_H1 * kept_H1 + weights_HL.sum(-1, keepdim=True)
        out_HD = out_HD * kept_H1 + (values_HLD * weights_HL.unsqueeze(-1)).sum(1)
        top_H1 = new_top_H1
    return out_HD / sum_H1


def _scores(products: Tensor, options: dict[str, Any]) -> Tensor:
    """Scaled, and capped where there is a cap."""
    scaled, cap = products * options["scale"], options["soft_cap"]
    return cap * torch.tanh(scaled / cap) if cap > 0 else scaled


def _visible(
    num_queries: int, num_keys: int, options: dict[str, Any], device: torch.device
) -> Tensor:
    """[T, L]: `window_left` w shows a query at position i the keys from i - w on."""
    at_T1 = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key_L = torch.arange(num_keys, device=device)
    visible = key_L <= at_T1 if options["causal"] else (key_L >= 0) | (at_T1 >= 0)
    if options["window_left"] >= 0:
        visible = visible & (key_L >= at_T1 - options["window_left"])
    return visible


def _require(**tables: Tensor | None) -> dict[str, Tensor]:
    """The fixed tables of a graph, all of them."""
    found = {name: table for name, table in tables.items() if table is not None}
    _check(len(found) == len(tables), "a graph needs all of its tables")
    return found


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"FlashInfer would refuse this call: {what}.")
