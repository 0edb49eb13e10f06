"""A model's tokenizer, loaded without transformers wherever its folder holds a `tokenizer.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as _Backend

from prefixcache.config.model_config import read_json_object
from prefixcache.exceptions import ModelLoadError, how_to_install, wrong
from prefixcache.text.tokenization.chat_template import ChatTemplate, load_chat_template
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenIds, as_token_ids

_REPLACEMENT = "\ufffd"
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Encodes text as the model's folder says, and decodes token ids.

    `added_token_ids` are the tokens in addition to the vocabulary proper, by their text.
    `eos_token_ids` holds the token that the tokenizer itself names, where it names one.
    `response_template` tells transformers how to read answers. Safe to share between threads.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.response_template = response_template
        _mark_special(backend, self.special_tokens.values())
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_token_ids = {token.content: i for i, token in added.items()}
        eos = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = () if eos is None else (eos,)
        self._token_bytes = _TokenBytes(backend, frozenset(added))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the last token id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def longest_token(self) -> int:
        """The most characters that a token spells."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def from_folder(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Loads the tokenizer of a Hugging Face style folder.

        `chat_template` is the source of a template instead of the folder's. Raises
        `ModelLoadError` when there is no tokenizer, or when it is broken.
        """
        folder = Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        backend = _load_backend(folder)
        special_tokens = _special_tokens(folder, config)
        if chat_template is None:
            template = load_chat_template(folder, config, special_tokens)
        else:
            template = ChatTemplate(chat_template, special_tokens)
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_template=template,
            response_template=config.get("response_template"),
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> TokenIds:
        """Token ids of `text`; an error names the field `param`.

        Raises `InvalidRequestError` for text that is not valid Unicode (a lone surrogate).
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens, param=param)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[TokenIds]:
        """`encode` of every text. It releases the interpreter's lock."""
        for text in texts:
            check_text(text, param)
        # The backend's `encode` of one text would hold the interpreter until it ends.
        encoded = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [as_token_ids(np.array(encoding.ids, dtype=np.int32)) for encoding in encoded]

    def encode_marked(
        self,
        text: str,
        ends: Sequence[int],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> tuple[TokenIds, list[int]]:
        """`encode`, and how many of the tokens end within the first `ends[i]` characters."""
        check_text(text, param)
        encoded = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        positions = [_tokens_before(encoded, end, len(text)) for end in ends]
        return as_token_ids(np.array(encoded.ids, dtype=np.int32)), positions

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary add nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_long(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """`decode` that lets the interpreter's other threads run, which makes short ones slower."""
        # The backend's `decode` holds the interpreter, its `decode_batch` does not.
        return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None where there is no such token."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds after other text: possibly a part of a character.

        Ids outside the vocabulary add none.
        """
        return self._token_bytes[token_id]


def _tokens_before(encoded: Encoding, end: int, length: int) -> int:
    """The tokens before the one that holds the character at `end`, or the next that is in one."""
    for character in range(end, length):
        token = encoded.char_to_token(character)
        if token is not None:
            return token
    return len(encoded.ids)


def _plain_token(backend: _Backend) -> tuple[int, ...]:
    """One token of plain text, or none where the vocabulary has none."""
    candidates = [*backend.encode("a", add_special_tokens=False).ids[-1:], *range(512)]
    plain = (i for i in candidates if backend.decode([i]).strip().isalnum())
    return tuple([i for i in plain if backend.decode([i]).isascii()][:1])


def check_text(text: str, param: str) -> None:
    """Raises `InvalidRequestError` for text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(
            param, f"is not valid Unicode: a lone surrogate at position {error.start}"
        ) from None


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`params` with the token ids of their bad words in addition to those that they have.

    As in vLLM a word is banned as it is encoded, and also behind a space where that makes another
    token of its beginning. Raises `InvalidRequestError` for a word that is not valid Unicode.
    """
    if not params.bad_words:
        return params
    words = [word.lstrip() for word in params.bad_words]
    plain = _encoded(tokenizer, words)
    spaced = _encoded(tokenizer, [f" {word}" for word in words])
    pairs = zip(plain, spaced, strict=True)
    others = [
        behind
        for alone, behind in pairs
        if alone and len(behind) == len(alone) and behind[0] != alone[0]
    ]
    sequences = (*params.bad_words_token_ids, *filter(None, plain), *others)
    return dataclasses.replace(params, bad_words_token_ids=tuple(dict.fromkeys(sequences)))


def _encoded(tokenizer: Tokenizer, words: list[str]) -> list[tuple[int, ...]]:
    encoded = tokenizer.encode_batch(words, add_special_tokens=False, param="bad_words")
    return [tuple(ids.tolist()) for ids in encoded]


class _TokenBytes(dict[int, bytes]):
    """Bytes of single tokens, each worked out when it is first asked for."""

    def __init__(self, backend: _Backend, added: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._added = added
        self._anchor = _plain_token(backend)
        self._anchor_length = len(backend.decode(self._anchor))
        self._byte_level = "ByteLevel" in repr(backend.decoder)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        text = self._text(token_id)
        spelling = self._spelled(token, token_id) if _REPLACEMENT in text else text.encode()
        return self.setdefault(token_id, spelling)

    def _text(self, token_id: int) -> str:
        """Decoded after plain text, since decoders treat the start of a text in their own way."""
        text = self._backend.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text[self._anchor_length :]

    def _spelled(self, token: str, token_id: int) -> bytes:
        """What the vocabulary's spelling stands for where a token's bytes alone are no text."""
        if token_id in self._added:
            return token.encode()
        if self._byte_level and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return _fallback_byte(token) or token.replace("\u2581", " ").encode()


def _fallback_byte(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return b""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes, inverted: the others follow U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_BYTE_OF = _byte_level_alphabet()


def _load_backend(folder: Path) -> _Backend:
    file = folder / "tokenizer.json"
    try:
        return _Backend.from_file(str(file)) if file.is_file() else _converted_backend(folder)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"The tokenizer in {folder} cannot be read: {error}") from error


def _converted_backend(folder: Path) -> _Backend:
    """A tokenizer that comes as vocabulary files alone; transformers knows how to convert those."""
    if not folder.is_dir():
        raise ModelLoadError(f"There is no folder {folder}.")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelLoadError(
            f"{folder} holds no tokenizer.json, and to convert other files needs transformers: "
            f"{how_to_install('transformers')}."
        ) from error

    loaded = cast(
        "object",
        AutoTokenizer.from_pretrained(  # pyright: ignore[reportUnknownMemberType]
            str(folder), local_files_only=True
        ),
    )
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, _Backend):
        raise ModelLoadError(
            f"{folder} holds no tokenizer.json, and its tokenizer has no fast form."
        )
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; `tokenizer_config.json` wins over the older file."""
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    texts = {name: _token_text(named.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("content")
    return value if isinstance(value, str) else None


def _mark_special(backend: _Backend, tokens: Iterable[str]) -> None:
    """Named tokens are special even where `tokenizer.json` forgot to say so."""
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    missing = [token for token in dict.fromkeys(tokens) if token not in special]
    if missing:
        added = [AddedToken(token, special=True) for token in missing]
        backend.add_special_tokens(added)  # pyright: ignore[reportUnknownMemberType]
