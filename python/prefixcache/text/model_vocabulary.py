"""What grammars of a model are compiled for."""

from __future__ import annotations

from prefixcache.config.model_config import ModelConfig
from prefixcache.text.grammar.vocabulary import Vocabulary
from prefixcache.text.tokenization.tokenizer import Tokenizer


def tokens_that_end(tokenizer: Tokenizer, model: ModelConfig) -> tuple[int, ...]:
    """The tokens that end an answer."""
    return tuple(model.eos_token_ids or tokenizer.eos_token_ids)


def vocabulary_of(tokenizer: Tokenizer, model: ModelConfig) -> Vocabulary:
    """The tokens of a model; their bytes are those that answers are made of."""
    size = max(model.vocab_size, tokenizer.vocab_size)
    return Vocabulary(
        tokens=tuple(map(tokenizer.token_bytes, range(size))),
        special_token_ids=tuple(sorted(tokenizer.special_token_ids)),
        eos_token_ids=tokens_that_end(tokenizer, model),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).tolist(),
    )
