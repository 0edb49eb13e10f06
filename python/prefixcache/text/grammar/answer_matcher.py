"""How far one answer has come in its grammar, and which tokens may follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from prefixcache.exceptions import GrammarError
from prefixcache.text.grammar.compiler import Matcher
from prefixcache.text.grammar.mask_workers import Latency, MaskWorkers
from prefixcache.text.grammar.vocabulary import Vocabulary, Words

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

    def push(self, token_id: int) -> None:
        """Takes the sampled token; what may follow it is worked out from now on."""
        if token_id not in self._ends:
            self._track.is_known.clear()
            self._grammar.workers.put(self._track.follow, token_id, self._grammar.latency)

    @property
    def is_held(self) -> bool:
        """Whether the answer should stay out of steps until what may follow is known."""
        if self._track.is_known.is_set():
            self._was_late = False
            return False
        return self._was_late or self._grammar.latency.is_slow

    def wait(self, seconds: float) -> None:
        """Waits until what may follow is known, but no longer than that."""
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
        wanted = track.words & self._grammar.words_without(unwanted) if unwanted else track.words
        return wanted if wanted.any() else track.words


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
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state = 0
        self._matcher: Matcher | None = None
        self.error: str | None = None
        self.words = (
            grammar.first_words if grammar.trigger is None else grammar.trigger.words(self._state)
        )
        self._own_words: Words | None = None
        self.is_known = threading.Event()
        self.is_known.set()

    def follow(self, token_id: int) -> None:
        """Follows one more token, and notes how long it took."""
        begun = time.thread_time()
        try:
            self.words = self._words_after(token_id)
        except BaseException as error:  # noqa: BLE001 - a panic of llguidance is this answer's alone
            self.error = str(error) or repr(error)
        self._grammar.latency.observe(time.thread_time() - begun)
        self.is_known.set()

    def _words_after(self, token_id: int) -> Words:
        trigger = self._grammar.trigger
        if trigger is not None and not trigger.is_found(self._state):
            self._state = trigger.follow(self._state, token_id)
            found = trigger.is_found(self._state)
            return self._grammar.first_words if found else trigger.words(self._state)
        if self._matcher is None or self._own_words is None:
            self._matcher = self._grammar.new_matcher()
            self._own_words = np.zeros(len(self._grammar.first_words), dtype=np.int32)
        self._matcher.follow(token_id)
        self._matcher.write(self._own_words)
        return self._own_words
