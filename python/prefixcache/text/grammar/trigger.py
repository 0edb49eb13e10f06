"""What may be sampled before the trigger, the text from which a grammar applies."""

from __future__ import annotations

from functools import lru_cache

from prefixcache.text.grammar.vocabulary import Vocabulary, Words


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
