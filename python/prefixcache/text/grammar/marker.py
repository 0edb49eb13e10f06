"""What may be sampled before the marker from which on a grammar holds."""

from __future__ import annotations

from functools import lru_cache

from prefixcache.text.grammar.vocabulary import Vocabulary, Words


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

    def _words(self, state: int) -> Words:
        """All tokens but those that end the answer, or go on behind the marker."""
        vocabulary, marker, begun = self._vocabulary, self._marker, self._marker[:state]
        ends = set(vocabulary.eos_token_ids)
        return vocabulary.words_of(
            [
                token_id
                for token_id, token in enumerate(vocabulary.tokens)
                if token_id not in ends and marker not in begun + token[:-1]
            ]
        )
