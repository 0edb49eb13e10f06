"""Short convolutions in plain torch, over blocks that keep the inputs of their last tokens.

The straightforward form, which the kernels of a CPU are checked against. Letters of shapes: see
`base.py`; E channels, L taps, R tokens of a block whose inputs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.kv.specs import KVGroup
from prefixcache.runner.torch.attention.base import AttentionBatch, AttentionSpec, BatchSequence
from prefixcache.runner.torch.typed import unflatten


@dataclass(frozen=True, slots=True)
class _SequencePlan:
    """One sequence of the step: its rows, and where the inputs before them stand.

    There are `missing` taps before its first token.
    """

    rows: slice
    blocks: Tensor  # int64, at most L - 1
    places: Tensor  # int64, of each block the kept token
    missing: int


class ShortConvCache:
    """The inputs that convolutions of one group need, and what they make of them."""

    batch_invariant = True

    def __init__(self, spec: AttentionSpec, group: KVGroup) -> None:
        assert group.sliding_window is not None
        self._numbers_per_token = 2 * spec.num_kv_heads * spec.head_dim
        self._group = group
        self._taps = group.sliding_window
        self._block_size = 0
        self._inputs: list[Tensor] = []
        self._sequences: list[_SequencePlan] = []
        self._kept = self._kept_blocks = self._kept_places = torch.empty(0, dtype=torch.int64)

    def bind(self, kv_tensors: Sequence[Tensor]) -> None:
        """Takes the KV tensors, of any shape whose first dimension counts blocks."""
        group = self._group
        self._block_size = kv_tensors[0][0].numel() // self._numbers_per_token
        self._inputs = []
        for number in range(len(group.layers)):
            tensor, part = group.part(number)
            inputs_PN = kv_tensors[tensor].flatten(1)[:, part]
            self._inputs.append(unflatten(inputs_PN, 1, (group.kept_tokens, group.conv_width)))

    def plan(self, batch: AttentionBatch) -> None:
        """Finds the inputs before the step, and which of its own are kept."""
        size, kept = self._block_size, self._group.kept_tokens
        ends = batch.qo_indptr[1:].repeat_interleave(batch.qo_indptr.diff().long())
        slots = batch.slot_mapping
        rows = torch.arange(len(slots))
        is_kept = (slots.cpu() % size + kept >= size) | (rows + kept >= ends)
        self._kept = rows[is_kept].to(slots.device)
        self._kept_blocks = slots[self._kept] // size
        self._kept_places = slots[self._kept] % size % kept
        self._sequences = [self._planned(sequence) for sequence in batch.sequences(size)]

    def _planned(self, sequence: BatchSequence) -> _SequencePlan:
        size, start, pages = self._block_size, sequence.start, sequence.pages
        positions = torch.arange(max(0, start - self._taps + 1), start, device=pages.device)
        return _SequencePlan(
            rows=sequence.rows,
            blocks=pages[positions // size - sequence.first_page],
            places=positions % size % self._group.kept_tokens,
            missing=self._taps - 1 - len(positions),
        )

    def convolve(
        self, number: int, bx_TE: Tensor, weight_LE: Tensor, bias_E: Tensor | None
    ) -> Tensor:
        """The sums of the group's layer of that number, float32 [T, E]; keeps inputs for later."""
        inputs_PRE = self._inputs[number]
        out_TE = torch.empty_like(bx_TE, dtype=torch.float32)
        weight = weight_LE.float().T.unsqueeze(1).contiguous()
        bias = None if bias_E is None else bias_E.float()
        for sequence in self._sequences:
            before = inputs_PRE[sequence.blocks, sequence.places]
            inputs = torch.cat([before, bx_TE[sequence.rows]]).float()
            padded = F.pad(inputs, (0, 0, sequence.missing, 0))
            sums = F.conv1d(padded.T.unsqueeze(0), weight, bias, groups=len(weight))
            out_TE[sequence.rows] = sums[0].T
        inputs_PRE[self._kept_blocks, self._kept_places] = bx_TE[self._kept]
        return out_TE
