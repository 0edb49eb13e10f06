"""What the scheduler decided for one step: plain data, all that the runner gets.

Letters of shapes here and in the runner: T tokens in the step, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefixcache.types.request import ErrorCode, TokenLogprobs
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenBuffer, TokenIds


class TokenMask(Protocol):
    """Which tokens a grammar lets follow, worked out while the model computes."""

    def words(self, seconds: float) -> npt.NDArray[np.int32] | None:
        """One bit a token, bit i of word w being token 32 * w + i; valid until the next token.

        Waits at most `seconds`: None when it is not known then. Raises `GrammarError` when
        the answer cannot follow its grammar any further.
        """
        ...


@dataclass(frozen=True, slots=True)
class SuppressedTokens:
    """Ids that a model's authors want never sampled: `first` as an answer's first token."""

    always: tuple[int, ...] = ()
    first: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, always: Iterable[int], at_begin: Iterable[int], vocab_size: int
    ) -> SuppressedTokens:
        """Without those that the vocabulary lacks. `at_begin` come on top of `always`."""
        kept = tuple(sorted({i for i in always if 0 <= i < vocab_size}))
        begin = {i for i in at_begin if 0 <= i < vocab_size}
        return cls(kept, tuple(sorted(begin.union(kept))))


NOTHING_SUPPRESSED = SuppressedTokens()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """What the sampler needs of a sequence whose next token is due.

    The randomness depends on `seed` and on the position of the new token alone, never on the batch.
    `tokens` are those that are known before it; `banned_token_ids` may not be chosen in this step,
    and those that `mask` leaves out neither.
    """

    params: SamplingParams
    seed: int
    tokens: TokenBuffer
    banned_token_ids: Sequence[int] = ()
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsInput:
    """Asks for log probabilities of the tokens that *follow* a chunk's positions in the prompt.

    There is no such token at the prompt's end. The first is that of position `first` of the
    sequence. `count` likeliest tokens come with each.
    """

    followers: TokenIds
    count: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """The part of one sequence that is computed in this step.

    Its `num_tokens` stand at positions `start`, `start + 1`, ... of the sequence. `sampling` is
    None for a chunk of a prompt that does not reach the prompt's end.
    """

    request_id: str
    start: int
    num_tokens: int
    sampling: SamplingInput | None
    prompt_logprobs: PromptLogprobsInput | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decodes first, then chunks of prompts. The order is that of the batch's rows.

    `token_ids` [T] are the tokens of the sequences side by side; -1 - i stands for the i-th token
    that the step before samples, where that is not known yet. The first `num_decodes` sequences
    extend an answer by one token.

    `drafts` are pairs (row, inputs), the rows ascending: as many of the last tokens of that
    sequence, a decode, are guesses as there are inputs, and a token is sampled after each of them
    as well as before the first. An input's tokens end in the guess that it follows.
    """

    sequences: tuple[ScheduledSequence, ...]
    token_ids: TokenIds
    num_decodes: int
    drafts: Sequence[tuple[int, Sequence[SamplingInput]]] = ()

    @property
    def num_tokens(self) -> int:
        """T: tokens computed in this step."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What the runner computed for one `ScheduledSequence`, in the plan's order.

    `token_id` is None where nothing was to be sampled. `error` is set instead of a token when the
    sequence's logits were unusable (NaN), so that one request fails and not the step; `error_code`
    is as in `RequestOutput`. `is_late`
    says that nothing was sampled since the mask was not known in time: the sequence's last token is
    to be computed once more. `after_drafts` are the outputs after the first drafts, as many as were
    what had been sampled before them; each of them has a token. `pooled` is what the `pooling` of
    the request's options asks for.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    error_code: ErrorCode | None = None
    is_late: bool = False
    after_drafts: tuple[SequenceOutput, ...] = ()
    pooled: npt.NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def token_ids(self) -> list[int]:
        """All that was sampled and counts, in order."""
        first = [] if self.token_id is None else [self.token_id]
        return first + [
            output.token_id for output in self.after_drafts if output.token_id is not None
        ]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step: one output for each sequence of its plan, in order."""

    outputs: Sequence[SequenceOutput]


class InFlightStep(Protocol):
    """A step that a runner has taken; its `results` are still to be read."""

    @property
    def is_known(self) -> bool:
        """Whether its results need not be waited for.

        Otherwise the next step may be submitted before, with this one's tokens named by their
        places.
        """
        ...
