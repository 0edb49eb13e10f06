"""States of layers in blocks, in plain torch: each block has that after its last token.

The straightforward form, which the kernels of a CPU are checked against. Letters of shapes: see
`base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache.kv.specs import StatePart
from prefixcache.runner.torch.attention.base import AttentionBatch, AttentionSpec
from prefixcache.runner.torch.typed import integers


class StatePages:
    """Where the step's tokens find and leave the states that one group keeps.

    `runs` are the rows of a sequence in one block, in order.
    """

    batch_invariant = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._numbers_per_token = 2 * spec.num_kv_heads * spec.head_dim
        self._block_size = 0
        self._pages: list[Tensor] = []
        self._places: list[tuple[int | None, int]] = []
        self.runs: list[slice] = []

    def bind(self, kv_tensors: Sequence[Tensor]) -> None:
        """Takes the KV tensors, of any shape whose first dimension counts blocks."""
        self._block_size = kv_tensors[0][0].numel() // self._numbers_per_token
        self._pages = [tensor.flatten(1).view(torch.float32) for tensor in kv_tensors]

    def plan(self, batch: AttentionBatch) -> None:
        """Finds the block before each run, and its own."""
        size = self._block_size
        self.runs, self._places = [], []
        for sequence in batch.sequences(size):
            pages, start = integers(sequence.pages), sequence.start
            while start < sequence.stop:
                upto = min(sequence.stop, (start // size + 1) * size)
                before = pages[(start - 1) // size - sequence.first_page] if start else None
                end = sequence.rows.stop - sequence.stop
                self.runs.append(slice(end + start, end + upto))
                self._places.append((before, pages[start // size - sequence.first_page]))
                start = upto

    def read(self, run: int, part: StatePart) -> Tensor:
        """The numbers of the part before a run: zeros before the first token."""
        before, _ = self._places[run]
        pages = self._pages[part.tensor]
        if before is None:
            return pages.new_zeros(part.numbers)
        return pages[before, part.start : part.start + part.numbers]

    def write(self, run: int, part: StatePart, numbers: Tensor) -> None:
        """Leaves the numbers of the part after a run."""
        _, after = self._places[run]
        self._pages[part.tensor][after, part.start : part.start + part.numbers] = numbers
