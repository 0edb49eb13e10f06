"""Guesses at the next tokens of answers, and how many of them a step should check.

A step reads all weights for each row of tokens alike, so a few more rows cost little, and where the
tokens after the next one are guessed several of them come of one step. A guess is taken from text
that was seen before (prompt lookup: Saxena, 2023; suffix decoding: Oliaro et al., 2024). It never
changes an answer: only what is sampled counts, and a guess says which rows are worth computing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from prefixcache._core import DraftIndex, DraftStream
from prefixcache.metrics import DraftCounts
from prefixcache.scheduler.budget import Chunk
from prefixcache.scheduler.state import RequestState
from prefixcache.scheduler.step_time import RowTimes
from prefixcache.types.request import Request
from prefixcache.types.step_plan import StepPlan

_LEAST_GAIN = 1.02
"""How many times the tokens a second must grow, so that noise in the times decides nothing."""
_MEMORY = 0.98
"""Weight of what became of an earlier guess, relative to the next one of its kind."""
_TRUST = 4.0
"""Guesses of a request after which its own record counts as much as that of all requests."""
_MOST_RECORDS = 4096
_LINK = 8
"""Tokens of the prompt's end that lead to the text that a client predicts."""

# Rows that guesses may be wrong in: at most 0.5 % of all where they always are. Kinds of guesses
# that were not right yet share a credit too, as clients may make any number of kinds.
_FIRST_CREDIT = 8.0
_MOST_CREDIT = 64.0
_CREDIT_OF_CHANCE = 0.003
_SHARED_CREDIT_OF_CHANCE = 0.002
_CREDIT_OF_ACCEPTED = 16.0


@dataclass(slots=True)
class _Record:
    """How many guesses were tried and were right, the last ones counting most.

    Of a kind of guesses `credit` is how many may be wrong yet: those that are right earn it, and so
    does each chance, as seldom as a kind that was always wrong is to be tried again.
    """

    tried: float
    right: float
    credit: float = _FIRST_CREDIT

    @property
    def is_proven(self) -> bool:
        """Whether the kind has credit of guesses that were right."""
        return self.credit > _CREDIT_OF_ACCEPTED

    def earn(self, credit: float) -> None:
        self.credit = min(self.credit + credit, _MOST_CREDIT)

    def add(self, tried: int, right: int) -> None:
        self.tried = self.tried * _MEMORY + tried
        self.right = self.right * _MEMORY + right


@dataclass(slots=True)
class _Text:
    """What is kept of one request: its text, and what became of its guesses."""

    scope: bytes
    stream: DraftStream
    num_tokens: int = 0
    record: _Record = field(default_factory=lambda: _Record(0.0, 0.0))


class _Kind(NamedTuple):
    """Guesses that are about as good: of one scope, so that no one spoils those of others."""

    scope: bytes
    source: str
    bits: int
    """Of the length of the match."""


@dataclass(slots=True)
class _Draft:
    """The guesses for one request, and which share of such guesses was right."""

    state: RequestState
    tokens: list[int]
    kind: _Kind
    share: float
    count: int = 0


class Drafter:
    """Chooses the guesses of a step out of the texts of `index`, at most `most` for a request.

    With `shares` they come from other requests of the same scope too. `rows` learns what rows cost.
    """

    allows_ahead = False
    """Whether a step may be planned while its predecessor runs: guesses follow known tokens."""

    def __init__(self, index: DraftIndex, rows: RowTimes, *, shares: bool, most: int) -> None:
        self._index = index
        self.rows = rows
        self._shares = shares
        self._most = most
        self._texts: dict[str, _Text] = {}
        self._records: dict[_Kind, _Record] = {}
        self._unproven = _Record(0.0, 0.0, credit=_MOST_CREDIT)
        self._planned: dict[str, _Draft] = {}
        self._num_drafts = 0
        self._num_drafted = Counter[str](prompt=0, **({"cache": 0} if shares else {}))
        self._num_accepted = self._num_drafted.copy()

    def propose(
        self, chunks: Sequence[Chunk], room: int, allocate: Callable[[RequestState, int], int]
    ) -> None:
        """Lets the decodes of a step compute guesses too, at most `room` tokens.

        `allocate` says for how many of a number of guesses a request has slots.
        """
        decodes = (chunk.state for chunk in chunks if chunk.is_decode and room)
        drafts = [draft for state in decodes if (draft := self._draft(state, room))]
        self._share_out(drafts, sum(chunk.count for chunk in chunks), room)
        for draft in drafts:
            if draft.count:
                draft.count = allocate(draft.state, draft.count)
        self._planned = {draft.state.request_id: draft for draft in drafts if draft.count}
        for chunk in chunks:
            if (draft := self._planned.get(chunk.state.request_id)) is not None:
                chunk.drafts = draft.tokens[: draft.count]

    def observe(self, accepted: Mapping[str, int]) -> None:
        """Learns how many guesses of each request of a step were right."""
        planned, self._planned = self._planned, {}
        for request_id, count in accepted.items():
            if (draft := planned.get(request_id)) is not None:
                self._learn(draft, count)

    def _learn(self, draft: _Draft, num_accepted: int) -> None:
        source = draft.kind.source
        self._num_drafts += 1
        self._num_drafted[source] += draft.count
        self._num_accepted[source] += num_accepted
        tried = min(num_accepted + 1, draft.count)
        of_kind = self._record(draft.kind)
        of_kind.add(tried, num_accepted)
        earned = num_accepted * _CREDIT_OF_ACCEPTED - (draft.count - num_accepted)
        if not of_kind.is_proven:
            self._unproven.earn(earned)
        of_kind.earn(earned)
        self._texts[draft.state.request_id].record.add(tried, num_accepted)

    def observe_time(self, plan: StepPlan, seconds: float) -> None:
        """Learns how long a completed step took."""
        self.rows.observe(plan, seconds)

    def forget(self, state: RequestState) -> None:
        """The answer restarts, or failed to."""
        text = self._texts.pop(state.request_id, None)
        if text is not None:
            text.stream.close()

    def end(self, state: RequestState) -> None:
        """The request has ended, and leaves its text to others."""
        if self._is_shared(state.request) and state.num_cached_tokens is not None:
            self._text(state)
        self.forget(state)

    def clear(self) -> None:
        """Forgets every request."""
        for text in self._texts.values():
            text.stream.close()
        self._texts.clear()
        self._planned.clear()

    def counts(self) -> DraftCounts:
        """What became of guesses so far. From any thread."""
        return DraftCounts(
            drafts=self._num_drafts,
            drafted=self._num_drafted.copy(),
            accepted=self._num_accepted.copy(),
        )

    def _draft(self, state: RequestState, room: int) -> _Draft | None:
        # The step's own token follows the guesses.
        most = min(self._most, room, state.max_num_tokens - state.num_tokens - 1)
        if most <= 0 or not state.may_be_drafted:
            return None
        text = self._text(state)
        guesses, length, source = text.stream.draft(most)
        kind = _Kind(text.scope, source, length.bit_length())
        of_kind = self._record(kind)
        if guesses:
            of_kind.earn(_CREDIT_OF_CHANCE)
            self._unproven.earn(_SHARED_CREDIT_OF_CHANCE)
        credit = of_kind.credit
        if not of_kind.is_proven:
            credit = min(credit, self._unproven.credit)
        tokens = _before_end(guesses[: max(0, int(credit))], state.end_token_ids)
        if not tokens:
            return None
        return _Draft(state, tokens, kind, self._share_right(kind, text.record))

    def _share_right(self, kind: _Kind, own: _Record) -> float:
        of_all = self._record(kind)
        return (_TRUST * of_all.right / of_all.tried + own.right) / (_TRUST + own.tried)

    def _record(self, kind: _Kind) -> _Record:
        """Of the kind. What was not asked for the longest is forgotten."""
        record = self._records.pop(kind, None)
        if record is None:
            # The longer the text that was found again, the likelier it goes on alike.
            record = _Record(_TRUST, _TRUST * (1 - 0.6**kind.bits))
            if len(self._records) == _MOST_RECORDS:
                del self._records[next(iter(self._records))]
        self._records[kind] = record
        return record

    def _share_out(self, drafts: Sequence[_Draft], num_rows: int, room: int) -> None:
        """Takes the likeliest guesses, as many as give the most tokens a second.

        A token of a prompt counts as one of an answer: in a step with many of them rows are dear.
        """
        gains = sorted(
            (
                (draft.share**place, index)
                for index, draft in enumerate(drafts)
                for place in range(1, len(draft.tokens) + 1)
            ),
            key=lambda gain: -gain[0],
        )
        expected, best, count = float(num_rows), 0.0, 0
        for taken, (gain, _) in enumerate(gains[:room], 1):
            expected += gain
            speed = expected / num_rows / self.rows.times_longer(num_rows, num_rows + taken)
            if speed > max(best, _LEAST_GAIN):
                best, count = speed, taken
        for _, index in gains[:count]:
            drafts[index].count += 1

    def _text(self, state: RequestState) -> _Text:
        """The request's text, up to the last known token."""
        text = self._texts.get(state.request_id)
        if text is None:
            request = state.request
            scope = _scope(request)
            stream = self._index.stream(scope, self._is_shared(request))
            text = self._texts[state.request_id] = _Text(scope, stream)
            if request.prediction is not None:
                stream.append(np.concatenate([state.tokens.prompt[-_LINK:], request.prediction]))
        if text.num_tokens < len(state.tokens):
            text.stream.append(state.tokens.known[text.num_tokens :])
            text.num_tokens = len(state.tokens)
        return text

    def _is_shared(self, request: Request) -> bool:
        cache = request.cache
        return self._shares and cache.read and cache.write and cache.write_upto is None


def _scope(request: Request) -> bytes:
    """Names whose text a request may see: that under its own salt and API key."""
    return hashlib.blake2b(repr(request.scope).encode()).digest()


def _before_end(tokens: list[int], end_token_ids: Sequence[int]) -> list[int]:
    """The tokens before the first that ends an answer: nothing is wanted after that."""
    for place, token in enumerate(tokens):
        if token in end_token_ids:
            return tokens[:place]
    return tokens
