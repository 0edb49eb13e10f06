"""Log probabilities in the forms of OpenAI's two endpoints, and vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import TokenLogprobs

# JSON has no infinity; OpenAI and vLLM write this for a token that cannot be drawn.
_LOWEST = -9999.0


ScoredToken = tuple[int, TokenLogprobs | None]


def completion_logprobs(
    tokens: Sequence[ScoredToken],
    num_top: int,
    tokenizer: Tokenizer,
    *,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """The form of `/v1/completions`; `offsets` are those of the answer's tokens so far.

    A token without log probabilities is the first one of an echoed prompt.
    """
    texts = [token_text(tokenizer, token_id) for token_id, _ in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [
            None if scored is None else _finite(scored.logprob) for _, scored in tokens
        ],
        "top_logprobs": (
            None if scored is None else _top_dict(scored, num_top, tokenizer)
            for _, scored in tokens
        ),
        "text_offset": [offsets.next(tokenizer.token_bytes(token_id)) for token_id, _ in tokens],
    }


def chat_logprobs(
    logprobs: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The form of `/v1/chat/completions`, whose tokens are made as they are written."""
    return {"content": (_chat_token(scored, num_top, tokenizer) for scored in logprobs)}


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs | None], num_top: int, tokenizer: Tokenizer
) -> Iterator[dict[str, Any] | None]:
    """The form of vLLM: one map from token id to details for each token of the prompt.

    The maps of a long prompt take so much memory that they are made as they are written.
    """
    return (
        None if scored is None else _prompt_token(scored, num_top, tokenizer) for scored in logprobs
    )


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; a part of a character is spelled in bytes, as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _top(scored: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float, int]]:
    """Token id, log probability and rank of the likeliest tokens."""
    pairs = zip(scored.top_token_ids[:num_top], scored.top_logprobs[:num_top], strict=True)
    for rank, (token_id, logprob) in enumerate(pairs, 1):
        yield token_id, _finite(logprob), rank


def _top_dict(scored: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, float]:
    chosen = {token_text(tokenizer, scored.token_id): _finite(scored.logprob)}
    top = {token_text(tokenizer, i): logprob for i, logprob, _ in _top(scored, num_top)}
    return chosen | top


def _chat_token(scored: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_chat_entry(i, logprob, tokenizer) for i, logprob, _ in _top(scored, num_top)]
    return {**_chat_entry(scored.token_id, scored.logprob, tokenizer), "top_logprobs": top}


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _prompt_token(scored: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    entries = [(scored.token_id, _finite(scored.logprob), scored.rank), *_top(scored, num_top)]
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": token_text(tokenizer, token_id),
        }
        for token_id, logprob, rank in entries
    }


class TextOffsets:
    """Where tokens begin in an answer's text, in characters; parts of one begin where it does."""

    def __init__(self) -> None:
        self._length = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, raw: bytes) -> int:
        """The offset of the next token, of these bytes."""
        before = self._length
        self._length += len(self._decoder.decode(raw))
        goes_on = raw[:1] and raw[0] & 0xC0 == 0x80  # within the character that was begun
        return before if goes_on else self._length - len(raw.decode("utf-8", "ignore"))
