"""Bad words as token ids."""

from __future__ import annotations

import dataclasses

from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.sampling_params import SamplingParams


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`params` with the token ids of their bad words in addition to those that they have.

    As in vLLM a word is banned as it is encoded, and also after a space if that changes its
    first token. Raises `InvalidRequestError` for a word that is not valid Unicode.
    """
    if not params.bad_words:
        return params
    words = [word.lstrip() for word in params.bad_words]
    plain = _encoded(tokenizer, words)
    spaced = _encoded(tokenizer, [f" {word}" for word in words])
    pairs = zip(plain, spaced, strict=True)
    others = [
        after
        for alone, after in pairs
        if alone and len(after) == len(alone) and after[0] != alone[0]
    ]
    found = (*params.bad_words_token_ids, *filter(None, plain), *others)
    return dataclasses.replace(params, bad_words_token_ids=tuple(dict.fromkeys(found)))


def _encoded(tokenizer: Tokenizer, words: list[str]) -> list[tuple[int, ...]]:
    encoded = tokenizer.encode_batch(words, add_special_tokens=False, param="bad_words")
    return [tuple(ids.tolist()) for ids in encoded]
