"""Choices that grammars are asked about are those that are made among the allowed tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plans import context
from prefixcache.grammar.grammars import Grammars
from prefixcache.grammar.guide import Guide
from prefixcache.grammar.lanes import Lanes, Pace
from prefixcache.grammar.vocabulary import Vocabulary, has_token
from prefixcache.sampling.row_options import SampledRow
from prefixcache.sampling.sampler import Sampler
from prefixcache.sampling_params import SamplingParams
from prefixcache.step_plan import SamplingInput, SequenceOutput
from prefixcache.structured_output import StructuredOutput
from repeatable import bounded
from unit.test_grammar import EOS, PATTERNS, SPECIAL, TOKENS, encode

ALL_TOKENS = (*TOKENS, b"a", b"", b"ab")  # some twice, and one without a text
ids = st.integers(0, len(ALL_TOKENS) - 1)
lists = st.lists(ids, max_size=4).map(tuple)


class Steady(Pace):
    """However long anything takes."""

    @property
    def is_steady(self) -> bool:
        return True

    def observe(self, seconds: float) -> None:
        del seconds


class NoThreads(Lanes):
    def put(self, job: Callable[[], None], pace: Pace) -> None:
        del pace
        job()


@dataclass(frozen=True)
class Answer:
    output: StructuredOutput | None
    params: SamplingParams
    banned: tuple[int, ...]

    def guide(self) -> Guide | None:
        if self.output is None:
            return None
        grammar = GRAMMARS.compile(self.output)
        grammar.pace = Steady()
        return grammar.guide(ignore_eos=self.params.ignore_eos)


GRAMMARS = Grammars(lambda: Vocabulary(ALL_TOKENS, (EOS, SPECIAL), (EOS,), encode))
GRAMMARS._lanes = NoThreads()  # pyright: ignore[reportPrivateUsage]
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0]),
    top_k=st.sampled_from([0, 0, 0, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.dictionaries(ids, st.floats(-20, 20), max_size=2),
    allowed_token_ids=st.none() | st.lists(ids, min_size=12).map(tuple),
    bad_words_token_ids=st.lists(st.lists(ids, min_size=1, max_size=2).map(tuple), max_size=2).map(
        tuple
    ),
    ignore_eos=st.booleans(),
)
outputs = st.builds(
    StructuredOutput,
    st.just("regex"),
    st.sampled_from(PATTERNS),
    st.sampled_from([None, None, "ab", "</a>"]),
)
answers = st.builds(Answer, st.none() | outputs | outputs | outputs, params, lists)


def answers_of(batch: list[Answer], seed: int, num_steps: int, *, waits: bool) -> list[object]:
    """What each step gives each row; without `waits` masks are applied before tokens are chosen."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(len(batch), torch.device("cpu"), waits=waits)
    followed = [answer.guide() for answer in batch]
    tokens: list[list[int]] = [[] for _ in batch]
    steps: list[object] = []
    for _ in range(num_steps):
        logits = torch.randn(len(batch), len(ALL_TOKENS), generator=generator) * 4
        rows = [
            SampledRow(
                f"{r}",
                2 + len(tokens[r]),
                SamplingInput(
                    params=answer.params,
                    seed=r,
                    tokens=context((5, 6), tokens[r]),
                    banned_token_ids=answer.banned if guide is None else (),
                    mask=None if guide is None else guide.mask(answer.banned),
                ),
            )
            for r, (answer, guide) in enumerate(zip(batch, followed, strict=True))
        ]
        sampled = sampler.sample(logits, rows)
        outputs = sampled.outputs(part.numpy() for part in sampled.parts)
        steps.append(outputs)
        for r, output in enumerate(outputs):
            _take(output, tokens[r], followed[r])
    return steps


def _take(output: SequenceOutput, tokens: list[int], guide: Guide | None) -> None:
    assert not output.is_late
    if output.token_id is not None:
        tokens.append(output.token_id)
        if guide is not None:
            guide.push(output.token_id)


@settings(max_examples=bounded(60, 5000), deadline=None)
@given(batch=st.lists(answers, min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_asking_about_choices_changes_none(batch: list[Answer], seed: int) -> None:
    asking, masking = (answers_of(batch, seed, 8, waits=waits) for waits in (True, False))
    assert asking == masking


@settings(max_examples=bounded(40, 5000), deadline=None)
@example(StructuredOutput("regex", "[ab]ab01ab01ab"), (), [0, 0, 0])  # one text alone can follow
@given(output=outputs, unwanted=lists, choices=st.lists(st.integers(0, 99), max_size=10))
def test_what_is_allowed_without_a_mask_is_in_it(
    output: StructuredOutput, unwanted: tuple[int, ...], choices: list[int]
) -> None:
    answer = Answer(output, SamplingParams(), ())
    asked, masked = answer.guide(), answer.guide()
    assert asked is not None
    assert masked is not None
    for choice in choices:
        words = masked.mask(unwanted).words(60)
        assert words is not None
        expected = [i for i in range(len(ALL_TOKENS)) if has_token(words, i)]
        asked.allows(EOS, ())  # so that the token before was followed without a mask
        for token_id in range(len(ALL_TOKENS)):
            track = asked._track  # pyright: ignore[reportPrivateUsage]
            if track._matcher is not None:  # pyright: ignore[reportPrivateUsage]
                track._words = None  # pyright: ignore[reportPrivateUsage]
            if asked.allows(token_id, unwanted):
                assert token_id in expected
            else:
                assert token_id not in expected or token_id in unwanted or not _is_text(token_id)
        token_id = expected[choice % len(expected)]
        if token_id == EOS:
            return
        asked.push(token_id)
        masked.push(token_id)


def _is_text(token_id: int) -> bool:
    return token_id not in (EOS, SPECIAL)
