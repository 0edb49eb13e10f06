"""What an attention backend is, and the plain data that it gets for a step.

Letters of shapes: T tokens in the step, S sequences, H query heads, K key-value heads, D head
size, P pages (blocks), B tokens a block. Arrays of a batch are CSR, in FlashInfer's terms: rows
`qo_indptr[s]:qo_indptr[s + 1]` of the queries belong to sequence s, and so do pages
`kv_indices[kv_indptr[s]:kv_indptr[s + 1]]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from prefixcache.exceptions import ConfigError
from prefixcache.kv.specs import KVGroup, StatePart
from prefixcache.runner.torch.typed import integers


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The constants of a model's attention.

    `scale` multiplies the dot products. `sliding_window` W lets a query at position i see keys at
    positions above i - W. `softcap` c replaces each scaled score x by c * tanh(x / c). With
    `has_sinks` each layer gives `run` a score more for each head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Where the step's tokens stand in the paged KV cache.

    Index arrays live on the CPU, `kv_indices` there or on the device of the KV tensors.

    The queries of a sequence are its last tokens: with N pages it has
    `(first_pages + N - 1) * B + last_page_len` keys, and its query rows are the last of those
    positions. `first_pages` counts the pages that are left out before the first one listed, which
    are behind the window of every query; None says that there are none.
    `slot_mapping[t]` is block * B + offset of token t, on the device of the KV tensors.
    The first `num_decodes` sequences have one query row each and extend an answer; a backend may
    give them a kernel of their own.
    """

    qo_indptr: Tensor  # int32 [S + 1]
    kv_indptr: Tensor  # int32 [S + 1]
    kv_indices: Tensor  # int32 [N], N >= kv_indptr[-1]
    last_page_len: Tensor  # int32 [S], 1..B
    slot_mapping: Tensor  # int64 [T]
    num_decodes: int = 0
    first_pages: Tensor | None = None  # int32 [S]

    def sequences(self, block_size: int) -> list[BatchSequence]:
        """Each sequence of the step, for kernels that compute one after the other."""
        pages = self.kv_indices.to(self.slot_mapping.device, torch.int64)
        qo_indptr, kv_indptr = integers(self.qo_indptr), integers(self.kv_indptr)
        first_pages = (
            [0] * len(qo_indptr) if self.first_pages is None else integers(self.first_pages)
        )
        sequences: list[BatchSequence] = []
        for s, last_page_len in enumerate(integers(self.last_page_len)):
            rows, listed = slice(*qo_indptr[s : s + 2]), pages[slice(*kv_indptr[s : s + 2])]
            stop = (first_pages[s] + len(listed) - 1) * block_size + last_page_len
            start = stop - (rows.stop - rows.start)
            sequences.append(BatchSequence(rows, listed, first_pages[s], start, stop))
        return sequences


@dataclass(frozen=True, slots=True)
class BatchSequence:
    """A sequence of a step: its query rows, which are at the positions from `start` to `stop`.

    `pages`, int64 on the device of the KV tensors, are its pages from number `first_page` on.
    """

    rows: slice
    pages: Tensor
    first_page: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers of a model with the same attention and block table.

    Where they are convolutions, or have states, whose parts in the group are `states`, the spec
    says the shape of the KV tensors alone.
    """

    spec: AttentionSpec
    kv: KVGroup
    states: tuple[StatePart, ...] = ()

    @property
    def attends(self) -> bool:
        """Whether the layers attend."""
        return not (self.kv.conv_width or self.states)


class AttentionBackend(Protocol):
    """Paged attention of one group of layers. `plan` once a step, then `run` for each layer.

    `batch_invariant` says that a row's bits depend on its own sequence alone, whatever its chunk
    and batch, and whether it is one of `num_decodes`. `rotate_and_run` is None where the model
    rotates queries and keys itself. Layers are numbered within the group.
    """

    name: str
    batch_invariant: bool

    @property
    def rotate_and_run(
        self,
    ) -> Callable[[int, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor] | None:
        """`run` of a layer's queries and keys [T, H + K, D] and values, with their rotation."""
        ...

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of one layer's KV tensor."""
        ...

    def bind(self, kv_layers: Sequence[Tensor]) -> None:
        """Takes the KV tensors, one a layer, each of `kv_shape`."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares for the step; `batch` must not change until the step's last `run`."""
        ...

    def run(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Writes k and v to their slots, then attends: causal, aligned at the last token.

        None of them is written where an earlier layer did that.
        `sinks_H`, where the spec has sinks, are scores of a key without a value, one a head.
        Returns [T, H, D] in the type of `q_THD`.
        """
        ...


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """A backend whose decodes can be captured."""

    def reserve_graphs(self, sizes: Sequence[int], max_page_indices: int) -> None:
        """Makes the tables of fixed addresses that captured decodes of `sizes` rows read."""
        ...

    def plan_graph(self, batch: AttentionBatch, size: int) -> None:
        """Plans a pure decode, with rows of the null block added to make `size`."""
        ...


def kv_shape_nhd(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """The common layout [P, 2, B, K, D]: keys, then values, token by token."""
    return (num_blocks, 2, block_size, num_kv_heads, head_dim)
