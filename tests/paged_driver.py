"""Runs a model over a paged KV cache without an engine: block tables laid out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache._core import Cpu
from prefixcache.attention.base import AttentionBatch
from prefixcache.attention.registry import AttentionOptions, make_attention
from prefixcache.kv.specs import kv_layout
from prefixcache.models.decoder import DecoderModel
from prefixcache.runner.kv_tensors import KVTensors, attention_groups


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


class PagedDriver:
    """Sequences of one model, each with blocks that are neither in order nor side by side.

    `tables[group][sequence]` are the blocks of a sequence in a KV cache group.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        num_sequences: int = 1,
        max_tokens: int = 256,
        block_size: int = 16,
        attention: str = "torch",
        cpu: Cpu | None = None,
    ) -> None:
        per_sequence = -(-max_tokens // block_size)
        layout = kv_layout(model.config)
        shape = (len(layout.groups), num_sequences, per_sequence)
        num_blocks = math.prod(shape) + 1
        shuffled = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.tables: list[list[list[int]]] = shuffled.view(shape).tolist()
        self.block_size = block_size
        self.model = model
        self.attention = make_attention(
            attention,
            attention_groups(layout, model.attention_spec),
            AttentionOptions(dtype=model.dtype, cpu=cpu),
        )
        self.kv = KVTensors(
            layout=layout,
            attention=self.attention,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        ).make(num_blocks)
        self.attention.bind(self.kv)

    def forward(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """Computes `(sequence, start, token ids)` of each; float32 logits of all rows."""
        return self.model.compute_logits(self.hidden(work))

    def hidden(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """Hidden states of all rows of `forward`'s work."""
        chunks = [(start, start + len(tokens)) for _, start, tokens in work]
        batches = [
            make_batch(
                chunks,
                [tables[sequence] for sequence, _, _ in work],
                self.block_size,
                group.spec.sliding_window,
            )
            for group, tables in zip(self.attention.groups, self.tables, strict=True)
        ]
        self.attention.plan(batches)
        tokens = torch.tensor([token for _, _, ids in work for token in ids])
        positions = torch.cat([torch.arange(start, stop) for start, stop in chunks])
        return self.model.forward(tokens, positions, self.attention)

    def kv_of(self, sequence: int) -> Tensor:
        """The blocks of all layers, group by group, in the order of the sequence."""
        parts = [
            self.kv[number][tables[sequence]]
            for group, tables in zip(self.attention.groups, self.tables, strict=True)
            for number in range(len(group.layers))
        ]
        return torch.stack(parts)

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens after the prompt, one by one, on sequence 0."""
        tokens = list(prompt)
        logits = self.forward([(0, 0, tokens)])
        for _ in range(count):
            tokens.append(int(logits[-1].argmax()))
            logits = self.forward([(0, len(tokens) - 1, tokens[-1:])])
        return tokens[len(prompt) :]
