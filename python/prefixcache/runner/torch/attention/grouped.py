"""Attention of a whole model: one backend for each group of layers that share a block table.

Convolutions and states are groups too, with caches of their own kinds over the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from prefixcache.kv.specs import StatePart, layer_places
from prefixcache.runner.torch.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionGroup,
    GraphAttention,
)
from prefixcache.runner.torch.attention.short_conv import ShortConvCache
from prefixcache.runner.torch.attention.states import StatePages
from prefixcache.runner.torch.typed import split

Rotation = tuple[Tensor, Tensor]
GroupBackend: TypeAlias = AttentionBackend | ShortConvCache | StatePages


class GroupedAttention:
    """Leads each layer of a model to its group's backend; those that attend are of one kind.

    `bind` once, `plan` once a step, then `run`, `convolve` or `recur` for each layer, by its number
    in the model. The first group attends.
    """

    def __init__(self, groups: Sequence[AttentionGroup], backends: Sequence[GroupBackend]) -> None:
        first = backends[0]
        assert not isinstance(first, ShortConvCache | StatePages)
        self.groups = tuple(groups)
        self.backends = tuple(backends)
        self.name = first.name
        self.batch_invariant = all(backend.batch_invariant for backend in backends)
        self.kv_shape = first.kv_shape
        places = layer_places(group.kv for group in groups)
        self._layers = [(backends[group], number) for group, number in places]

    @property
    def num_groups(self) -> int:
        """How many batches `plan` takes."""
        return len(self.groups)

    def bind(self, kv_tensors: Sequence[Tensor]) -> None:
        """Takes the KV tensors, each of `kv_shape`: tensor j is that of layer j of every group.

        Several convolutions share a tensor, and layers that differ in their heads; states lie in
        any.
        """
        for group, backend in zip(self.groups, self.backends, strict=True):
            if group.kv.heads is not None:
                backend.bind(_parts(group, self.kv_shape, kv_tensors))
            else:
                backend.bind(kv_tensors if group.states else kv_tensors[: len(group.kv.layers)])

    def plan(self, batches: Sequence[AttentionBatch]) -> None:
        """Prepares for the step; the batches, one a group, must not change until its last `run`."""
        for backend, batch in zip(self.backends, batches, strict=True):
            backend.plan(batch)

    def run(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """The attention of a layer of the model; see `AttentionBackend.run`."""
        backend, number = self._attention(layer)
        return backend.run(number, q_THD, k_TKD, v_TKD, sinks_H)

    def convolve(
        self, layer: int, bx_TE: Tensor, weight_LE: Tensor, bias_E: Tensor | None
    ) -> Tensor:
        """The convolution of a layer of the model; see `ShortConvCache.convolve`."""
        backend, number = self._layers[layer]
        assert isinstance(backend, ShortConvCache)
        return backend.convolve(number, bx_TE, weight_LE, bias_E)

    def recur(self, layer: int, compute: Callable[[slice, Tensor], None]) -> None:
        """Takes runs of rows through a layer's state: `compute` brings it behind a run."""
        parts = [part for group in self.groups for part in group.states if part.layer == layer]
        pages = [(self._states(part), part) for part in parts]
        for run, rows in enumerate(pages[0][0].runs):
            state = torch.cat([page.read(run, part) for page, part in pages])
            compute(rows, state)
            written = split(state, [part.numbers for part in parts])
            for (page, part), numbers in zip(pages, written, strict=True):
                page.write(run, part, numbers)

    def _states(self, part: StatePart) -> StatePages:
        backend = self.backends[part.group]
        assert isinstance(backend, StatePages)
        return backend

    @property
    def rotate_and_run(self) -> Callable[[int, Tensor, Tensor, Rotation], Tensor] | None:
        """`run` of queries and keys that it rotates; None where the model must do that."""
        first = self.backends[0]
        assert not isinstance(first, ShortConvCache | StatePages)
        return None if first.rotate_and_run is None else self._rotate_and_run

    def _attention(self, layer: int) -> tuple[AttentionBackend, int]:
        backend, number = self._layers[layer]
        assert not isinstance(backend, ShortConvCache | StatePages)
        return backend, number

    def _rotate_and_run(
        self, layer: int, qk_TND: Tensor, v_TKD: Tensor, rotation: Rotation
    ) -> Tensor:
        backend, number = self._attention(layer)
        assert backend.rotate_and_run is not None
        return backend.rotate_and_run(number, qk_TND, v_TKD, rotation)

    @property
    def has_graphs(self) -> bool:
        """Whether decodes can be captured, planned by `plan_graph` in place of `plan`."""
        return all(isinstance(backend, GraphAttention) for backend in self.backends)

    def reserve_graphs(self, sizes: Sequence[int], max_page_indices: Sequence[int]) -> None:
        """Makes the tables that captured decodes of `sizes` rows read.

        `max_page_indices` bounds the page indices of a decode in each group.
        """
        for backend, most in zip(self._graph_backends(), max_page_indices, strict=True):
            backend.reserve_graphs(sizes, most)

    def plan_graph(self, batches: Sequence[AttentionBatch], size: int) -> None:
        """Plans a pure decode, with rows of the null block added to make `size`."""
        for backend, batch in zip(self._graph_backends(), batches, strict=True):
            backend.plan_graph(batch, size)

    def _graph_backends(self) -> list[GraphAttention]:
        return [backend for backend in self.backends if isinstance(backend, GraphAttention)]


def _parts(
    group: AttentionGroup,
    kv_shape: Callable[[int, int, int, int], tuple[int, ...]],
    kv_tensors: Sequence[Tensor],
) -> list[Tensor]:
    """The part of each layer of the group, of the backends' shape, without a copy."""
    kv, heads = group.kv, (group.spec.num_kv_heads, group.spec.head_dim)
    block_size = kv.part_numbers // (2 * heads[0] * heads[1])
    places = [kv.part(number) for number in range(len(kv.layers))]
    shape = kv_shape(1, block_size, *heads)[1:]
    return [kv_tensors[tensor].flatten(1)[:, part].unflatten(1, shape) for tensor, part in places]
