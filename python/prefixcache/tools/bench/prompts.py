"""Prompts in the forms in which servers take them: token ids, text, or the messages of a chat.

Their content is drawn from plain English words. So it holds no special token, it is valid for any
vocabulary, and two draws of a whole block never coincide.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from prefixcache.tools.bench.sessions import Text
from prefixcache.types.token_ids import TokenIds, as_token_ids

SOURCE_TEXT = (
    "The river turned north beyond the old mill, where farmers had stacked wood for winter and "
    "children waited near a narrow bridge. Nobody could remember which family built the house "
    "first, but every summer visitors asked about its painted windows, heavy doors, and the "
    "garden that reached down to the water. A letter arrived from another country one morning. It "
    "described ships, markets, music in crowded streets, and the long road over the mountains. "
    "She read it twice before answering with questions about weather, trains, bread, the price "
    "of paper, and whether anyone there still played the game they had learned at school."
)
Content: TypeAlias = TokenIds | str


@dataclass(frozen=True, slots=True)
class Message:
    """A part of a prompt; forms without messages join the parts."""

    role: Literal["system", "user", "assistant"]
    content: Content


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send, and how many tokens to ask for.

    `continues` where a later prompt repeats the answer, so that its ids must be returned.
    """

    messages: tuple[Message, ...]
    output_len: int
    continues: bool = False


class PromptForm(ABC):
    """How texts become content, and content a request. `path` is the endpoint that takes it."""

    path = "/v1/completions"

    @abstractmethod
    def draw(self, texts: Sequence[Text], seed: str) -> Content:
        """The content of texts; equal for equal keys and seeds."""

    @abstractmethod
    def join(self, contents: Sequence[Content]) -> Content:
        """One content of several."""

    @abstractmethod
    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The fields of a request that hold the prompt."""

    @abstractmethod
    def answer(self, output: tuple[int, ...] | str) -> Content:
        """What was answered, as the next prompts repeat it."""

    @abstractmethod
    def count(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt; of text about as many."""


class TokenForm(PromptForm):
    """Token ids, drawn from `pool`."""

    def __init__(self, pool: Sequence[int]) -> None:
        self.pool = as_token_ids(pool)

    def draw(self, texts: Sequence[Text], seed: str) -> Content:
        """An array of exactly the texts' lengths."""
        return self.join([self.pool[_places(text, seed, len(self.pool))] for text in texts])

    def join(self, contents: Sequence[Content]) -> TokenIds:
        """One array."""
        joined = np.concatenate([np.empty(0, np.int32), *map(np.asarray, contents)])
        joined.flags.writeable = False
        return joined

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt of ids; where it continues its answer tells ids too."""
        body: dict[str, Any] = {"prompt": self.joined(prompt.messages).tolist()}
        return body | ({"return_token_ids": True} if prompt.continues else {})

    def joined(self, messages: Sequence[Message]) -> TokenIds:
        """All messages' ids."""
        return self.join([message.content for message in messages])

    def answer(self, output: tuple[int, ...] | str) -> Content:
        """The answer's ids."""
        if isinstance(output, str):
            raise TypeError("a server of token ids returned none of its answer's")
        return as_token_ids(output)

    def count(self, messages: Sequence[Message]) -> int:
        """Exact."""
        return sum(len(message.content) for message in messages)


class TextForm(PromptForm):
    """Text, of words drawn from `SOURCE_TEXT`; a word has `tokens_per_word` tokens on average."""

    def __init__(self, tokens_per_word: float = 1.0) -> None:
        self.words = np.array(SOURCE_TEXT.split())
        self.tokens_per_word = tokens_per_word

    def draw(self, texts: Sequence[Text], seed: str) -> str:
        """Words, a space before each of them."""
        return self.join([self._draw_one(text, seed) for text in texts])

    def _draw_one(self, text: Text, seed: str) -> str:
        count = max(1, round(text.length / self.tokens_per_word))
        places = _places(Text(text.key, count), seed, len(self.words))
        return "".join(f" {word}" for word in self.words[places])

    def join(self, contents: Sequence[Content]) -> str:
        """One text."""
        return "".join(map(str, contents))

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt of text."""
        return {"prompt": self.join([message.content for message in prompt.messages])}

    def answer(self, output: tuple[int, ...] | str) -> Content:
        """The answer's text."""
        return str(output)

    def count(self, messages: Sequence[Message]) -> int:
        """Words times their tokens."""
        words = sum(len(str(message.content).split()) for message in messages)
        return round(words * self.tokens_per_word)


class ChatForm(TextForm):
    """Messages of a chat."""

    path = "/v1/chat/completions"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Messages with roles."""
        return {"messages": [{"role": m.role, "content": m.content} for m in prompt.messages]}


def _places(text: Text, seed: str, choices: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`text.length` draws from as many choices."""
    digest = hashlib.blake2b(repr((seed, text.key)).encode(), digest_size=16).digest()
    draw = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    return draw.integers(0, choices, text.length)
