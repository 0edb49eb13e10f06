"""Runs the model on a planned step, and samples.

The runner is told everything by the `StepPlan` and the block tables in its buffers; it asks
nothing of the cache or the scheduler. Letters of shapes: T tokens in the step, R rows of logits, E
hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from prefixcache.attention.base import AttentionBackend
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.request import TokenLogprobs
from prefixcache.runner.batch import StepBuffers
from prefixcache.sampling.logprobs import token_logprobs
from prefixcache.sampling.sampler import sample
from prefixcache.step_plan import ScheduledSequence, SequenceOutput, StepPlan

_LOGPROB_ROWS = 256
_NOTHING = SequenceOutput()


class Decoder(Protocol):
    """What the runner needs of a model."""

    def __call__(
        self, token_ids_T: Tensor, positions_T: Tensor, attention: AttentionBackend, /
    ) -> Tensor:
        """Hidden states [T, E]."""
        ...

    def compute_logits(self, hidden_RE: Tensor, /) -> Tensor:
        """Logits [R, V], float32."""
        ...


class ModelRunner:
    """One model on one device, with the buffers of its steps.

    `max_pages` is the number of pages of the longest sequence.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        *,
        max_tokens: int,
        max_seqs: int,
        max_pages: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._buffers = StepBuffers(
            max_tokens=max_tokens, max_seqs=max_seqs, max_pages=max_pages, device=device
        )

    @property
    def block_tables(self) -> Sequence[BlockTableBuffers]:
        """Arrays for the cache to fill before each `execute`, one set a KV cache group."""
        return self._buffers.block_tables

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[SequenceOutput]:
        """Computes the step; one output for each sequence of the plan, in its order."""
        batch = self._buffers.load(plan)
        self._attention.plan(batch.attention)
        hidden_TE = self._model(batch.token_ids, batch.positions, self._attention)
        inputs = [s.sampling for s in plan.sequences if s.sampling is not None]
        if inputs:
            sampled = sample(self._model.compute_logits(hidden_TE[batch.sampled_rows]), inputs)
        else:
            sampled = []
        return self._with_prompt_logprobs(plan, hidden_TE, _spread(plan, sampled))

    def _with_prompt_logprobs(
        self, plan: StepPlan, hidden_TE: Tensor, outputs: list[SequenceOutput]
    ) -> list[SequenceOutput]:
        first = 0
        for index, sequence in enumerate(plan.sequences):
            if sequence.prompt_logprobs is not None and outputs[index].error is None:
                rows_RE = hidden_TE[first : first + len(sequence.next_prompt_token_ids)]
                logprobs = tuple(self._prompt_logprobs(sequence, rows_RE))
                outputs[index] = dataclasses.replace(outputs[index], prompt_logprobs=logprobs)
            first += sequence.num_tokens
        return outputs

    def _prompt_logprobs(
        self, sequence: ScheduledSequence, hidden_RE: Tensor
    ) -> Iterator[TokenLogprobs]:
        """A few rows at a time: all logits of a long prompt would not fit into memory."""
        for start in range(0, len(hidden_RE), _LOGPROB_ROWS):
            stop = start + _LOGPROB_ROWS
            logits_RV = self._model.compute_logits(hidden_RE[start:stop])
            followers = sequence.next_prompt_token_ids[start:stop]
            yield from token_logprobs(logits_RV, followers, sequence.prompt_logprobs or 0)


def _spread(plan: StepPlan, sampled: list[SequenceOutput]) -> list[SequenceOutput]:
    """One output a sequence: a sampled one where it was due, an empty one elsewhere."""
    due = iter(sampled)
    return [_NOTHING if s.sampling is None else next(due) for s in plan.sequences]
