"""The least runner behind the boundary of `runner/base.py`, for one group of full attention.

Each slot of its KV holds the token that was written there, and the next token is a function of all
that a sequence reads through its block table.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.runner.sampled_rows import with_accepted
from prefixcache.types.request import TokenLogprobs
from prefixcache.types.step_plan import (
    SamplingInput,
    ScheduledSequence,
    SequenceOutput,
    StepPlan,
    StepResult,
)

VOCAB_SIZE = 97


def next_token(history: Sequence[int], vocab_size: int = VOCAB_SIZE) -> int:
    return zlib.crc32(np.asarray(history, dtype=np.int64).tobytes()) % vocab_size


@dataclass(frozen=True)
class KnownStep:
    """A step of a runner that computes at once."""

    result: StepResult
    is_known: bool = True


class PlainRunner:
    runs_ahead = False

    def __init__(self, num_blocks: int, block_size: int, **sizes: int) -> None:
        self._kv = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.block_tables = (BlockTableBuffers.of_size(**sizes),)
        self.broken_tokens: set[int] = set()

    def submit(self, plan: StepPlan) -> KnownStep:
        return KnownStep(StepResult(self.execute(plan)))

    def results(self, step: KnownStep) -> StepResult:
        return step.result

    def run_empty_step(self) -> None: ...

    def execute(self, plan: StepPlan) -> list[SequenceOutput]:
        slots = self.block_tables[0].slot_mapping[: plan.num_tokens]
        self._kv.reshape(-1)[slots] = plan.token_ids
        return self._outputs(plan)

    def _outputs(self, plan: StepPlan) -> list[SequenceOutput]:
        """With drafts a row has an output after its own token and one after each of them."""
        drafts = dict(plan.drafts)
        outputs: list[SequenceOutput] = []
        for row, sequence in enumerate(plan.sequences):
            after, end = drafts.get(row, ()), sequence.start + sequence.num_tokens
            known = [
                self._output(row, sequence, sampling, end - back)
                for back, sampling in zip(
                    range(len(after), -1, -1), (sequence.sampling, *after), strict=True
                )
            ]
            outputs.append(with_accepted(known[0], after, known[1:]))
        return outputs

    def _seen(self, kv: npt.NDArray[np.int64], row: int, end: int) -> list[int]:
        """What the model sees at all that computes the position before `end`."""
        table = self.block_tables[0]
        pages = table.indices[table.indptr[row] : table.indptr[row + 1]]
        return kv[pages].reshape(-1)[:end].tolist()

    def _output(
        self, row: int, sequence: ScheduledSequence, sampling: SamplingInput | None, end: int
    ) -> SequenceOutput:
        history = self._seen(self._kv, row, end)
        if sampling is None:
            token = None
        elif self.broken_tokens & set(history):
            return SequenceOutput(error="broken")
        else:
            token = next_token(history)
            while token in sampling.banned_token_ids:
                token = (token + 1) % VOCAB_SIZE
        return SequenceOutput(token_id=token, prompt_logprobs=self._prompt_logprobs(row, sequence))

    def _prompt_logprobs(self, row: int, sequence: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
        wanted = sequence.prompt_logprobs
        return (
            tuple(
                TokenLogprobs(token, -float(next_token(self._seen(self._kv, row, end))), 1)
                for end, token in enumerate(wanted.followers.tolist(), wanted.first + 1)
            )
            if wanted
            else ()
        )
