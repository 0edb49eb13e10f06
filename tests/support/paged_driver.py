"""Runs a model over a paged KV cache without an engine: block tables laid out by hand."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prefixcache._core import Cpu
from prefixcache.config.model_config import ModelConfig
from prefixcache.kv.specs import kv_layout
from prefixcache.models.arrays import DTYPES
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.runner.cpu.model import CpuModel, attention_kernels, step_kernels
from prefixcache.runner.torch.attention.base import AttentionBatch
from prefixcache.runner.torch.attention.registry import AttentionOptions, make_attention
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.kv_tensors import attention_groups
from support.loaded import CPU, to_torch


def make_batch(
    chunks: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    block_size: int,
    window: int | None = None,
) -> AttentionBatch:
    """The batch of sequences whose positions `start:stop` are computed now.

    Pages behind the window are left out.
    """
    first = [
        0 if window is None else max(start + 1 - window, 0) // block_size for start, _ in chunks
    ]
    stops = [-(-stop // block_size) for _, stop in chunks]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for (start, stop), table in zip(chunks, tables, strict=True)
        for position in range(start, stop)
    ]
    rows = [stop - start for start, stop in chunks]
    used = [table[a:b] for table, a, b in zip(tables, first, stops, strict=True)]
    last = [stop - (count - 1) * block_size for (_, stop), count in zip(chunks, stops, strict=True)]
    return AttentionBatch(
        qo_indptr=_indptr(rows),
        kv_indptr=_indptr([len(pages) for pages in used]),
        kv_indices=torch.tensor([page for pages in used for page in pages], dtype=torch.int32),
        last_page_len=torch.tensor(last, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        first_pages=torch.tensor(first, dtype=torch.int32),
    )


def _indptr(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


class Driver(ABC):
    """Sequences of one model, each with blocks that are neither in order nor side by side.

    `tables[group][sequence]` are the blocks of a sequence in a KV cache group.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_sequences: int,
        max_tokens: int,
        block_size: int,
        itemsize: int,
        has_codes: bool = False,
    ) -> None:
        per_sequence = -(-max_tokens // block_size)
        self.layout = kv_layout(config, block_size, itemsize=itemsize, has_codes=has_codes)
        shape = (len(self.layout.groups), num_sequences, per_sequence)
        self.num_blocks = math.prod(shape) + 1
        shuffled = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(1))
        self.tables: list[list[list[int]]] = (shuffled + 1).view(shape).tolist()
        self.block_size = block_size

    def batches(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> list[AttentionBatch]:
        """The batch of each group for `forward`'s work."""
        chunks = [(start, start + len(tokens)) for _, start, tokens in work]
        return [
            make_batch(
                chunks,
                [tables[sequence] for sequence, _, _ in work],
                self.block_size,
                group.sliding_window,
            )
            for group, tables in zip(self.layout.groups, self.tables, strict=True)
        ]

    @abstractmethod
    def forward(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """Computes `(sequence, start, token ids)` of each; logits of all rows."""

    @abstractmethod
    def blocks_of(self, tensor: int, blocks: Sequence[int]) -> Tensor:
        """The numbers of these blocks in one KV tensor, a row each."""

    def kv_of(self, sequence: int) -> Tensor:
        """What all layers keep, group by group and block by block, in the order of the sequence."""
        parts = list[Tensor]()
        for group, tables in zip(self.layout.groups, self.tables, strict=True):
            for number in range(0 if group.state_tensors else len(group.layers)):
                tensor, part = group.part(number)
                kept = self.blocks_of(tensor, tables[sequence])[:, part]
                if self.layout.code_bytes and not group.conv_width:
                    kept = kept.contiguous().view(torch.uint8)  # Codes may look like NaN.
                parts.append(kept.flatten())
        for state in self.layout.states:
            blocks = self.blocks_of(state.tensor, self.tables[state.group][sequence])
            numbers = blocks.contiguous().view(torch.float32)
            parts.append(numbers[:, state.start : state.start + state.numbers].flatten())
        return torch.cat([part.float() for part in parts])

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens after the prompt, one by one, on sequence 0."""
        tokens = list(prompt)
        logits = self.forward([(0, 0, tokens)])
        for _ in range(count):
            tokens.append(int(logits[-1].argmax()))
            logits = self.forward([(0, len(tokens) - 1, tokens[-1:])])
        return tokens[len(prompt) :]


def tokens_of(work: Sequence[tuple[int, int, Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """All token ids of the work, and their positions."""
    tokens = torch.tensor([token for _, _, ids in work for token in ids])
    return tokens, torch.cat([torch.arange(start, start + len(ids)) for _, start, ids in work])


class PagedDriver(Driver):
    """On torch."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        num_sequences: int = 1,
        max_tokens: int = 256,
        block_size: int = 16,
        attention: str = "torch",
    ) -> None:
        super().__init__(model.config, num_sequences, max_tokens, block_size, model.dtype.itemsize)
        self.model = model
        self.attention = make_attention(
            attention,
            attention_groups(self.layout, model.attention_spec),
            AttentionOptions(dtype=model.dtype),
        )
        heads = (self.layout.num_kv_heads, self.layout.head_dim)
        shape = self.attention.kv_shape(self.num_blocks, block_size, *heads)
        layers = range(self.layout.num_tensors)
        self.kv = [torch.zeros(shape, dtype=model.dtype, device=CPU) for _ in layers]
        self.attention.bind(self.kv)

    def forward(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        return self.model.compute_logits(self.hidden(work))

    def hidden(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """Hidden states of all rows of `forward`'s work."""
        self.attention.plan(self.batches(work))
        return self.model.forward(*tokens_of(work), self.attention)

    def blocks_of(self, tensor: int, blocks: Sequence[int]) -> Tensor:
        return self.kv[tensor][blocks].flatten(1)


class CpuDriver(Driver):
    """On the CPU's kernels, with their threads."""

    def __init__(
        self,
        model: CpuModel,
        *,
        num_sequences: int = 1,
        max_tokens: int = 256,
        block_size: int = 16,
        cpu: Cpu | None = None,
        has_codes: bool = False,
    ) -> None:
        self._dtype = DTYPES[model.dtype_name]
        itemsize = self._dtype.itemsize
        super().__init__(
            model.config, num_sequences, max_tokens, block_size, itemsize, has_codes=has_codes
        )
        self.model = model
        self.attentions = attention_kernels(
            model.config, self.layout, cpu or Cpu(2), model.dtype_name
        )
        self.kv = KVMemory(
            layout=self.layout,
            num_blocks=self.num_blocks,
            block_size=block_size,
            itemsize=self._dtype.itemsize,
            free_memory=lambda: 1 << 40,
        )
        self.kv.allocate()
        self._kernels = step_kernels(self.attentions, self.kv)

    def forward(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        for kernel, batch in zip(self.attentions, self.batches(work), strict=True):
            assert batch.first_pages is not None
            kernel.plan(
                self.num_blocks,
                self.block_size,
                batch.qo_indptr.numpy(),
                batch.kv_indptr.numpy(),
                batch.kv_indices.numpy(),
                batch.last_page_len.numpy(),
                batch.slot_mapping.numpy(),
                batch.first_pages.numpy(),
            )
        tokens, positions = tokens_of(work)
        stream = self.model.forward(tokens.numpy(), positions.numpy(), self._kernels)
        return torch.from_numpy(self.model.compute_logits(stream).copy())

    def blocks_of(self, tensor: int, blocks: Sequence[int]) -> Tensor:
        return to_torch(self.kv.rows()[tensor][np.array(blocks)].view(self._dtype))
