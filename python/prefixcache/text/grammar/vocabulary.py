"""A model's tokens as llguidance reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from prefixcache.config.model_config import ModelConfig
    from prefixcache.text.tokenization.tokenizer import Tokenizer

Words = npt.NDArray[np.int32]
"""One bit a token: bit i of word w is token 32 * w + i."""


# Sets of tokens that llguidance looks for in a mask as a whole: what a JSON string may go on with
# that has room for that many characters. Strings of bounded length are as quick as others then.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_ROOMS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 40)
_SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{room}}}" for room in _ROOMS),
    f"{_CHARACTER}+",
)


@dataclass(frozen=True)
class Vocabulary:
    """The bytes that each token adds to a text, and which tokens end one.

    `special_token_ids` stand for no text: a grammar names them or excludes them. `encode` gives the
    tokens that the model's tokenizer makes of a text: where a grammar leaves one text alone, its
    tokens are these.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return -(-len(self.tokens) // 32)

    @cached_property
    def backend(self) -> LLTokenizer:
        """Llguidance's own form, which takes some tenths of a second to make."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Source(self)),
            n_vocab=len(self.tokens),
            eos_token=list(self.eos_token_ids),
            slices=list(_SLICES),
        )

    def words_of(self, token_ids: Sequence[int]) -> Words:
        """A mask of these tokens alone."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


class _Source:
    """What `TokenizerWrapper` asks a tokenizer for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return list(self._encode(text))


def tokens_that_end(tokenizer: Tokenizer, model: ModelConfig) -> tuple[int, ...]:
    """The tokens that end an answer: those of the model's files, and its tokenizer's.

    Many chat models name the end of a text in the former, and that of a turn in the latter alone.
    """
    return tuple(dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids)))


def vocabulary_of(tokenizer: Tokenizer, model: ModelConfig) -> Vocabulary:
    """The tokens of a model; their bytes are those that answers are made of."""
    size = max(model.vocab_size, tokenizer.vocab_size)
    return Vocabulary(
        tokens=tuple(map(tokenizer.token_bytes, range(size))),
        special_token_ids=tuple(sorted(tokenizer.special_token_ids)),
        eos_token_ids=tokens_that_end(tokenizer, model),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).tolist(),
    )
