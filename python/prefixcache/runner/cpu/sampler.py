"""Chooses each sequence's next token on a CPU, in one call for all rows.

Letters of shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache._core import Cpu, SamplerRow
from prefixcache._core import Sampler as RowSampler
from prefixcache.runner.sampled_rows import (
    UNUSABLE,
    KnownMasks,
    has_adjustments,
    has_penalties,
    is_plain_greedy,
    last_tokens,
)
from prefixcache.types.request import TokenLogprobs
from prefixcache.types.step_plan import SamplingInput, SequenceOutput
from prefixcache.types.token_ids import TokenIds

Logits = npt.NDArray[np.float32]
# As good as all: no vocabulary has more tokens.
_MOST_KEPT = 1 << 32
Found = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]


class Sampler:
    """A row's output depends on that row alone; the threads of `cpu` share the rows."""

    def __init__(self, cpu: Cpu) -> None:
        self._sampler = RowSampler(cpu)

    def sample(self, logits_RV: Logits, rows: Sequence[SamplingInput]) -> list[SequenceOutput]:
        """The next token of each row, and its log probabilities where they are asked for.

        The logits are contiguous and left alone. A row without a finite maximum gets an error in
        place of a token, and so does one whose grammar ends; `is_late` says that its mask is.
        """
        if all(map(is_plain_greedy, rows)):
            return [_output(token, None) for token in self._sampler.likeliest(logits_RV)]
        masks = KnownMasks.of(row.mask for row in rows)
        asked = [_options(row, masks.words.get(r)) for r, row in enumerate(rows)]
        outputs = [_output(*row) for row in self._sampler.sample(logits_RV, asked)]
        for r, output in masks.unsampled.items():
            outputs[r] = output
        return outputs

    def prompt_logprobs(
        self, logits_RV: Logits, followers: TokenIds, count: int
    ) -> tuple[TokenLogprobs, ...]:
        """Of the token that follows each row, [R], and of the `count` likeliest ones."""
        rows = self._sampler.logprobs(logits_RV, followers, count)
        return tuple(TokenLogprobs(*of_row) for of_row in rows)


def _output(token: int | None, logprobs: Found | None) -> SequenceOutput:
    if token is None:
        return SequenceOutput(error=UNUSABLE)
    scored = None if logprobs is None else TokenLogprobs(*logprobs)
    return SequenceOutput(token_id=token, logprobs=scored)


def _options(row: SamplingInput, mask: npt.NDArray[np.int32] | None) -> SamplerRow:
    params = row.params
    return SamplerRow(
        0.0 if params.greedy else params.temperature,
        row.seed % 2**64,
        len(row.tokens),
        min_p=params.min_p,
        top_k=min(max(params.top_k, 0), _MOST_KEPT),
        top_p=params.top_p,
        logprobs=params.logprobs,
        **(_adjustments(row, mask) if has_adjustments(row) else {}),
    )


def _adjustments(row: SamplingInput, mask: npt.NDArray[np.int32] | None) -> dict[str, Any]:
    params = row.params
    options: dict[str, Any] = {
        "bias_tokens": [*params.logit_bias],
        "bias": [*params.logit_bias.values()],
        "banned": row.banned_token_ids,
        "allowed": params.allowed_token_ids,
        "bad_words": [token for token, _ in last_tokens(row)],
        "mask": mask,
    }
    if has_penalties(params):
        options["repetition"] = params.repetition_penalty
        options["presence"] = params.presence_penalty
        options["frequency"] = params.frequency_penalty
        options["prompt"] = row.tokens.prompt
        options["answer"] = row.tokens.answer
    return options
