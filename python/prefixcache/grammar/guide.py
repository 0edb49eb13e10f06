"""How far one answer has come in its grammar, and which tokens may follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from prefixcache.exceptions import GrammarError
from prefixcache.grammar.compiler import Matcher
from prefixcache.grammar.lanes import Lanes, Pace
from prefixcache.grammar.marker import Marker
from prefixcache.grammar.vocabulary import Vocabulary, Words, has_token

_TOO_COMPLEX = "The answer left what its grammar can follow, or a limit of it was reached: "

# The library counts its work from one mask to the next, and ends an answer where that is too much.
_MOST_WITHOUT_WORDS = 16


class Grammar:
    """A compiled grammar, shared by the answers that follow it. It takes about `num_bytes`."""

    def __init__(
        self,
        matcher: Matcher,
        first_words: Words,
        vocabulary: Vocabulary,
        marker: Marker | None,
        lanes: Lanes,
        num_bytes: int = 0,
    ) -> None:
        self.vocabulary = vocabulary
        self.marker = marker
        self.pace = Pace()
        self.lanes = lanes
        self.num_bytes = num_bytes
        self._matcher = matcher
        self._copying = threading.Lock()
        self.first_words = first_words
        self.words_without = lru_cache(maxsize=8)(self._words_without)

    def new_matcher(self) -> Matcher:
        """One at the grammar's beginning."""
        with self._copying:
            return self._matcher.copy()

    def guide(self, *, ignore_eos: bool = False) -> Guide:
        """For a new answer. With `ignore_eos` it ends only where nothing else can follow."""
        return Guide(self, ignore_eos=ignore_eos)

    def _words_without(self, token_ids: tuple[int, ...]) -> Words:
        return ~self.vocabulary.words_of(token_ids)


class Guide:
    """Follows one answer token by token.

    What may follow a token is worked out in another thread as soon as the token is known, unless
    the last choice was looked at first (see `TokenMask`). All methods are for the loop's thread.
    """

    def __init__(self, grammar: Grammar, *, ignore_eos: bool) -> None:
        self._grammar = grammar
        self._always_unwanted = grammar.vocabulary.eos_token_ids if ignore_eos else ()
        self._ends = frozenset(grammar.vocabulary.eos_token_ids)
        self.reset()

    def reset(self) -> None:
        """Nothing is generated (any more)."""
        self._track = _Track(self._grammar)
        self._was_late = False
        self._was_looked_at = False

    def push(self, token_id: int) -> None:
        """Takes the sampled token."""
        if token_id in self._ends:
            return
        if self._was_looked_at and self._track.is_quick:
            self._track.follow(token_id)
        else:
            self._track.follow_aside(token_id)
        self._was_looked_at = False

    @property
    def is_held(self) -> bool:
        """Whether the answer should stay out of steps until what may follow is known."""
        if self._track.is_idle.is_set():
            self._was_late = False
            return False
        return self._was_late or self._grammar.pace.is_slow

    def wait(self, seconds: float) -> None:
        """Waits until what may follow is known, but no longer than that."""
        self._track.is_idle.wait(seconds)

    def mask(self, unwanted: Sequence[int]) -> GuideMask:
        """Which tokens may follow, less those `unwanted` where that leaves any."""
        return GuideMask(self, (*unwanted, *self._always_unwanted))

    def allows(self, token_id: int, unwanted: tuple[int, ...]) -> bool:
        """See `TokenMask.allows`."""
        self._was_looked_at = True
        track = self._track
        if not track.is_idle.is_set():
            return False
        if token_id not in unwanted and track.allows(token_id):
            return True
        track.find()
        return False

    def words(self, seconds: float, unwanted: tuple[int, ...]) -> Words | None:
        """See `TokenMask.words`."""
        track = self._track
        track.find()
        if not track.is_idle.wait(max(seconds, 0)):
            self._was_late = True
            return None
        words = track.words
        wanted = words & self._grammar.words_without(unwanted) if unwanted else words
        return wanted if wanted.any() else words


class GuideMask:
    """A `TokenMask` for the next token of one answer."""

    __slots__ = ("_guide", "_unwanted")

    def __init__(self, guide: Guide, unwanted: tuple[int, ...]) -> None:
        self._guide = guide
        self._unwanted = unwanted

    def allows(self, token_id: int) -> bool:
        """See `TokenMask.allows`."""
        return self._guide.allows(token_id, self._unwanted)

    def words(self, seconds: float) -> Words | None:
        """See `TokenMask.words`."""
        return self._guide.words(seconds, self._unwanted)


class _Track:
    """An answer's place in marker and grammar, from its beginning on.

    A lane's thread has all of it while `is_idle` is unset, else the loop's thread. What fails is
    the answer's error.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state = 0
        self._matcher: Matcher | None = None
        self._own_words: Words | None = None
        self._error: str | None = None
        self._words = None if self._free_until else grammar.first_words
        self._num_without_words = 0
        self.is_idle = threading.Event()
        self.is_idle.set()

    @property
    def is_quick(self) -> bool:
        """Whether going on takes no time worth a thread, unlike a copy of the grammar."""
        if self._matcher is None:
            return self._free_until is not None
        return self._num_without_words < _MOST_WITHOUT_WORDS and self._grammar.pace.is_steady

    @property
    def words(self) -> Words:
        """Which tokens may follow, once that is found. Raises the answer's error."""
        if self._error is not None or self._words is None:
            raise GrammarError(f"{_TOO_COMPLEX}{self._error}")
        return self._words

    def follow(self, token_id: int) -> None:
        """Goes on behind one more token."""
        self._try(partial(self._follow, token_id))

    def follow_aside(self, token_id: int) -> None:
        """Lets a thread go on behind one more token, and find which ones may follow."""
        self._put(partial(self._follow_and_find, token_id))

    def find(self) -> None:
        """Finds which tokens may follow, where that is not known or under way; or lets a thread."""
        if self._words is not None or self._error is not None or not self.is_idle.is_set():
            return
        if self._matcher is not None and self.is_quick:
            self._try(self._find)
        else:
            self._put(self._find)

    def allows(self, token_id: int) -> bool:
        """Whether the token may follow; False as well where only `words` tell."""
        if self._words is None and self._error is None:
            return bool(self._try(partial(self._allows, token_id)))
        return self._error is None and has_token(self.words, token_id)

    def _put(self, work: Callable[[], object]) -> None:
        self.is_idle.clear()
        self._grammar.lanes.put(partial(self._work, work), self._grammar.pace)

    def _work(self, work: Callable[[], object]) -> None:
        self._try(work)
        self.is_idle.set()

    def _try(self, work: Callable[[], object]) -> object:
        """Tells the pace how long work on the grammar takes; None where it fails."""
        begun = time.thread_time()
        try:
            return work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of llguidance is this answer's alone
            self._error = str(error) or repr(error)
            return None
        finally:
            if self._matcher is not None:
                self._grammar.pace.observe(time.thread_time() - begun)

    @property
    def _free_until(self) -> Marker | None:
        """The marker, while the grammar does not hold yet."""
        marker = self._grammar.marker
        return None if marker is None or marker.is_found(self._state) else marker

    def _follow_and_find(self, token_id: int) -> None:
        self._follow(token_id)
        if self._words is None:
            self._find()

    def _follow(self, token_id: int) -> None:
        if (marker := self._free_until) is not None:
            self._state = marker.follow(self._state, token_id)
            self._words = self._grammar.first_words if marker.is_found(self._state) else None
            return
        if self._matcher is None:
            self._matcher = self._grammar.new_matcher()
        self._words = None
        self._num_without_words += 1
        self._matcher.follow(token_id)

    def _allows(self, token_id: int) -> bool:
        if (marker := self._free_until) is not None:
            return marker.allows(self._state, token_id)
        assert self._matcher is not None, "at its beginning a grammar's words are known"
        forced = self._matcher.forced_token()
        if forced is None:
            return self._matcher.allows(token_id)
        self._words = self._grammar.vocabulary.words_of([forced])
        return token_id == forced

    def _find(self) -> None:
        self._num_without_words = 0
        if (marker := self._free_until) is not None:
            self._words = marker.words(self._state)
            return
        assert self._matcher is not None, "at its beginning a grammar's words are known"
        if self._own_words is None:
            self._own_words = np.zeros(len(self._grammar.first_words), dtype=np.int32)
        self._matcher.write(self._own_words)
        self._words = self._own_words
