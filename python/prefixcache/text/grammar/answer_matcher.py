"""How far one answer has come in its grammar, and which tokens may follow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from prefixcache.exceptions import GrammarError
from prefixcache.text.grammar.mask_workers import Latency, MaskWorkers
from prefixcache.text.grammar.vocabulary import Vocabulary, Words
from prefixcache.types.step_plan import TokenMask

if TYPE_CHECKING:
    from prefixcache.text.grammar.compiler import Matcher

logger = logging.getLogger(__name__)

_TOO_COMPLEX = "The answer left what its grammar can follow, or a limit of it was reached: "


class Trigger:
    """A text that ends what is free. It ends at a token's end: no token may reach beyond it.

    A state is the number of the trigger's bytes that the text ends with; 0 at the start.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._trigger = text.encode()
        self._vocabulary = vocabulary
        self.words = lru_cache(maxsize=32)(self._words)
        self.words(0)

    def is_found(self, state: int) -> bool:
        """Whether the grammar begins here."""
        return state == len(self._trigger)

    def follow(self, state: int, token_id: int) -> int:
        """The state after one more token."""
        text = self._trigger[:state] + self._vocabulary.tokens[token_id]
        longest = min(len(text), len(self._trigger))
        return next(n for n in range(longest, -1, -1) if text.endswith(self._trigger[:n]))

    def _words(self, state: int) -> Words:
        """All tokens but those that end the answer, or go beyond the trigger."""
        vocabulary, trigger, begun = self._vocabulary, self._trigger, self._trigger[:state]
        ends = set(vocabulary.eos_token_ids)
        return vocabulary.words_of(
            [
                token_id
                for token_id, token in enumerate(vocabulary.tokens)
                if token_id not in ends and trigger not in begun + token[:-1]
            ]
        )


class Grammar:
    """A compiled grammar, shared by the answers that follow it. It takes about `num_bytes`."""

    def __init__(
        self,
        matcher: Matcher,
        first_words: Words,
        vocabulary: Vocabulary,
        trigger: Trigger | None,
        workers: MaskWorkers,
        num_bytes: int = 0,
    ) -> None:
        self.vocabulary = vocabulary
        self.trigger = trigger
        self.latency = Latency()
        self.workers = workers
        self.num_bytes = num_bytes
        self._matcher = matcher
        self._copying = threading.Lock()
        self.first_words = first_words

        def words_without(token_ids: tuple[int, ...]) -> Words:
            return ~vocabulary.words_of(token_ids)

        self.words_without = lru_cache(maxsize=8)(words_without)

    def new_matcher(self) -> Matcher:
        """One at the grammar's beginning."""
        with self._copying:
            return self._matcher.copy()

    def for_answer(self, *, ignore_eos: bool = False) -> AnswerMatcher:
        """For a new answer. With `ignore_eos` it ends only where nothing else can follow."""
        return AnswerMatcher(self, ignore_eos=ignore_eos)


class AnswerMatcher:
    """Follows one answer token by token.

    The mask after a token is computed in another thread as soon as the token is known. All
    methods are for the thread of the loop.
    """

    def __init__(self, grammar: Grammar, *, ignore_eos: bool) -> None:
        self._grammar = grammar
        self._always_unwanted = grammar.vocabulary.eos_token_ids if ignore_eos else ()
        self._ends = frozenset(grammar.vocabulary.eos_token_ids)
        self._was_late = False
        self.reset()

    def reset(self) -> None:
        """Nothing is generated (any more)."""
        self._track = _Track(self._grammar)

    def push(self, *token_ids: int) -> None:
        """Takes sampled tokens; what may follow the last one is worked out from now on."""
        followed = [token_id for token_id in token_ids if token_id not in self._ends]
        if followed:
            self._track.is_known = event = threading.Event()
            follow = partial(self._track.follow, followed, event)
            self._grammar.workers.put(follow, self._grammar.latency)

    def draft_masks(
        self, drafts: Sequence[int], unwanted: Sequence[Sequence[int]]
    ) -> list[TokenMask]:
        """Which tokens may follow each of these guesses, less those `unwanted` there.

        A mask stays unknown after a guess that the grammar does not allow.
        """
        words = _DraftWords(self._track)
        self._grammar.workers.put(partial(words.follow, drafts), self._grammar.latency)
        return [
            _DraftMask(
                words, index, partial(self._wanted, unwanted=(*of_one, *self._always_unwanted))
            )
            for index, of_one in enumerate(unwanted)
        ]

    @property
    def is_known(self) -> bool:
        """Whether what may follow is known now."""
        return self._track.is_known.is_set()

    @property
    def is_held(self) -> bool:
        """Whether the answer should stay out of steps until what may follow is known."""
        if self._track.is_known.is_set():
            self._was_late = False
            return False
        return self._was_late or self._grammar.latency.is_slow

    @property
    def is_slow(self) -> bool:
        """Whether masks take so long that none should be made for guesses."""
        return self._grammar.latency.is_slow

    def wait(self, seconds: float | None = None) -> None:
        """Waits until what may follow is known, but no longer than that, where it is given."""
        self._track.is_known.wait(seconds)

    def mask(self, unwanted: Sequence[int]) -> AnswerMask:
        """Which tokens may follow, less those `unwanted` where that leaves any."""
        return AnswerMask(self, (*unwanted, *self._always_unwanted))

    def words(self, seconds: float, unwanted: tuple[int, ...]) -> Words | None:
        """See `TokenMask.words`."""
        track = self._track
        if not track.is_known.wait(max(seconds, 0)):
            self._was_late = True
            return None
        if track.error is not None:
            raise GrammarError(_TOO_COMPLEX + track.error)
        return self._wanted(track.words, unwanted)

    def _wanted(self, words: Words, unwanted: tuple[int, ...]) -> Words:
        wanted = words & self._grammar.words_without(unwanted) if unwanted else words
        return wanted if wanted.any() else words


class AnswerMask:
    """A `TokenMask` for the next token of one answer."""

    __slots__ = ("_matcher", "_unwanted")

    def __init__(self, matcher: AnswerMatcher, unwanted: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._unwanted = unwanted

    def words(self, seconds: float) -> Words | None:
        """See `TokenMask.words`."""
        return self._matcher.words(seconds, self._unwanted)


class _Track:
    """An answer's place in trigger and grammar, from its beginning on.

    `follow` runs in a worker's thread while `is_known` is unset; else the loop's thread reads it.
    Each `follow` has an event of its own, so that who waits for one does not wait for the next.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state = 0
        self._matcher: Matcher | None = None
        self._own_words: Words | None = None
        self._changing = threading.Lock()
        self.error: str | None = None
        self.words = self._words()
        self.is_known = threading.Event()
        self.is_known.set()

    def follow(self, token_ids: Sequence[int], event: threading.Event) -> None:
        """Follows more tokens, and notes how long it took."""
        begun = time.thread_time()
        try:
            with self._changing:
                for token_id in token_ids:
                    self._advance(token_id)
                self.words = self._words()
        except BaseException as error:  # noqa: BLE001 - a panic of llguidance is this answer's alone
            self.error = str(error) or repr(error)
        self._grammar.latency.observe(time.thread_time() - begun)
        event.set()

    def copy(self) -> _Track:
        """Another one at the same place. From any thread."""
        other = _Track(self._grammar)
        with self._changing:
            other._state, other.error = self._state, self.error
            other._matcher = None if self._matcher is None else self._matcher.copy()
        return other

    def words_after(self, token_id: int) -> Words:
        """Follows one more token in the caller's thread. Raises `GrammarError`."""
        self._advance(token_id)
        return self._words().copy()

    def _advance(self, token_id: int) -> None:
        if self._is_free:
            assert self._grammar.trigger is not None
            self._state = self._grammar.trigger.follow(self._state, token_id)
            return
        self._matcher = self._matcher or self._grammar.new_matcher()
        self._matcher.follow(token_id)

    @property
    def _is_free(self) -> bool:
        """Whether the trigger is still to come."""
        trigger = self._grammar.trigger
        return trigger is not None and not trigger.is_found(self._state)

    def _words(self) -> Words:
        if self._is_free:
            assert self._grammar.trigger is not None
            return self._grammar.trigger.words(self._state)
        if self._matcher is None:
            return self._grammar.first_words
        if self._own_words is None:
            self._own_words = np.zeros(len(self._grammar.first_words), dtype=np.int32)
        self._matcher.write(self._own_words)
        return self._own_words


class _DraftWords:
    """Which tokens may follow each of some guesses, as far as the grammar allows these.

    A worker waits for the answer's own place to be known: that job came before this one, so it
    never waits for a job behind it. Where the answer has gone on meanwhile, nobody reads the words.
    """

    def __init__(self, track: _Track) -> None:
        self._track, self._begins = track, track.is_known
        self.words: list[Words] = []
        self.is_known = threading.Event()

    def follow(self, drafts: Sequence[int]) -> None:
        """Runs in a worker's thread."""
        self._begins.wait()
        try:
            track = self._track.copy()
            for token_id in drafts:
                self.words.append(track.words_after(token_id))
        except BaseException as error:  # noqa: BLE001 - as above; the answer itself goes on
            logger.debug("A guess leaves its grammar: %s", error)
        self.is_known.set()


@dataclass(frozen=True, slots=True)
class _DraftMask:
    """A `TokenMask` for the token after one of the guesses."""

    draft: _DraftWords
    index: int
    wanted: Callable[[Words], Words]

    def words(self, seconds: float) -> Words | None:
        """See `TokenMask.words`."""
        if not self.draft.is_known.wait(max(seconds, 0)) or self.index >= len(self.draft.words):
            return None
        return self.wanted(self.draft.words[self.index])
