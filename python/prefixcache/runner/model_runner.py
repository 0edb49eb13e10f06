"""Runs the model on a planned step, and samples.

The runner is told everything by the `StepPlan` and the block tables in its buffers; it asks
nothing of the cache or the scheduler. Letters of shapes: T tokens in the step, R rows of logits, E
hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from prefixcache.attention.base import AttentionBackend
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.request import TokenLogprobs
from prefixcache.runner.batch import Batch, StepBuffers
from prefixcache.runner.cuda_graph import DecodeGraphs
from prefixcache.runner.decoder import Decoder
from prefixcache.runner.pending import PendingStep, ResultCopies
from prefixcache.runner.trial import run_largest_step
from prefixcache.sampling.logprobs import token_logprobs
from prefixcache.sampling.row_options import SampledRow
from prefixcache.sampling.sampler import Sampled, Sampler, all_plain_greedy
from prefixcache.step_plan import PromptLogprobsInput, SequenceOutput, StepPlan

_LOGPROB_ROWS = 256
_NOTHING = SequenceOutput()


class ModelRunner:
    """One model on one device, with the buffers of its steps.

    `max_pages` is the number of pages of the longest sequence. With `graphs`, pure decodes are
    replayed from them. At most two submitted steps may wait for their results. `runs_ahead` tells
    that a step may still be computed when its outputs are known: where nothing is sampled they are
    known at once, and an error then shows in a later step. `shares_kv` tells that a sequence may
    read KV that was computed for another one; else the prefix cache stays off.
    """

    shares_kv = True

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        *,
        max_tokens: int,
        max_seqs: int,
        max_pages: int,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._device = device
        self.graphs = graphs
        self.runs_ahead = device.type != "cpu"
        self._buffers = StepBuffers(
            max_tokens=max_tokens, max_seqs=max_seqs, max_pages=max_pages, device=device
        )
        # Events, graphs and triton go by the current device, which each thread has of its own.
        self._on_device = (
            partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext
        )
        self._sampler = Sampler(max_seqs, device)
        self._copies = ResultCopies(max_seqs, device)
        self._sampled_R = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def block_tables(self) -> Sequence[BlockTableBuffers]:
        """Arrays for the cache to fill before each step, one set a KV cache group."""
        return self._buffers.block_tables

    def execute(self, plan: StepPlan) -> list[SequenceOutput]:
        """Computes the step; one output for each sequence of the plan, in its order."""
        return self.submit(plan).outputs()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts the step on the device, and returns before it ends where that is possible.

        The plan's tokens below zero are those that the step before sampled. What was sampled comes
        by an asynchronous copy; log probabilities of prompts alone are waited for.
        """
        with self._on_device():
            return self._launch(plan, self._buffers.load(plan, self._sampled_R))

    def run_empty_step(self) -> None:
        """Computes one token of no request, in the null block; waits for it.

        Raises whatever keeps the device from computing.
        """
        with self._on_device():
            run_largest_step(
                self._model,
                self._attention,
                max_tokens=1,
                max_seqs=1,
                max_model_len=1,
                block_size=1,
                device=self._device,
            )

    def _launch(self, plan: StepPlan, batch: Batch) -> PendingStep:
        rows = [
            SampledRow(s.request_id, s.start + s.num_tokens, s.sampling)
            for s in plan.sequences
            if s.sampling is not None
        ]
        if self.graphs is not None and self.graphs.fits(batch):
            decoded = self.graphs.run(batch)
            if all_plain_greedy(rows):
                return self._pending(plan, Sampled(decoded.token_ids_S))
            return self._pending(plan, self._sampler.sample(decoded.logits_SV, rows))
        hidden_TE = self._forward(batch)
        sampled = None
        if rows:
            logits_RV = self._model.compute_logits(hidden_TE[batch.sampled_rows_R])
            sampled = self._sampler.sample(logits_RV, rows)
        if any(sequence.prompt_logprobs is not None for sequence in plan.sequences):
            return self._finished(plan, hidden_TE, sampled)
        return _known(_spread(plan, [])) if sampled is None else self._pending(plan, sampled)

    def _forward(self, batch: Batch) -> Tensor:
        self._attention.plan(batch.attention)
        return self._model.forward(batch.token_ids_T, batch.positions_T, self._attention)

    def _pending(self, plan: StepPlan, sampled: Sampled) -> PendingStep:
        self._sampled_R = sampled.token_ids_R
        read = self._copies.start(sampled.results)
        return PendingStep(
            lambda: _spread(plan, sampled.outputs(read())), is_known=not self.runs_ahead
        )

    def _finished(self, plan: StepPlan, hidden_TE: Tensor, sampled: Sampled | None) -> PendingStep:
        outputs = [] if sampled is None else sampled.outputs(sampled.results.cpu().numpy())
        return _known(self._with_prompt_logprobs(plan, hidden_TE, _spread(plan, outputs)))

    def _with_prompt_logprobs(
        self, plan: StepPlan, hidden_TE: Tensor, outputs: list[SequenceOutput]
    ) -> list[SequenceOutput]:
        first = 0
        for index, sequence in enumerate(plan.sequences):
            asked = sequence.prompt_logprobs
            if asked is not None and outputs[index].error is None:
                rows_RE = hidden_TE[first : first + len(asked.followers)]
                logprobs = tuple(self._prompt_logprobs(asked, rows_RE))
                outputs[index] = dataclasses.replace(outputs[index], prompt_logprobs=logprobs)
            first += sequence.num_tokens
        return outputs

    def _prompt_logprobs(
        self, asked: PromptLogprobsInput, hidden_RE: Tensor
    ) -> Iterator[TokenLogprobs]:
        """A few rows at a time: all logits of a long prompt would not fit into memory."""
        for start in range(0, len(hidden_RE), _LOGPROB_ROWS):
            stop = start + _LOGPROB_ROWS
            logits_RV = self._model.compute_logits(hidden_RE[start:stop])
            yield from token_logprobs(logits_RV.float(), asked.followers[start:stop], asked.count)


def _known(outputs: list[SequenceOutput]) -> PendingStep:
    return PendingStep(lambda: outputs, is_known=True)


def _spread(plan: StepPlan, sampled: list[SequenceOutput]) -> list[SequenceOutput]:
    """One output a sequence: a sampled one where it was due, an empty one elsewhere."""
    due = iter(sampled)
    return [_NOTHING if s.sampling is None else next(due) for s in plan.sequences]
