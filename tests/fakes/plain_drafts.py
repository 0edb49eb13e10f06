"""Guesses at next tokens in slow, obvious code, and guesses that are as wrong as can be."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixcache.scheduler.drafts import Drafter, _Draft, _Kind
from prefixcache.scheduler.state import RequestState
from prefixcache.scheduler.step_time import RowTimes

MOST_DRAFTS = 7


@dataclass
class PlainText:
    """One request's text. Of the ends that were seen before the longest counts, then the last."""

    index: PlainDraftIndex
    scope: bytes
    shares: bool
    tokens: list[int] = field(default_factory=list)
    is_closed: bool = False

    def append(self, tokens: Any) -> None:
        assert not self.is_closed
        self.tokens += map(int, tokens)

    def draft(self, max_tokens: int) -> tuple[list[int], int, str]:
        assert not self.is_closed
        best: tuple[list[int], int, str] = ([], 0, "prompt")
        for text in self.index.texts:
            if text is self or (self.shares and text.shares and text.scope == self.scope):
                found = longest_match(text.tokens, self.tokens)
                if found is not None and found[0] > best[1]:
                    length, end = found
                    source = "prompt" if text is self else "cache"
                    best = text.tokens[end : end + max_tokens], length, source
        return best

    def close(self) -> None:
        self.is_closed = True
        if not self.shares:
            self.index.texts.remove(self)


class PlainDraftIndex:
    """As `_core.DraftIndex` without a bound."""

    def __init__(self, max_tokens: int = 1 << 20) -> None:
        self.texts: list[PlainText] = []

    def stream(self, scope: bytes, shares: bool) -> PlainText:
        self.texts.append(PlainText(self, scope, shares))
        return self.texts[-1]


def longest_match(text: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """Length and end of the last one of the longest parts of `text` that `wanted` ends in.

    A token must follow it.
    """
    best: tuple[int, int] | None = None
    for end in range(1, len(text)):
        length = 0
        while length < min(end, len(wanted), 64) and text[end - 1 - length] == wanted[-1 - length]:
            length += 1
        if length and (best is None or length >= best[0]):
            best = length, end
    return best


def plain_drafter(*, shares: bool = True, most: int = MOST_DRAFTS) -> Drafter:
    return Drafter(PlainDraftIndex(), RowTimes(), shares=shares, most=most)


class HostileDrafter(Drafter):
    """Guesses of all kinds, whatever they cost: right, wrong, both, and past the answer's end.

    `answers` are prompt and answer by request id.
    """

    def __init__(
        self,
        seed: int,
        answers: Mapping[str, Sequence[int]],
        vocab_size: int,
        *,
        most: int = MOST_DRAFTS,
    ) -> None:
        super().__init__(PlainDraftIndex(), RowTimes(), shares=True, most=most)
        self._choose = random.Random(seed)
        self._answers = answers
        self._vocab_size = vocab_size

    def _draft(self, state: RequestState, room: int) -> _Draft | None:
        most = min(self._most, room, state.max_num_tokens - state.num_tokens - 1)
        if most <= 0 or not state.may_be_drafted:
            return None
        self._text(state)
        wrong = [self._choose.randrange(self._vocab_size) for _ in range(most)]
        right = list(self._answers[state.request_id][len(state.tokens) :])[:most]
        cut = self._choose.choice([0, most, most, self._choose.randrange(most + 1)])
        tokens = (right[:cut] + wrong)[: self._choose.randint(1, most)]
        return _Draft(state, tokens, _Kind(b"", "prompt", 1), 0.5, count=len(tokens))

    def _share_out(self, drafts: Sequence[_Draft], num_rows: int, room: int) -> None:
        left = room
        for draft in drafts:
            draft.count = min(draft.count, left)
            left -= draft.count
