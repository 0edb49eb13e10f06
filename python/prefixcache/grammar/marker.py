"""What may be sampled before the marker from which on a grammar holds."""

from __future__ import annotations

from functools import lru_cache

from prefixcache.grammar.vocabulary import Vocabulary, Words


class Marker:
    """A text that ends what is free. It ends at a token's end: no token may reach beyond it.

    A state is the number of the marker's bytes that the text ends with; 0 at the start.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._marker = text.encode()
        self._vocabulary = vocabulary
        self.words = lru_cache(maxsize=32)(self._words)
        self.words(0)

    def is_found(self, state: int) -> bool:
        """Whether the grammar begins here."""
        return state == len(self._marker)

    def follow(self, state: int, token_id: int) -> int:
        """The state behind one more token."""
        text = self._marker[:state] + self._vocabulary.tokens[token_id]
        longest = min(len(text), len(self._marker))
        return next(n for n in range(longest, -1, -1) if text.endswith(self._marker[:n]))

    def allows(self, state: int, token_id: int) -> bool:
        """Whether the token neither ends the answer nor goes on behind the marker."""
        vocabulary = self._vocabulary
        reached = self._marker[:state] + vocabulary.tokens[token_id][:-1]
        return token_id not in vocabulary.eos_token_ids and self._marker not in reached

    def _words(self, state: int) -> Words:
        """A mask of all tokens that are allowed."""
        count = len(self._vocabulary.tokens)
        return self._vocabulary.words_of([i for i in range(count) if self.allows(state, i)])
