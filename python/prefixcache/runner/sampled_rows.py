"""What rows of logits ask of a sampler, on whatever device it runs."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.exceptions import GrammarError
from prefixcache.types.pooling import Pooling
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput, SequenceOutput, StepPlan, TokenMask

UNUSABLE = "The model's logits are not finite numbers."

ANY = -2
"""In place of a token that must come before: whatever it is, the ban holds."""

# Masks are most often known before the logits are. What is not known soon after is not waited for,
# so that the other rows of the step go on.
_LONGEST_WAIT = 5e-3
_NOTHING = SequenceOutput()


def is_plain_greedy(row: SamplingInput) -> bool:
    """Whether the row asks for nothing but the likeliest token of its logits."""
    return row.params.greedy and row.params.logprobs is None and not has_adjustments(row)


def has_adjustments(row: SamplingInput) -> bool:
    """Whether bias, bans, allowed tokens, a mask or penalties change the row's logits."""
    params = row.params
    return bool(
        params.logit_bias
        or row.banned_token_ids
        or row.mask is not None
        or params.bad_words_token_ids
        or params.allowed_token_ids
        or has_penalties(params)
    )


def has_penalties(params: SamplingParams) -> bool:
    """Whether a presence, frequency or repetition penalty is set."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def last_tokens(row: SamplingInput, unread: int = 0) -> list[tuple[int, int]]:
    """Last tokens of bad words whose other tokens the answer ends in, as far as that is known.

    Each with the token that must come before it, where the host does not know that one: with
    `unread` 1 one token, not read yet, follows those of the row.
    """
    words = row.params.bad_words_token_ids
    answer = row.tokens.answer[-max(map(len, words), default=1) :].tolist()
    pairs: list[tuple[int, int]] = []
    for word in words:
        beginning = word[: -1 - unread]
        if len(word) == 1:
            pairs.append((word[0], ANY))
        elif (
            len(beginning) <= len(answer)
            and tuple(answer[len(answer) - len(beginning) :]) == beginning
        ):
            pairs.append((word[-1], word[-2] if unread else ANY))
    return pairs


def inputs_of(plan: StepPlan) -> list[Sequence[SamplingInput]]:
    """What is sampled of each sequence, in order: its next token, and one after each guess."""
    drafts = dict(plan.drafts)
    return [
        () if sequence.sampling is None else (sequence.sampling, *drafts.get(s, ()))
        for s, sequence in enumerate(plan.sequences)
    ]


def pooling_of(plan: StepPlan) -> Iterator[tuple[int, Pooling]]:
    """The places in the plan of sequences whose last row is pooled, and how."""
    for place, sequence in enumerate(plan.sequences):
        if sequence.sampling is not None and sequence.sampling.params.pooling is not None:
            yield place, sequence.sampling.params.pooling


def outputs_of(
    inputs: Iterable[Sequence[SamplingInput]], sampled: Iterable[SequenceOutput]
) -> list[SequenceOutput]:
    """One output for each sequence, an empty one where nothing was due, of those of all `inputs`.

    These are as `inputs_of` gives them.
    """
    rest = iter(sampled)
    outputs: list[SequenceOutput] = []
    for of_sequence in inputs:
        first, *after = itertools.islice(rest, len(of_sequence)) if of_sequence else (_NOTHING,)
        outputs.append(with_accepted(first, of_sequence[1:], after))
    return outputs


def with_accepted(
    first: SequenceOutput, drafts: Sequence[SamplingInput], after: Sequence[SequenceOutput]
) -> SequenceOutput:
    """The output of a sequence with drafts, of what was sampled before and after each of them.

    A draft is accepted where it is what was sampled before it. An error, or a mask that came late,
    ends what is: the next step meets it again without the drafts before it.
    """
    accepted: list[SequenceOutput] = []
    before = first
    for draft, output in zip(drafts, after, strict=True):
        is_right = before.token_id == draft.tokens.at(len(draft.tokens) - 1)
        if not is_right or output.token_id is None:
            break
        accepted.append(output)
        before = output
    return dataclasses.replace(first, after_drafts=tuple(accepted)) if accepted else first


@dataclass(frozen=True, slots=True)
class KnownMasks:
    """Grammars' masks of a step, by row: int32 words, a bit a token.

    `unsampled` are the outputs of rows whose mask is not known.
    """

    words: dict[int, npt.NDArray[np.int32]]
    unsampled: dict[int, SequenceOutput]

    @classmethod
    def of(cls, masks: Iterable[TokenMask | None]) -> KnownMasks:
        """Waits for the masks of the rows, all together no longer than `_LONGEST_WAIT`."""
        until = time.monotonic() + _LONGEST_WAIT
        step_masks = cls({}, {})
        for r, mask in enumerate(masks):
            if mask is None:
                continue
            try:
                words = mask.words(until - time.monotonic())
            except GrammarError as error:
                step_masks.unsampled[r] = SequenceOutput(
                    error=str(error), error_code="grammar_limit"
                )
                continue
            if words is None:
                step_masks.unsampled[r] = SequenceOutput(is_late=True)
            else:
                step_masks.words[r] = words
        return step_masks
