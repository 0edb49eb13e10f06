"""FlashInfer's own Python over native modules that torch stands in for: needs its package, no GPU.

The modules take what the compiled ones of 0.6.14 do, by position, and check it. The FA2 planner is
that of scheduler.cuh as far as it fills tables: the tail of a graph's tables keeps what the pinned
memory held, and a launched block reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashinfer
import flashinfer.decode
import flashinfer.page
import flashinfer.prefill
import pytest
import torch
from torch import Tensor

from reference.flashinfer_reference import (
    append_paged_kv_cache,
    attend_at_once,
    attend_in_tiles,
)

_MAX_TILES = 2 * 132
_CAUSAL = 1  # of FlashInfer's MaskMode


class Module:
    """The compiled prefill ("fa2", "fa3") or decode ("plain") module."""

    ragged_run = None

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def plan(self, *args: Any) -> list[int]:
        if self._kind != "fa2":
            return [0] * (9 if self._kind == "fa3" else 10)
        return _plan_fa2(*args)

    def paged_run(
        self,
        _float: Tensor,
        tables: Tensor,
        plan_info: list[int],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        _lse: None,
        mask: int,
        _layout: int,
        window_left: int,
        _pdl: bool,
        *rest: Any,
    ) -> None:
        soft_cap, scale = (rest[8], rest[9]) if self._kind == "fa2" else (rest[4], rest[5])
        options = {"scale": scale, "soft_cap": soft_cap, "causal": mask == _CAUSAL}
        options["window_left"] = window_left
        chosen = list(range(len(last_page_len)))
        if self._kind == "fa2":
            launched, splits = plan_info[0], plan_info[14]
            chosen = tables.view(torch.int32)[:launched].tolist()
            if splits:
                chosen = [s for s in chosen if 0 <= s < len(last_page_len)]  # by the mask
        for s in chosen:
            rows = slice(int(qo_indptr[s]), int(qo_indptr[s + 1]))
            pages = indices[kv_indptr[s] : kv_indptr[s + 1]].long()
            attend = attend_in_tiles if self._kind == "fa3" else attend_at_once
            out[rows] = _rows(attend, q[rows], keys, values, pages, last_page_len[s], options)

    def run(
        self,
        _float: Tensor,
        _tables: Tensor,
        _plan_info: list[int],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        kv_indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        _lse: None,
        _layout: int,
        window_left: int,
        _pdl: bool,
        _alibi: Any,
        soft_cap: float,
        scale: float,
        *_rope: float,
    ) -> None:
        options = {"scale": scale, "soft_cap": soft_cap, "causal": True}
        options["window_left"] = window_left
        for s in range(len(last_page_len)):
            pages = indices[kv_indptr[s] : kv_indptr[s + 1]].long()
            row = slice(s, s + 1)
            last = last_page_len[s]
            out[row] = _rows(attend_at_once, q[row], keys, values, pages, last, options)


def _plan_fa2(
    _float: Tensor,
    tables: Tensor,
    pinned: Tensor,
    qo_indptr: Tensor,
    _kv_indptr: Tensor,
    _kv_lens: Tensor,
    total_rows: int,
    batch_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    _page_size: int,
    captured: bool,
    *rest: Any,
) -> list[int]:
    disable_split = rest[5]
    group = num_qo_heads // num_kv_heads
    packed = [int(n) * group for n in qo_indptr.diff()]
    longest = (total_rows - batch_size + 1) * group if captured else sum(packed) // batch_size
    rows = 16 if longest <= 16 else 64 if longest <= 64 else 128
    owners = [s for s, n in enumerate(packed) for _ in range(-(-n // rows))]
    launched = len(owners)
    if captured:
        most = -(-total_rows * group // rows) + batch_size - 1
        launched = max(_MAX_TILES // num_kv_heads, most)
    pinned.view(torch.int32)[: len(owners)] = torch.tensor(owners, dtype=torch.int32)
    tables[: 4 * launched].copy_(pinned[: 4 * launched])
    return [launched, total_rows, 0, rows, *[0] * 9, int(captured), int(not disable_split)]


def _rows(
    attend: Callable[..., Tensor],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    last: Tensor,
    options: dict[str, Any],
) -> Tensor:
    length = (len(pages) - 1) * keys.shape[1] + int(last)
    return attend(
        q, keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length], options
    )


class _Built:
    def __init__(self, module: Any) -> None:
        self._module = module

    def build_and_load(self) -> Any:
        return self._module


class _Page:
    def append_paged_kv_cache(
        self,
        k: Tensor,
        v: Tensor,
        batch_indices: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        indices: Tensor,
        indptr: Tensor,
        last_page_len: Tensor,
        _layout: int,
    ) -> None:
        for table in (batch_indices, positions, indices, indptr, last_page_len):
            assert table.dtype == torch.int32
            assert table.is_contiguous()
        assert k.stride(-1) == v.stride(-1) == 1
        assert keys.stride() == values.stride()
        pool = torch.stack([keys, values], dim=1)
        tables = (indices, indptr, last_page_len)
        append_paged_kv_cache(k, v, batch_indices, positions, pool, *tables)
        keys.copy_(pool[:, 0])
        values.copy_(pool[:, 1])


def replace_native_modules(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any] | None = None
) -> Any:
    """The flashinfer package, able to run on a CPU: pinned memory is poisoned plain memory.

    `make` gives another module than `Module`, of its kind and of what FlashInfer compiles it for.
    """
    make = make or (lambda kind, *_: Module(kind))
    empty = torch.empty

    def unpinned(*args: Any, **kwargs: Any) -> Tensor:
        pinned = kwargs.pop("pin_memory", False)
        tensor = empty(*args, **kwargs)
        return tensor.fill_(0x7F) if pinned else tensor

    monkeypatch.setattr(torch, "empty", unpinned)
    prefill, decode, page = flashinfer.prefill, flashinfer.decode, flashinfer.page
    for module in (prefill, decode):
        monkeypatch.setattr(module, "device_support_pdl", lambda _device: True)
    monkeypatch.setattr(prefill, "gen_batch_prefill_module", lambda *asked: _Built(make(*asked)))
    monkeypatch.setattr(
        decode, "gen_batch_decode_module", lambda *asked: _Built(make("plain", *asked))
    )
    monkeypatch.setattr(page, "gen_page_module", lambda: _Built(_Page()))
    for cached in (
        prefill.get_batch_prefill_module,
        decode.get_batch_decode_module,
        page.get_page_module,
    ):
        cached.cache_clear()
    return flashinfer
