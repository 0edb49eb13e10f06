"""The CPU's attention kernel as a backend of torch's tensors, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache._core import Cpu, PagedAttention
from prefixcache.runner.torch.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
)
from prefixcache.runner.torch.attention.torch_attention import TorchAttention


class KernelAttention:
    """Attention of one group of layers in float32, over KV tensors [P, 2, K, B, D]."""

    name = "cpu"
    batch_invariant = True
    rotate_and_run = None
    keeps_codes = False

    def __init__(self, spec: AttentionSpec) -> None:
        window = spec.sliding_window
        self._kv_layers: Sequence[Tensor] = ()
        self._kernel = PagedAttention(
            Cpu(2),
            "float32",
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.scale,
            window_left=None if window is None else window - 1,
            softcap=spec.softcap,
            keeps_codes=self.keeps_codes,
        )

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def bind(self, kv_layers: Sequence[Tensor]) -> None:
        self._kv_layers = kv_layers

    def plan(self, batch: AttentionBatch) -> None:
        num_blocks, _, _, block_size, _ = self._kv_layers[0].shape
        self._kernel.plan(
            num_blocks,
            block_size,
            batch.qo_indptr.numpy(),
            batch.kv_indptr.numpy(),
            batch.kv_indices.numpy(),
            batch.last_page_len.numpy(),
            batch.slot_mapping.numpy(),
            None if batch.first_pages is None else batch.first_pages.numpy(),
        )

    def run(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "the kernel takes sinks from the decoder's call alone"
        parts = [part.contiguous() for part in (queries, keys, values)]
        out = torch.empty_like(parts[0])
        places = [number for part in parts for number in (part.data_ptr(), part.stride(0))]
        self._kernel.run(self._kv_layers[layer].data_ptr(), *places, out.data_ptr())
        return out


class CodeAttention(KernelAttention):
    """The same over codes of eight bits, whose scales take the room of four more numbers a head."""

    name = "int8"
    keeps_codes = True

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_dim // 4 + 1)


def rounded(rows: Tensor) -> Tensor:
    """The numbers that the codes of rows are, each row by its own scale. A row is the last axis."""
    scales = rows.float().abs().amax(-1, keepdim=True) / 127
    codes = torch.round(rows.float() / torch.where(scales > 0, scales, 1))
    return (codes * scales).to(rows.dtype)


def rounded_keys(rows: Tensor) -> Tensor:
    """The same of keys, which are rotated before: each block multiplied with a Hadamard matrix."""
    size = rows.shape[-1] & -rows.shape[-1]
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    turned = rounded((rows.float().unflatten(-1, (-1, size)) @ matrix).flatten(-2))
    return (turned.unflatten(-1, (-1, size)) @ matrix / size).flatten(-2).to(rows.dtype)


_BACKENDS = {"cpu": KernelAttention, "int8": CodeAttention, "torch": TorchAttention}


def backend_of(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Of the kernel, over numbers or codes, or of torch."""
    return _BACKENDS[name](spec)
