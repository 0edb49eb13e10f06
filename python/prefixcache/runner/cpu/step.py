"""Computes a planned step on a CPU, and samples.

The `StepPlan` and the block tables say everything; nothing is asked of the cache or the scheduler.
Letters of shapes: T tokens in the step, S sequences, E hidden size, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixcache._core import PagedAttention
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.models.arrays import Array
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.runner.cpu.model import CpuModel, step_kernels
from prefixcache.runner.cpu.sampler import Sampler
from prefixcache.runner.ranges import indptr_of, ranges
from prefixcache.runner.sampled_rows import inputs_of, outputs_of, pooling_of
from prefixcache.types.pooling import Pooling, unit
from prefixcache.types.request import TokenLogprobs
from prefixcache.types.step_plan import (
    PromptLogprobsInput,
    ScheduledSequence,
    SequenceOutput,
    StepPlan,
    StepResult,
)

# All logits of a long prompt would not fit into memory.
_LOGPROB_ROWS = 256


class StepComputer:
    """Computes steps of one model; its `block_tables` are filled before each of them."""

    def __init__(
        self,
        weights: ReplaceableModel[CpuModel],
        attentions: Sequence[PagedAttention],
        kv: KVMemory,
        block_tables: Sequence[BlockTableBuffers],
        sampler: Sampler,
    ) -> None:
        self.block_tables = block_tables
        self._weights = weights
        self._kv = kv
        self._sampler = sampler
        self._kernels = step_kernels(attentions, kv)

    def compute(self, plan: StepPlan) -> StepResult:
        """One output for each sequence of the plan: an empty one where nothing was due."""
        model = self._weights.loaded
        counts = np.array([sequence.num_tokens for sequence in plan.sequences], np.int64)
        starts = np.array([sequence.start for sequence in plan.sequences], np.int64)
        indptr = indptr_of(counts)
        for kernel, tables in zip(self._kernels.attentions, self.block_tables, strict=True):
            self._plan(kernel, tables, indptr)
        guesses = _guesses(plan) if self._kernels.states else ()
        token_ids_T = plan.token_ids.astype(np.int64)
        x_TE = model.forward(token_ids_T, ranges(starts, counts), self._kernels, guesses)
        outputs = self._sampled(plan, model, x_TE, indptr[1:])
        accepted = [len(output.after_drafts) for output in outputs]
        if guesses and any(accepted):
            model.keep_accepted(self._kernels, accepted)
        for s, sequence in enumerate(plan.sequences):
            if sequence.prompt_logprobs is not None and outputs[s].error is None:
                asked = sequence.prompt_logprobs
                first = indptr[s] + asked.first - sequence.start
                logprobs = self._logprobs(model, x_TE[first:], asked)
                outputs[s] = dataclasses.replace(outputs[s], prompt_logprobs=logprobs)
        for s, pooling in pooling_of(plan):
            pooled = _pooled(model, x_TE[indptr[s + 1] - 1 : indptr[s + 1]], pooling)
            outputs[s] = dataclasses.replace(outputs[s], pooled=pooled)
        return StepResult(outputs)

    def compute_nothing(self) -> None:
        """One token of no request, in the null block."""
        padding = ScheduledSequence(request_id="", start=0, num_tokens=1, sampling=None)
        for tables in self.block_tables:
            tables.indptr[:2] = 0, 1
            tables.indices[0] = tables.first_pages[0] = tables.slot_mapping[0] = 0
            tables.last_page_len[0] = 1
        self.compute(StepPlan((padding,), np.zeros(1, np.int32), 0))

    def _plan(
        self, kernel: PagedAttention, tables: BlockTableBuffers, indptr: npt.NDArray[np.int32]
    ) -> None:
        num_seqs = len(indptr) - 1
        if self._kv.may_have_holes:
            self._kv.before_writes(tables.slot_mapping[: indptr[-1]] // self._kv.block_size)
        kernel.plan(
            self._kv.most_blocks,
            self._kv.block_size,
            indptr,
            tables.indptr[: num_seqs + 1],
            tables.indices[: tables.indptr[num_seqs]],
            tables.last_page_len[:num_seqs],
            tables.slot_mapping[: indptr[-1]],
            tables.first_pages[:num_seqs],
        )

    def _sampled(
        self, plan: StepPlan, model: CpuModel, x_TE: Array, ends: npt.NDArray[np.int32]
    ) -> list[SequenceOutput]:
        """`ends` are where the rows of each sequence in `x_TE` end."""
        inputs = inputs_of(plan)
        rows = [
            row
            for of_sequence, end in zip(inputs, ends, strict=True)
            for row in range(end - len(of_sequence), end)
        ]
        if not rows:
            return outputs_of(inputs, ())
        flat = [*itertools.chain.from_iterable(inputs)]
        return outputs_of(inputs, self._sampler.sample(model.compute_logits(x_TE[rows]), flat))

    def _logprobs(
        self, model: CpuModel, x_TE: Array, asked: PromptLogprobsInput
    ) -> tuple[TokenLogprobs, ...]:
        logprobs: list[TokenLogprobs] = []
        for begin in range(0, len(asked.followers), _LOGPROB_ROWS):
            followers = asked.followers[begin : begin + _LOGPROB_ROWS]
            logits_RV = model.compute_logits(x_TE[begin : begin + len(followers)])
            logprobs += self._sampler.prompt_logprobs(logits_RV, followers, asked.count)
        return tuple(logprobs)


def _pooled(model: CpuModel, x_1E: Array, pooling: Pooling) -> npt.NDArray[np.float32]:
    if pooling.token_ids:
        return model.compute_logits(x_1E)[0, [*pooling.token_ids]]
    return unit(model.final_norm(x_1E)[0].astype(np.float32))


def _guesses(plan: StepPlan) -> list[int]:
    """How many of the last tokens of each sequence are guesses, where any are."""
    drafts = dict(plan.drafts)
    return [len(drafts.get(row, ())) for row in range(len(plan.sequences))] if drafts else []
