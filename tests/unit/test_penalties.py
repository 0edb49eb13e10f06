"""Bias, bans and penalties, each alone."""

from __future__ import annotations

from typing import Any

import torch

from prefixcache.sampling.penalties import adjust_logits, has_adjustments
from prefixcache.sampling_params import SamplingParams
from prefixcache.step_plan import SamplingInput

LOGITS = torch.tensor([[2.0, -2.0, 1.0, 0.5]])


def adjusted(
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> list[float]:
    row = SamplingInput(
        params=SamplingParams(**params),
        seed=0,
        prompt_token_ids=prompt,
        output_token_ids=output,
        banned_token_ids=banned,
    )
    return adjust_logits(LOGITS, [row])[0].tolist()


def test_nothing_to_do_returns_the_argument_itself() -> None:
    row = SamplingInput(
        params=SamplingParams(), seed=0, prompt_token_ids=(0, 1), output_token_ids=(2,)
    )
    assert not has_adjustments(row)
    assert adjust_logits(LOGITS, [row]) is LOGITS


def test_bias_is_added() -> None:
    assert adjusted(logit_bias={0: -1.0, 3: 4.0}) == [1.0, -2.0, 1.0, 4.5]


def test_banned_tokens_cannot_be_had() -> None:
    assert adjusted(banned=(0, 2), logit_bias={0: 100.0}) == [-torch.inf, -2.0, -torch.inf, 0.5]


def test_repetition_moves_prompt_and_answer_down_whatever_the_sign() -> None:
    assert adjusted(prompt=(0, 0), output=(1,), repetition_penalty=2.0) == [1.0, -4.0, 1.0, 0.5]


def test_presence_counts_once_and_the_prompt_not_at_all() -> None:
    assert adjusted(prompt=(3,), output=(0, 0, 2), presence_penalty=1.0) == [1.0, -2.0, 0.0, 0.5]


def test_frequency_counts_each_occurrence() -> None:
    assert adjusted(prompt=(3,), output=(0, 0, 2), frequency_penalty=0.5) == [1.0, -2.0, 0.5, 0.5]


def test_rows_without_an_answer_are_left_alone() -> None:
    assert adjusted(prompt=(0,), frequency_penalty=0.5, presence_penalty=1.0) == LOGITS[0].tolist()
