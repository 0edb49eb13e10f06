"""Bias, bans and penalties, each alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from prefixcache.runner.sampled_rows import has_adjustments, has_penalties
from prefixcache.runner.torch.sampling.penalties import TokenCounts, adjust_logits
from prefixcache.runner.torch.sampling.row_options import (
    SampledRow,
    add_additions,
    add_penalties,
)
from prefixcache.runner.torch.sampling.upload import Upload
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput
from support.plans import context

CPU = torch.device("cpu")
LOGITS = torch.tensor([[2.0, -2.0, 1.0, 0.5]])


def row_of(
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    name: str = "a",
    **params: Any,
) -> SampledRow:
    sampling = SamplingInput(
        params=SamplingParams(**params),
        seed=0,
        tokens=context(prompt, output),
        banned_token_ids=banned,
    )
    return SampledRow(name, len(prompt) + len(output), sampling)


def adjust(logits: torch.Tensor, rows: list[SampledRow], counts: TokenCounts) -> torch.Tensor:
    penalized = [r for r, row in enumerate(rows) if has_penalties(row.params)]
    contexts = counts.rows_of([rows[r] for r in penalized], logits.shape[1])
    upload = Upload()
    additions = add_additions(upload, rows)
    penalties = add_penalties(upload, rows, penalized, contexts)
    sent = upload.send(CPU)
    return adjust_logits(logits, additions(sent), penalties(sent), counts)


def adjusted(*args: Any, **kwargs: Any) -> list[float]:
    rows = [row_of(*args, **kwargs)]
    return adjust(LOGITS, rows, TokenCounts(1, CPU))[0].tolist()


def test_nothing_to_do_returns_the_argument_itself() -> None:
    row = row_of((0, 1), (2,))
    assert not has_adjustments(row.sampling)
    assert adjust(LOGITS, [row], TokenCounts(1, CPU)) is LOGITS


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


def test_rows_with_other_penalties_stand_side_by_side() -> None:
    options = [{"repetition_penalty": 2.0}, {"frequency_penalty": 0.5}, {"presence_penalty": -1.0}]
    rows = [row_of((3,), (0, 0, 3), name=f"{r}", **given) for r, given in enumerate(options)]
    alone = [adjusted((3,), (0, 0, 3), **given) for given in options]
    assert adjust(LOGITS.repeat(3, 1), rows, TokenCounts(3, CPU)).tolist() == alone


def grown(counts: TokenCounts, names: str, tokens: list[list[int]]) -> torch.Tensor:
    """Counts of answers that grow by a token a step, none of them read by the host."""
    for step, of_step in enumerate(tokens):
        rows = [
            dataclasses.replace(row_of((1, 2), name=name, presence_penalty=1.0), position=2 + step)
            for name in names
        ]
        contexts = torch.tensor(counts.rows_of(rows, 6))
        counts.add(contexts, torch.tensor(of_step))
    return counts.of(contexts)


def test_tokens_are_counted_as_they_are_sampled() -> None:
    counts = grown(TokenCounts(2, CPU), "ab", [[5, 0], [5, 2], [1, 2]])
    assert counts.tolist() == [[0, 3, 1, 0, 0, 4], [2, 1, 5, 0, 0, 0]]


def test_an_answer_that_restarts_is_counted_again() -> None:
    counts = TokenCounts(2, CPU)
    grown(counts, "a", [[5], [4]])
    assert grown(counts, "a", [[3]]).tolist() == [[0, 1, 1, 2, 0, 0]]


def test_contexts_that_were_not_used_for_longest_make_room_and_come_back() -> None:
    counts = TokenCounts(5, CPU)
    for name in "abcdefg":
        grown(counts, name, [[0]])
    resumed = row_of((1, 2), (0,), name="a", presence_penalty=1.0)
    (context,) = counts.rows_of([resumed], 6)
    assert counts.of(torch.tensor([context])).tolist() == [[2, 1, 1, 0, 0, 0]]
    whole = [row_of((1,), name=name, presence_penalty=1.0) for name in "vwxyz"]
    assert sorted(counts.rows_of(whole, 6)) == [0, 1, 2, 3, 4]


def test_a_context_of_this_step_never_makes_room_for_another() -> None:
    counts = TokenCounts(2, CPU)
    first = grown(counts, "ab", [[5, 4], [5, 4]])
    pending = dataclasses.replace(row_of((1, 2), name="a", presence_penalty=1.0), position=4)
    contexts = counts.rows_of([row_of((0,), name="c", presence_penalty=1.0), pending], 6)
    assert counts.of(torch.tensor(contexts[1:])).tolist() == first[:1].tolist()
