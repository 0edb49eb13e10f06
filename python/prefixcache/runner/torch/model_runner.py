"""Runs the model on a planned step, and samples.

The `StepPlan` and the block tables in its buffers say everything to the runner; it asks
nothing of the cache or the scheduler. Letters of shapes: T tokens in the step, R rows of logits, E
hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.sampled_rows import inputs_of, pooling_of
from prefixcache.runner.torch.attention.grouped import GroupedAttention
from prefixcache.runner.torch.batch import Batch, StepBuffers
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.piecewise_graphs import Graphs
from prefixcache.runner.torch.profile_run import run_largest_step
from prefixcache.runner.torch.results import LaunchedStep, ResultCopies, StepResults
from prefixcache.runner.torch.sampling.logprobs import PackedLogprobs, compute_logprobs
from prefixcache.runner.torch.sampling.row_options import SampledRow
from prefixcache.runner.torch.sampling.sampler import Sampled, Sampler
from prefixcache.runner.torch.sampling.upload import Upload
from prefixcache.runner.torch.typed import split
from prefixcache.types.pooling import Pooling
from prefixcache.types.step_plan import PromptLogprobsInput, StepPlan, StepResult

_LOGPROB_ROWS = 256


class ModelRunner:
    """One model on one device, with the buffers of its steps.

    `max_pages` has for each KV cache group the most pages, of `block_size` tokens, of a sequence in
    a step. With `graphs`, steps are replayed from them.
    """

    def __init__(
        self,
        weights: ReplaceableModel[DecoderModel],
        attention: GroupedAttention,
        *,
        max_tokens: int,
        max_seqs: int,
        max_pages: Sequence[int],
        block_size: int,
        device: torch.device,
        graphs: Graphs | None = None,
    ) -> None:
        self._weights = weights
        self._attention = attention
        self._device = device
        self.graphs = graphs
        self.runs_ahead = device.type != "cpu"
        self._buffers = StepBuffers(
            groups=attention.groups,
            block_size=block_size,
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_pages=max_pages,
            device=device,
        )
        # Events, graphs and triton go by the current device, which each thread has of its own.
        self._on_device = (
            partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext
        )
        self._sampler = Sampler(max_seqs, device)
        self._copies = ResultCopies(max_seqs, device)
        self._nothing_sampled = Sampled(torch.zeros(0, dtype=torch.int64, device=device))
        self._sampled_R = self._nothing_sampled.token_ids_R

    @property
    def block_tables(self) -> Sequence[BlockTableBuffers]:
        """See `StepRunner`."""
        return self._buffers.block_tables

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> LaunchedStep:
        """See `StepRunner`. What the host gets comes by an asynchronous copy."""
        with self._on_device():
            results = self._compute(plan, self._buffers.load(plan, self._sampled_R))
            self._sampled_R = results.token_ids_R
            read = self._copies.start(results.numbers)
        return LaunchedStep(results, read, not (self.runs_ahead and len(results.numbers)))

    def results(self, step: LaunchedStep) -> StepResult:
        """See `StepRunner`."""
        return StepResult(step.results.outputs(step.read()))

    def run_empty_step(self) -> None:
        """See `StepRunner`."""
        with self._on_device():
            run_largest_step(
                self._weights.loaded,
                self._attention,
                max_tokens=1,
                max_sampled=1,
                max_model_len=1,
                block_size=1,
                device=self._device,
            )

    def _compute(self, plan: StepPlan, batch: Batch) -> StepResults:
        model, inputs = self._weights.loaded, inputs_of(plan)
        rows = [
            SampledRow(s.request_id, s.start + s.num_tokens + 1 + place - len(asked), row, place)
            for s, asked in zip(plan.sequences, inputs, strict=True)
            for place, row in enumerate(asked)
        ]
        pooling = dict(pooling_of(plan))
        if self.graphs is not None and not pooling and self.graphs.decodes.fits(batch):
            decoded = self.graphs.decodes.run(batch)
            sampled = self._sampler.sample(decoded.logits_SV, rows, decoded.token_ids_S)
            return StepResults(inputs, sampled, {}, {})
        self._attention.plan(batch.attention)
        steps = None if self.graphs is None else self.graphs.steps
        if steps is not None and steps.fits(batch):
            hidden_TE = steps.forward(batch)
        else:
            hidden_TE = model.forward(batch.token_ids_T, batch.positions_T, self._attention)
        sampled = self._nothing_sampled
        if rows:
            logits_RV = model.compute_logits(hidden_TE[batch.sampled_rows_R])
            sampled = self._sampler.sample(logits_RV, rows)
        ends = [*itertools.accumulate(sequence.num_tokens for sequence in plan.sequences)]
        pooled = {s: _pooled(model, hidden_TE[ends[s] - 1], asked) for s, asked in pooling.items()}
        return StepResults(inputs, sampled, self._prompt_logprobs(plan, hidden_TE), pooled)

    def _prompt_logprobs(
        self, plan: StepPlan, hidden_TE: Tensor
    ) -> dict[int, list[PackedLogprobs]]:
        logprobs: dict[int, list[PackedLogprobs]] = {}
        first = 0
        for index, sequence in enumerate(plan.sequences):
            asked = sequence.prompt_logprobs
            if asked is not None:
                rows_RE = hidden_TE[first + asked.first - sequence.start :]
                logprobs[index] = self._logprobs_of(asked, rows_RE)
            first += sequence.num_tokens
        return logprobs

    def _logprobs_of(self, asked: PromptLogprobsInput, hidden_RE: Tensor) -> list[PackedLogprobs]:
        """A few rows at a time: all logits of a long prompt would not fit into memory."""
        model, upload = self._weights.loaded, Upload()
        ids_at = upload.integers(asked.followers)
        parts = split(ids_at(upload.send(self._device)), _LOGPROB_ROWS)
        rows = split(hidden_RE[: len(asked.followers)], _LOGPROB_ROWS)
        return [
            compute_logprobs(model.compute_logits(rows_RE).float(), ids_R, asked.count)
            for rows_RE, ids_R in zip(rows, parts, strict=True)
        ]


def _pooled(model: DecoderModel, hidden_E: Tensor, pooling: Pooling) -> Tensor:
    if pooling.token_ids:
        return model.compute_logits(hidden_E.unsqueeze(0))[0, [*pooling.token_ids]].float()
    return torch.nn.functional.normalize(hidden_E.float(), dim=0)
