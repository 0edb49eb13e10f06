"""Paged attention on the CPU by our own kernel, whose rows do not depend on the batch.

It reads keys and values where they are, through the block table, in tiles of 64 positions counted
from the sequence's first token, each row in the same order of additions. Tiled softmax as in
FlashAttention (Dao et al., 2022); the kernel is in `rust/prefixcache-attention`. Letters of shapes:
see `base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache._core import Cpu, PagedAttention
from prefixcache.attention.base import AttentionBatch, AttentionSpec
from prefixcache.exceptions import ConfigError
from prefixcache.ops.invariant import kernel_dtype


class CpuAttention:
    """Attention of one group of layers, for bfloat16 and float32 and heads of 16 to 512 numbers."""

    name = "cpu"
    batch_invariant = True
    decode_matches_prefill = True
    rotate_and_run = None

    def __init__(self, spec: AttentionSpec, cpu: Cpu, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._kv_layers: Sequence[Tensor] = ()
        self._num_tokens = 0
        self.stack_kernel = _make_kernel(spec, cpu, dtype)

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """[P, 2, K, B, D], whose last two dimensions the kernel orders as it reads them."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def bind(self, kv_layers: Sequence[Tensor]) -> None:
        """Takes the KV tensors, one a layer: contiguous, of one shape, on the CPU."""
        shape = kv_layers[0].shape
        spec = self._spec
        wanted = self.kv_shape(shape[0], shape[3], spec.num_kv_heads, spec.head_dim)
        for kv_P2KBD in kv_layers:
            dense = kv_P2KBD.is_cpu and kv_P2KBD.is_contiguous()
            if not dense or kv_P2KBD.dtype is not self._dtype or kv_P2KBD.shape != wanted:
                raise ValueError(f"kv_layers must be contiguous {self._dtype} {list(wanted)}")
        self._kv_layers = kv_layers

    def plan(self, batch: AttentionBatch) -> None:
        """Checks and takes the step's block tables."""
        num_blocks, _, _, block_size, _ = self._kv_layers[0].shape
        self._num_tokens = len(batch.slot_mapping)
        self.stack_kernel.plan(
            num_blocks,
            block_size,
            batch.qo_indptr.numpy(),
            batch.kv_indptr.numpy(),
            batch.kv_indices.numpy(),
            batch.last_page_len.numpy(),
            batch.slot_mapping.numpy(),
            None if batch.first_pages is None else batch.first_pages.numpy(),
        )

    def run(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Writes k and v to their slots, then attends; [T, H, D] in the type of `q_THD`."""
        q_THD = self._dense_heads(q_THD, self._spec.num_heads)
        k_TKD = self._dense_heads(k_TKD, self._spec.num_kv_heads)
        v_TKD = self._dense_heads(v_TKD, self._spec.num_kv_heads)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        self.stack_kernel.run(
            self._kv_layers[layer].data_ptr(),
            q_THD.data_ptr(),
            q_THD.stride(0),
            k_TKD.data_ptr(),
            k_TKD.stride(0),
            v_TKD.data_ptr(),
            v_TKD.stride(0),
            out_THD.data_ptr(),
        )
        return out_THD

    def _dense_heads(self, x_TND: Tensor, num_heads: int) -> Tensor:
        """The tensor itself if each token's heads follow each other, else a copy."""
        head_dim = self._spec.head_dim
        shape = (self._num_tokens, num_heads, head_dim)
        if x_TND.shape != shape or x_TND.dtype is not self._dtype or not x_TND.is_cpu:
            raise ValueError(f"q, k and v must be {self._dtype} {list(shape)} on the CPU")
        dense = x_TND.stride(2) == 1 and x_TND.stride(1) == head_dim
        return x_TND if dense else x_TND.contiguous()


def _make_kernel(spec: AttentionSpec, cpu: Cpu, dtype: torch.dtype) -> PagedAttention:
    try:
        return PagedAttention(
            cpu,
            kernel_dtype(dtype),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.scale,
            window_left=None if spec.sliding_window is None else spec.sliding_window - 1,
            softcap=spec.softcap,
        )
    except ValueError as error:
        raise ConfigError(f"The CPU's attention cannot compute this model: {error}") from None
