"""Which tokens of a GGUF file begin a text, end an answer, and may never be sampled.

Many files name the token that ends a text, and not the one that ends a turn, so llama.cpp's
`llama-vocab.cpp` finds turn ends by their text. The list and its exceptions are from there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefixcache.config.checked import is_list

logger = logging.getLogger(__name__)

CONTROL = 3
"""Of `tokenizer.ggml.token_type`: a token that stands for no text."""

_KEYS_OF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Of files for completing code: each ends what is filled in.
_KEYS_OF_FILL_ENDS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
_TEXTS_OF_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<|end|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "[e~[", "[EOS]", "[EOT]"),
        *("<EOT>", "_<EOT>", "<end_of_turn>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
# Formats in which `<|end|>` ends a message that others follow.
_FORMATS_WITH_PARTS = (
    *({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}),
    *({"<|return|>", "<|calls|>"}, {"<|calls|>", "<|flush|>"}),
)


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that a config.json has: of BOS, padding, and all that end an answer.

    Raises `ValueError` for values that are no ids, as all that read ids here do.
    """
    named = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    ids = {ours: token_id(metadata, theirs) for ours, theirs in named.items()}
    named_ids = {key: value for key, value in ids.items() if value is not None}
    ends = end_token_ids(metadata)
    return named_ids | ({"eos_token_id": ends if ends[1:] else ends[0]} if ends else {})


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: those that the file names, the end of a text first, and others."""
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type", ())
    named = [*_named_ends(metadata, len(tokens))]
    # Gemma's `</s>` is an HTML tag, and no control token.
    by_text = [
        i
        for i, text in enumerate(tokens)
        if text in _TEXTS_OF_ENDS or (text == "</s>" and kinds[i : i + 1] == [CONTROL])
    ]
    ends = dict.fromkeys([*named, *by_text])
    texts = {tokens[i] for i in ends}
    has_parts = any(marks <= texts for marks in _FORMATS_WITH_PARTS)
    return [i for i in ends if not (has_parts and tokens[i] == "<|end|>")]


def suppressed_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that the file says are never to be sampled."""
    size = len(metadata.get("tokenizer.ggml.tokens", ()))
    return [i for i in _id_list(metadata, "suppress_tokens") if 0 <= i < size]


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id that a key of `tokenizer.ggml` has, None without the key."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and type(value) is not int:
        raise _wrong(name, "an integer", value)
    return value


def _id_list(metadata: Mapping[str, Any], name: str) -> list[int]:
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not is_list(values) or any(type(i) is not int for i in values):
        raise _wrong(name, "a list of integers", values)
    return values


def _wrong(name: str, expected: str, value: Any) -> ValueError:
    kind = type(value).__name__
    if is_list(value):
        kind += f" of {', '.join(sorted({type(item).__name__ for item in value}))}"
    return ValueError(f"its tokenizer.ggml.{name} must be {expected}, is {kind}")


def log_ends(name: str, metadata: Mapping[str, Any]) -> None:
    """Tells of ends that the file does not name."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    named = [*_named_ends(metadata, len(tokens))]
    others = [f"{tokens[i]!r} ({i})" for i in end_token_ids(metadata) if i not in named]
    if others:
        logger.info("%s: answers also end at %s, found by their text", name, ", ".join(others))


def _named_ends(metadata: Mapping[str, Any], size: int) -> Iterator[int]:
    keys = (*_KEYS_OF_ENDS, *_KEYS_OF_FILL_ENDS)
    ids = [token_id(metadata, key) for key in keys]
    # Ollama's converter writes all of them so.
    ids[1:1] = _id_list(metadata, "eos_token_ids")
    yield from dict.fromkeys(i for i in ids if i is not None and 0 <= i < size)
