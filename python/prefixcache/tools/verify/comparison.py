"""Answers with what the server says of them: how two differ, and whether one hit the cache.

A server that does not report its hits is judged by the TTFT of the same question cold and warm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from math import sqrt
from typing import Literal

_SHOWN = 40
# Of the TTFT without a hit: an answer that saves less did not hit.
_MOST_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of an answer, its log probability, and those of the likeliest, highest first."""

    token: str
    logprob: float
    top: tuple[float, ...] = ()

    def distance(self, other: TokenScore) -> float:
        """The largest difference of two log probabilities at the same rank.

        Ranks rather than names: two tokens that are equally likely may change places.
        """
        mine, theirs = (self.logprob, *self.top), (other.logprob, *other.top)
        pairs = zip_longest(mine, theirs, fillvalue=float("-inf"))
        return max(0.0 if a == b else abs(a - b) for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswer:
    """What one request brought.

    `ttft` counts seconds. `scores` is empty where the server gives no log probabilities;
    `prompt_tokens` and `cached_tokens` are None where it does not tell them.
    """

    text: str
    scores: tuple[TokenScore, ...] = ()
    finish_reason: str | None = None
    ttft: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


Change = Literal["nothing", "logprobs", "answer"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How an answer differs from the expected one, and where it first does.

    `position` counts tokens, or characters where there are no log probabilities; `expected` and
    `got` show what stands there. `largest` is the largest difference of a log probability among
    the tokens that are the same.
    """

    change: Change
    position: int = 0
    expected: str = ""
    got: str = ""
    largest: float = 0.0


def compare(expected: ServerAnswer, got: ServerAnswer, tolerance: float = 0.0) -> Comparison:
    """Token by token; log probabilities behind another token mean nothing and are left out."""
    if not (expected.scores and got.scores):
        return _compare_texts(expected, got)
    largest, scores = 0.0, Comparison("nothing")
    for position, (right, given) in enumerate(zip_longest(expected.scores, got.scores)):
        if right is None or given is None or right.token != given.token:
            tokens = _token(right, expected), _token(given, got)
            return Comparison("answer", position, *tokens, largest)
        distance = right.distance(given)
        largest = max(largest, distance)
        if scores.change == "nothing" and distance > tolerance:
            scores = Comparison("logprobs", position, _shown(right), _shown(given))
    texts = _compare_texts(expected, got)
    return replace(scores if texts.change == "nothing" else texts, largest=largest)


def _compare_texts(expected: ServerAnswer, got: ServerAnswer) -> Comparison:
    """Log probabilities that only one of them has are a change too."""
    if (expected.text, expected.finish_reason) != (got.text, got.finish_reason):
        return Comparison("answer", *_where_texts_part(expected, got))
    if bool(expected.scores) != bool(got.scores):
        counts = [f"{len(answer.scores)} log probabilities" for answer in (expected, got)]
        return Comparison("logprobs", 0, counts[0], counts[1])
    return Comparison("nothing")


def _token(score: TokenScore | None, answer: ServerAnswer) -> str:
    return f"its end, {answer.finish_reason}" if score is None else repr(score.token)


def _shown(score: TokenScore) -> str:
    return f"{score.token!r} {score.logprob:.9g}"


def _where_texts_part(expected: ServerAnswer, got: ServerAnswer) -> tuple[int, str, str]:
    pairs = enumerate(zip(expected.text, got.text, strict=False))
    shorter = min(len(expected.text), len(got.text))
    start = next((index for index, (a, b) in pairs if a != b), shorter)
    return start, _rest(expected, start), _rest(got, start)


def _rest(answer: ServerAnswer, start: int) -> str:
    return f"{answer.text[start : start + _SHOWN]!r}, ended by {answer.finish_reason}"


def reported_hit(answer: ServerAnswer) -> bool | None:
    """Whether more than half of the prompt hit; None where the server does not tell."""
    if answer.cached_tokens is None or not answer.prompt_tokens:
        return None
    return answer.cached_tokens * 2 > answer.prompt_tokens


def hit_mostly(answer: ServerAnswer, cold: ServerAnswer, warm: ServerAnswer) -> bool:
    """Whether more than half of the prompt hit: then TTFT is nearer to that of a whole hit."""
    reported = reported_hit(answer)
    if reported is not None:
        return reported
    return _shows_hits(cold, warm) and answer.ttft < (cold.ttft + warm.ttft) / 2


def missed(answer: ServerAnswer, cold: ServerAnswer, warm: ServerAnswer) -> bool:
    """Whether it did not hit at all, as well as a single TTFT on a busy machine tells it."""
    reported = reported_hit(answer)
    return not reported if reported is not None else answer.ttft > sqrt(cold.ttft * warm.ttft)


def _shows_hits(cold: ServerAnswer, warm: ServerAnswer) -> bool:
    return warm.ttft < cold.ttft * _MOST_SHARE
