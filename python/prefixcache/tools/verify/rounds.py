"""The rounds: how each question is asked, and which answer it must get."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from prefixcache.tools.openai_api import side_by_side
from prefixcache.tools.verify.client import Asker
from prefixcache.tools.verify.comparison import (
    Comparison,
    ServerAnswer,
    compare,
    hit_mostly,
    reported_hit,
)
from prefixcache.tools.verify.cooling import Cooling
from prefixcache.tools.verify.questions import Question

_Ask = Callable[[Question], Coroutine[Any, Any, ServerAnswer]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of a round: its answer, and the one that it must equal.

    `expected` is None in the round that the others are compared with. `hit` says whether most of
    the prompt hit, None where that is unknown.
    """

    answer: ServerAnswer
    expected: ServerAnswer | None
    hit: bool | None


@dataclass(frozen=True, slots=True)
class Round:
    """All questions asked in one way."""

    name: str
    asked: tuple[Asked, ...]

    @property
    def ttft(self) -> float:
        """Median, in seconds."""
        return median(pair.answer.ttft for pair in self.asked)

    @property
    def num_hits(self) -> int | None:
        """Answers for which most of the prompt hit; None where that is unknown."""
        hits = [pair.hit for pair in self.asked if pair.hit is not None]
        return sum(hits) if hits else None

    @property
    def reports_hits(self) -> bool:
        """Whether the server reported how many tokens hit."""
        return all(pair.answer.cached_tokens is not None for pair in self.asked)

    def comparisons(self, tolerance: float) -> list[Comparison]:
        """Of each answer with the expected one."""
        return [
            compare(pair.expected, pair.answer, tolerance)
            for pair in self.asked
            if pair.expected is not None
        ]


class Plan:
    """Asks `questions` in all ways that the server allows.

    `spare` are as many others: they replace the questions where the same text cannot be asked
    without a hit a second time.
    """

    def __init__(
        self,
        asker: Asker,
        questions: Sequence[Question],
        spare: Sequence[Question],
        cooling: Cooling | None,
    ) -> None:
        self._asker = asker
        self._questions = questions
        self._spare = spare
        self._cooling = cooling
        # So that a cold question does not hit even what a template begins all prompts with.
        self._fields = {question: cooling.fields() if cooling else {} for question in questions}

    async def rounds(self) -> AsyncIterator[Round]:
        """One after the other. Raises `StreamError`."""
        alone = await self._cold_and_warm()
        yield alone.round("cold", alone.cold, [None] * len(alone.cold))
        yield alone.round("warm", alone.warm, alone.cold)
        if self._cooling is not None:
            yield alone.round("cold again", await self._one_by_one(self._cool), alone.cold)
        yield _concurrent("concurrent", await self._together(self._ask), alone.cold)
        if self._cooling is None:
            yield alone.round("chunked", *await self._chunked_first())
            return
        if not self._cooling.asks_other:
            answers = await self._together(self._cool)
            yield _concurrent("concurrent, cold", answers, alone.cold)
        yield alone.round("chunked", await self._one_by_one(self._in_pieces), alone.cold)
        yield await self._next_turns(alone.warm)

    async def _cold_and_warm(self) -> _Alone:
        """Each warm right after cold: a server may remember its last prompt alone."""
        cold, warm = list[ServerAnswer](), list[ServerAnswer]()
        for question in self._questions:
            cold.append(await self._ask(question))
            warm.append(await self._ask(question))
        return _Alone(cold, warm)

    async def _one_by_one(self, send: _Ask) -> list[ServerAnswer]:
        return [await send(question) for question in self._questions]

    async def _together(self, send: _Ask) -> list[ServerAnswer]:
        return await side_by_side([send(question) for question in self._questions])

    async def _ask(self, question: Question) -> ServerAnswer:
        return await self._asker.ask(question, self._fields[question])

    async def _cool(self, question: Question) -> ServerAnswer:
        return await self._asker.ask(question, await self._cooled())

    async def _cooled(self) -> dict[str, object]:
        """Fields of requests that hit nothing but what each other left."""
        if self._cooling is None:
            return {}
        if self._cooling.asks_other:
            await self._asker.ask(self._spare[0], max_tokens=1)
        return self._cooling.fields()

    async def _in_pieces(self, question: Question) -> ServerAnswer:
        """Its beginnings first: what each computes goes on from a hit."""
        fields = await self._cooled()
        *pieces, full = question.pieces()
        for piece in pieces:
            await self._asker.ask(piece, fields, max_tokens=1)
        return await self._asker.ask(full, fields)

    async def _chunked_first(self) -> tuple[list[ServerAnswer], list[ServerAnswer]]:
        """New questions in pieces, and the same asked again: hits of other lengths."""
        answers, again = list[ServerAnswer](), list[ServerAnswer]()
        for question in self._spare:
            answers.append(await self._in_pieces(question))
            again.append(await self._asker.ask(question))
        return answers, again

    async def _next_turns(self, answers: Sequence[ServerAnswer]) -> Round:
        """A second turn, whose prompt hits the first with its answer, and the same cold."""
        hit, cold = list[ServerAnswer](), list[ServerAnswer]()
        for question, answer in zip(self._questions, answers, strict=True):
            turn = question.next_turn(answer.text)
            await self._ask(question)
            hit.append(await self._asker.ask(turn, self._fields[question]))
            cold.append(await self._cool(turn))
        return _Alone(cold, hit).round("next turn", hit, cold)


@dataclass(frozen=True, slots=True)
class _Alone:
    """What the questions got alone, with no hit and with a whole one: what TTFT is judged by."""

    cold: Sequence[ServerAnswer]
    warm: Sequence[ServerAnswer]

    def round(
        self, name: str, answers: Sequence[ServerAnswer], expected: Sequence[ServerAnswer | None]
    ) -> Round:
        """Answers to questions asked one by one."""
        hits = map(hit_mostly, answers, self.cold, self.warm)
        return Round(name, tuple(map(Asked, answers, expected, hits)))


def _concurrent(
    name: str, answers: Sequence[ServerAnswer], expected: Sequence[ServerAnswer]
) -> Round:
    """TTFT holds the waiting for others and tells no hits."""
    return Round(name, tuple(map(Asked, answers, expected, map(reported_hit, answers))))
