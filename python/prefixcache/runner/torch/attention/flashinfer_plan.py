"""What FlashInfer's kernels are planned with: device-free, so that a CPU can check all of it.

Letters of shapes: S sequences, N page indices. Pages of a step are CSR, as in `AttentionBatch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixcache.exceptions import ConfigError, how_to_install
from prefixcache.runner.torch.attention.base import AttentionBatch, AttentionSpec
from prefixcache.runner.torch.typed import from_numpy

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)

# What FlashInfer's FA2 planner returns (PrefillPlanInfo::ToVector of its scheduler.cuh): how many
# entries, and which of them are the tiles to launch and the packed rows of a tile.
_FA2_PLAN_ENTRIES = 15
_LAUNCHED_TILES = 0
_ROWS_OF_TILE = 3
_TILE_SIZES = (16, 64, 128)
# A multiple of the keys in one tile of FA3: 96 and 32 in 0.6.14 (prefill_sm90.cuh), 64, 128 and 192
# in FA3's other kernels.
_TILE_GRID = 384

# The plain decode kernel computes each query head apart: from 4 heads a key-value head on it would
# wait for its arithmetic, and not for memory. It is compiled for few groups of heads at all.
_PLAIN_DECODE_GROUPS = frozenset({1, 2, 3})


class KeyCounts(Tensor):
    """Keys of each sequence, whose largest FlashInfer finds with Python's `max`.

    Iterating over a tensor makes a tensor of every entry, 0.5 ms for 256 of them; this one gives
    the largest alone.
    """

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.amax(),))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRows:
    """The sequences that one kernel computes: int32 arrays on the CPU that start at zero.

    `pages` is the part of the step's page indices that `kv_indptr` counts in.
    """

    qo_indptr: Tensor  # [S + 1]
    kv_indptr: Tensor  # [S + 1]
    last_page_len: Tensor  # [S]
    pages: slice

    def kv_lens(self, page_size: int) -> Tensor:
        """Keys of each sequence, int32 [S]."""
        return (self.kv_indptr.diff() - 1) * page_size + self.last_page_len

    def pinned(self) -> KernelRows:
        """The same in pinned memory: a copy from other memory waits for the device's work."""
        return replace(
            self,
            qo_indptr=self.qo_indptr.pin_memory(),
            kv_indptr=self.kv_indptr.pin_memory(),
            last_page_len=self.last_page_len.pin_memory(),
        )

    @property
    def num_rows(self) -> int:
        """Query rows of all sequences."""
        return int(self.qo_indptr[-1])


def select_sequences(batch: AttentionBatch, first: int, stop: int) -> KernelRows:
    """Sequences `first:stop` of a step, counted from zero."""
    start_page, stop_page = int(batch.kv_indptr[first]), int(batch.kv_indptr[stop])
    return KernelRows(
        qo_indptr=batch.qo_indptr[first : stop + 1] - batch.qo_indptr[first],
        kv_indptr=batch.kv_indptr[first : stop + 1] - start_page,
        last_page_len=batch.last_page_len[first:stop],
        pages=slice(start_page, stop_page),
    )


def pad_decodes(batch: AttentionBatch, size: int) -> KernelRows:
    """The step's decodes and as many rows more as make `size`.

    Each added row is a sequence of one token in one page; its page index comes after those of
    the step. Raises `ValueError` when the step is no pure decode of at most `size` sequences.
    """
    count = len(batch.last_page_len)
    if batch.num_decodes != count or not 0 < count <= size:
        raise ValueError(
            f"A graph of {size} rows cannot run {batch.num_decodes} decodes of {count} sequences."
        )
    added = torch.arange(1, size - count + 1, dtype=torch.int32)
    kv_indptr = torch.cat([batch.kv_indptr, batch.kv_indptr[-1] + added])
    return KernelRows(
        qo_indptr=torch.arange(size + 1, dtype=torch.int32),
        kv_indptr=kv_indptr,
        last_page_len=torch.cat([batch.last_page_len, torch.ones_like(added)]),
        pages=slice(0, int(kv_indptr[-1])),
    )


def grid_pages(page_size: int) -> int:
    """The fewest pages after which a key tile of FA3 begins where a page does."""
    return math.lcm(_TILE_GRID, page_size) // page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPages:
    """Which of a step's pages the kernels get, in CSR; `chosen` None stands for all."""

    kv_indptr: Tensor  # int32 [S + 1], on the CPU
    first_pages: Tensor | None  # int32 [S], on the CPU
    chosen: Tensor | None  # int32, where the page indices are

    def of(self, batch: AttentionBatch) -> AttentionBatch:
        """The step of a group whose tables have the lengths that these were made of."""
        if self.chosen is None:
            return batch
        return replace(
            batch,
            kv_indptr=self.kv_indptr,
            kv_indices=batch.kv_indices.index_select(0, self.chosen),
            first_pages=self.first_pages,
        )


def align_tables(batch: AttentionBatch, multiple: int) -> ListedPages:
    """The step's pages where those left out of each table are a multiple of `multiple`.

    FA3's key tiles begin at the first key listed, and a row's bits depend on where they begin. A
    page that was left out and is listed again is the sequence's first one: behind the window the
    kernel multiplies values by zero, and only those of other requests could be no numbers.
    """
    if batch.first_pages is None or multiple == 1:
        return ListedPages(kv_indptr=batch.kv_indptr, first_pages=batch.first_pages, chosen=None)
    first_pages, indptr = batch.first_pages.numpy(), batch.kv_indptr.numpy()
    added = first_pages % multiple
    aligned_indptr = indptr.copy()
    aligned_indptr[1:] += np.cumsum(added, dtype=np.int32)
    counts = np.diff(aligned_indptr)
    starts = indptr[:-1]
    shifts = aligned_indptr[:-1] + added - starts
    places = np.arange(aligned_indptr[-1], dtype=np.int32) - np.repeat(shifts, counts)
    chosen = from_numpy(np.maximum(places, np.repeat(starts, counts)))
    if batch.kv_indices.device.type == "cuda":
        chosen = chosen.pin_memory().to(batch.kv_indices.device, non_blocking=True)
    return ListedPages(
        kv_indptr=from_numpy(aligned_indptr),
        first_pages=from_numpy(first_pages - added),
        chosen=chosen,
    )


def have_equal_lengths(first: AttentionBatch, other: AttentionBatch) -> bool:
    """Whether two groups' batches of a step are the same but for slots and page indices."""
    return all(
        mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
        for mine, theirs in (
            (first.qo_indptr, other.qo_indptr),
            (first.kv_indptr, other.kv_indptr),
            (first.last_page_len, other.last_page_len),
            (first.first_pages, other.first_pages),
        )
    )


def planned_tiles_alone(plan_info: Sequence[int], num_rows: int, group_size: int) -> list[int]:
    """A captured FA2 plan of decodes without split keys that launches no more than its tiles.

    FlashInfer 0.6.14 launches up to two blocks a multiprocessor then, and leaves the tables of the
    added ones as the pinned memory was found: they read any sequence at all (its issue 4002).
    `group_size` is the number of query heads a key-value head; their rows are packed into tiles.

    Raises `ConfigError` when the plan is not of the form that is known here.
    """
    if len(plan_info) != _FA2_PLAN_ENTRIES:
        raise ConfigError(
            f"This release of FlashInfer plans FA2 by {len(plan_info)} numbers, and by "
            f"{_FA2_PLAN_ENTRIES} in 0.6.14: {how_to_install('cuda')}."
        )
    tiles = num_rows * -(-group_size // plan_info[_ROWS_OF_TILE])
    return [tiles, *plan_info[_LAUNCHED_TILES + 1 :]]


def parts_bytes(spec: AttentionSpec, num_rows: int, num_multiprocessors: int) -> int:
    """What a captured FA2 decode of `num_rows` rows with split keys takes of the workspace."""
    group = spec.num_heads // spec.num_kv_heads
    tile = next((size for size in _TILE_SIZES if group <= size), _TILE_SIZES[-1])
    tiles = max(
        2 * num_multiprocessors // spec.num_kv_heads, -(-num_rows * group // tile) + num_rows - 1
    )
    return spec.num_heads * tiles * tile * (spec.head_dim + 1) * 4


def needs_tensor_cores(spec: AttentionSpec) -> bool:
    """Whether decode takes the tensor-core kernel: the plain one is slower, or there is none."""
    return spec.num_heads // spec.num_kv_heads not in _PLAIN_DECODE_GROUPS


def can_pack_heads(spec: AttentionSpec) -> bool:
    """Whether a decode's query heads can be rows of one head: not in a window, which rows move."""
    return spec.num_heads > spec.num_kv_heads and spec.sliding_window is None


def plan_options(spec: AttentionSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments that the plans of all kernels share.

    FlashInfer's `window_left` counts the keys before the query's own; our window counts that one
    too. Types are always named: they default to float16.
    """
    return {
        "sm_scale": spec.scale,
        "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
        "logits_soft_cap": spec.softcap,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }


def check_supported(spec: AttentionSpec, dtype: torch.dtype) -> None:
    """Raises `ConfigError` when FlashInfer has no kernel for this shape or type."""
    if spec.head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"FlashInfer has no kernel for head_dim {spec.head_dim}; "
            f"it has {', '.join(map(str, HEAD_DIMS))}. Use another attention backend."
        )
    if spec.has_sinks:
        raise ConfigError(
            "attention sinks are not computed with FlashInfer here. Use --attention torch."
        )
    if dtype not in DTYPES:
        raise ConfigError(
            f"FlashInfer has no kernel for {dtype}. Use --dtype bfloat16 or another attention "
            "backend."
        )
