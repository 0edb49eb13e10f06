"""The tokenizer of a GGUF file, built from its metadata without transformers.

llama.cpp's `llama-vocab.cpp` says what the keys mean. Two kinds of vocabulary are supported, by
`tokenizer.ggml.model`: `gpt2` (byte-level byte-pair encoding), and `llama` or `gemma4`
(SentencePiece with byte fallback). `tokenizer.ggml.pre` names how a byte-level vocabulary cuts text
before merging.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from prefixcache.exceptions import ModelLoadError, UnsupportedModelError
from prefixcache.models.gguf.special_tokens import CONTROL, end_token_ids, token_id

logger = logging.getLogger(__name__)

_USER_DEFINED = 4  # of tokenizer.ggml.token_type
_MAX_TOKEN_LENGTH = 4096  # finding the merges of a token takes the square of its length
_SPACE = "\u2581"  # how SentencePiece spells a space
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_DIGITS_APART = r"\p{N}"
_GPT2_WORDS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as OpenAI's
)
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """Patterns that cut text into words, one after the other, and llama.cpp's defaults with them.

    `whole_words_first`: a word that is a token is not merged out of its parts.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    adds_bos: bool = False


_GPT2 = _PreTokenizer((_GPT2_WORDS,))
_SMOLLM = _PreTokenizer((_DIGITS_APART, _GPT2_WORDS))
_LLAMA3 = _PreTokenizer((_LLAMA3_WORDS,), whole_words_first=True, adds_bos=True)
_SMAUG = _PreTokenizer((_LLAMA3_WORDS,))
_QWEN2 = _PreTokenizer((_LLAMA3_WORDS.replace("{1,3}", ""),))
_QWEN35 = _PreTokenizer(
    (
        _LLAMA3_WORDS.replace("{1,3}", "")
        .replace(r"\p{L}+", r"[\p{L}\p{M}]+", 1)
        .replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
    )
)
_TEKKEN = _PreTokenizer(
    (_GPT4O_WORDS.replace(_ENDING, "").replace("{1,3}", ""),), whole_words_first=True, adds_bos=True
)
_GPT4O = _PreTokenizer((_GPT4O_WORDS,))
_SEED = _PreTokenizer(
    (
        _LLAMA3_WORDS.replace("{1,3}", "").replace(
            r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"
        ),
    )
)
_MINICPM = _PreTokenizer(
    (r"\p{N}{1,3}", _LLAMA3_WORDS.replace("{1,3}", "+")), whole_words_first=True
)
# By the name that tokenizer.ggml.pre gives.
_PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "exaone4"), _GPT2),
    **dict.fromkeys(("mellum", "a.x-4.0", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _SMAUG),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    **dict.fromkeys(("glm4", "chatglm-bpe"), replace(_LLAMA3, adds_bos=False)),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "seed-coder": _SEED,
    "minicpm5": _MINICPM,
}


def write_tokenizer(folder: Path, metadata: Mapping[str, Any], max_length: int) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the chat template, where there is one.

    `metadata` are the file's key-value pairs. Raises `UnsupportedModelError` for another kind of
    vocabulary, and `ModelLoadError` for a broken one or a file that cannot be written.
    """
    try:
        _write(folder, metadata, max_length)
    except UnsupportedModelError:
        raise
    except Exception as error:  # tokenizers has no exceptions of its own
        raise ModelLoadError(f"its tokenizer cannot be converted: {error}") from error


def _write(folder: Path, metadata: Mapping[str, Any], max_length: int) -> None:
    vocabulary = _Vocabulary(metadata)
    text = json.dumps(_quickly_read(vocabulary.tokenizer()), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["model_max_length"] = max_length
    template, for_tools = (
        metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use")
    )
    if template is not None and for_tools is not None:
        config["chat_template"] = {"default": template, "tool_use": for_tools}
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(config | vocabulary.named, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _quickly_read(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's JSON with each merge as one text, which takes two thirds of the time to read.

    Tokens with spaces, and what begins as a comment does, cannot be written so.
    """
    content = json.loads(tokenizer.to_str())
    merges: list[list[str]] = content["model"].get("merges", [])
    needs_pairs = any(" " in "".join(pair) or pair[0].startswith("#version") for pair in merges)
    if merges and not needs_pairs:
        content["model"]["merges"] = [" ".join(pair) for pair in merges]
    return content


class _Vocabulary:
    """The tokens of a file by id, and the texts of those that have a name (`named`)."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._kind = self._get("model")
        self._tokens: list[str] = self._get("tokens", ())
        if not self._tokens:
            raise ValueError("it lacks tokenizer.ggml.tokens")
        longest = max(map(len, self._tokens))
        if longest > _MAX_TOKEN_LENGTH:
            raise ValueError(f"a token has {longest} characters, more than {_MAX_TOKEN_LENGTH}")
        ids = {name: token_id(metadata, key) for name, key in _NAMED_TOKENS.items()}
        self.named = {name: self._token(name, i) for name, i in ids.items() if i is not None}

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _token(self, name: str, token_id: int) -> str:
        if not 0 <= token_id < len(self._tokens):
            raise ValueError(f"its {name} is {token_id} of {len(self._tokens)} tokens")
        return self._tokens[token_id]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer with all tokens that it must keep whole."""
        if self._kind == "gpt2":
            tokenizer, adds_bos = self._byte_level()
        elif self._kind in ("llama", "gemma4"):
            tokenizer, adds_bos = self._sentencepiece()
        else:
            raise UnsupportedModelError(
                f"tokenizer.ggml.model {self._kind!r} is not supported. "
                "Supported: gpt2, llama, gemma4."
            )
        self._add_whole_tokens(tokenizer)
        tokenizer.post_processor = self._post_processor(adds_bos)
        return tokenizer

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        name = self._get("pre")
        if name is None:
            logger.warning(
                "The file names no tokenizer.ggml.pre, so text is cut as GPT-2 cuts it. If that is "
                "wrong, its answers are worse than the model's: get a newer file of the model."
            )
            name = "default"
        pre = _PRE_TOKENIZERS.get(name)
        if pre is None:
            raise UnsupportedModelError(
                f"tokenizer.ggml.pre {name!r} is not supported. "
                f"Supported: {', '.join(_PRE_TOKENIZERS)}."
            )
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        # Tokens that are not cut may have other characters, as DeepSeek's have.
        uncut = {*self._special(), *self._of_kind(_USER_DEFINED)}
        spelled = {
            token if token in uncut or alphabet.issuperset(token) else _in_bytes(token): i
            for i, token in enumerate(self._tokens)
        }
        model = models.BPE(spelled, self._merges(), ignore_merges=pre.whole_words_first)
        tokenizer = Tokenizer(model)
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, pre.adds_bos

    def _sentencepiece(self) -> tuple[Tokenizer, bool]:
        """llama.cpp's rules: a space stands before the text unless the file says otherwise."""
        is_gemma = str(self._metadata.get("general.architecture", "")).startswith("gemma")
        if is_gemma:  # writes tokens of several spaces as such
            self._tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in self._tokens]
        vocabulary = {token: i for i, token in enumerate(self._tokens)}
        # Gemma's scores do not follow its merges, the order of its tokens does.
        scores = None if is_gemma else self._get("scores")
        merges = self._merges() if self._get("merges") else _merges_of(vocabulary, scores)
        unknown = self.named.get("unk_token") if is_gemma else None
        model = models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
        tokenizer = Tokenizer(model)
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if is_gemma:
            tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        else:
            begins = self._get("add_space_prefix", True)
            scheme = "first" if begins else "never"
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
            steps += [decoders.Strip(content=" ", left=1)] if begins else []
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer, True

    def _merges(self) -> list[tuple[str, str]]:
        return [_pair(merge) for merge in self._get("merges", ())]

    def _of_kind(self, kind: int) -> list[str]:
        kinds: Sequence[int] = self._get("token_type", ())
        return [t for t, of_t in zip(self._tokens, kinds, strict=False) if t and of_t == kind]

    def _special(self) -> list[str]:
        control = self._of_kind(CONTROL)
        ends = [self._tokens[i] for i in end_token_ids(self._metadata)]
        return [t for t in dict.fromkeys([*control, *self.named.values(), *ends]) if t]

    def _add_whole_tokens(self, tokenizer: Tokenizer) -> None:
        """Control tokens are special; those that a user defined are kept whole alone."""
        special = self._special()
        tokenizer.add_special_tokens(_added(special, special=True))  # pyright: ignore[reportUnknownMemberType]
        others = [t for t in self._of_kind(_USER_DEFINED) if t not in special]
        tokenizer.add_tokens(_added(others, special=False))  # pyright: ignore[reportUnknownMemberType]

    def _post_processor(self, adds_bos: bool) -> processors.TemplateProcessing:
        """Adds BOS and EOS as the file says; `adds_bos` is what its kind does by default."""
        bos, eos = self.named.get("bos_token"), self.named.get("eos_token")
        first = [bos] if bos is not None and self._adds_bos(adds_bos) else []
        last = [eos] if eos is not None and self._get("add_eos_token", False) else []
        return processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[
                *first,
                "$A",
                *last,
                *(f"{t}:1" for t in first),
                "$B:1",
                *(f"{t}:1" for t in last),
            ],
            special_tokens=[(t, self._tokens.index(t)) for t in dict.fromkeys([*first, *last])],
        )

    def _adds_bos(self, by_default: bool) -> bool:
        adds = self._get("add_bos_token", by_default)
        if adds or self._metadata.get("general.architecture") != "gemma4":
            return adds
        logger.warning("tokenizer.ggml.add_bos_token is false: ignored, as Gemma 4 needs BOS")
        return True


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise ValueError(f"the merge {merge[:80]!r} is not two tokens")
    return left, right


def _added(tokens: Iterable[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(token, normalized=False, special=special) for token in tokens]


def _in_bytes(token: str) -> str:
    """A token in the characters that byte-level vocabularies have for bytes."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in last.pre_tokenize_str(token))


def _merges_of(
    vocabulary: Mapping[str, int], scores: Sequence[float] | None
) -> list[tuple[str, str]]:
    """The merges of a vocabulary without any: each token of two others, best score first.

    Without `scores` a lower id is better.
    """
    merges: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, i in vocabulary.items():
        rank = float(i) if scores is None else -scores[i]
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in vocabulary and pair[1] in vocabulary:
                # Of equal ranks the longer first part comes first, as transformers has it.
                merges.append((rank, -cut, cut - len(token), i, pair))
    return [entry[-1] for entry in sorted(merges)]
