"""What the scheduler decided for one step: plain data, all the runner is told.

Letters of shapes here and in the runner: T tokens in the step, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixcache.request import TokenLogprobs
from prefixcache.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """What the sampler needs of a sequence whose next token is due.

    The randomness depends on `seed` and on the position of the new token alone
    (`len(prompt_token_ids) + len(output_token_ids)`), never on the batch. `banned_token_ids` may
    not be chosen in this step.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    banned_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """The part of one sequence that is computed in this step.

    `token_ids` stand at positions `start`, `start + 1`, ... of the sequence; -1 - i stands for the
    i-th token that the step before samples, where that is not known yet. `sampling` is None for a
    chunk of a prompt that does not reach the prompt's end. `prompt_logprobs`, when set, asks for
    the log probabilities of the tokens that *follow* each computed position inside the prompt;
    `next_prompt_token_ids` are those tokens (shorter by one at the prompt's end).
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    sampling: SamplingInput | None
    prompt_logprobs: int | None = None
    next_prompt_token_ids: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decodes first, then chunks of prompts. The order is that of the batch's rows."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """T: tokens computed in this step."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What the runner computed for one `ScheduledSequence`, in the plan's order.

    `token_id` is None where nothing was to be sampled. `error` is set instead of a token when the
    sequence's logits were unusable (NaN), so that one request fails and not the step.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
