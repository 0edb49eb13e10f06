"""The tokenizer of a GGUF file: ids and text as transformers makes of the same file."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from prefixcache.exceptions import ModelLoadError, UnsupportedModelError
from prefixcache.models.gguf.header import read_header
from prefixcache.models.gguf.tokenizer import write_tokenizer
from prefixcache.text.tokenization.tokenizer import Tokenizer as ServedTokenizer
from support.dialogues import read_dialogues
from support.repeatable import bounded
from support.tiny_gguf import GEMMA_SPECIAL_TOKENS, write_gguf
from support.tiny_models import SPECIAL_TOKENS, make_model

# Files by name: the model, how its text is cut, and flags of its tokenizer.
FILES: dict[str, tuple[str, str, dict[str, object]]] = {
    **{
        pre: ("smollm2", pre, {"add_bos_token": bos, "add_eos_token": not bos})
        for pre, bos in zip(
            ("llama-bpe", "qwen2", "qwen35", "gpt-4o", "tekken"), itertools.cycle((True, False))
        )
    },
    "sentencepiece": ("smollm2", "sentencepiece", {}),
    "sentencepiece without BOS": ("smollm2", "sentencepiece", {"add_bos_token": False}),
    "gemma": ("gemma3", "sentencepiece", {"add_bos_token": True}),
}
HARD = [
    "",
    " ",
    "   three spaces   and\ttabs\r\n\r\nlines",
    "it's WE'LL I'M don't 'Ll 12345 3.14 \u0661\u0662\u0663 \u00b2",
    "camelCase HTTPServer \u01c5abc e\u0301le\u0300ve na\u00efve",
    "\u5929\u6c14 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31",
    "\U0001f999\u200d\U0001f9b0 \u0000\u0007",
    *SPECIAL_TOKENS,
    *(f"a {token}b" for token in [*SPECIAL_TOKENS, *GEMMA_SPECIAL_TOKENS, "\u2581", "<0x41>"]),
]


def random_texts(seed: int, count: int) -> list[str]:
    """Strings of characters of all planes, with words, digits, spaces and special tokens."""
    rng = np.random.default_rng(seed)
    usual = [*"the cat's in 1234 \n\t  \u2581'", *SPECIAL_TOKENS, *GEMMA_SPECIAL_TOKENS]
    planes = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x1100), (0x2000, 0xD800), (0xE000, 0x20000)]

    def piece() -> str:
        if rng.random() < 0.5:
            return usual[rng.integers(len(usual))]
        return chr(rng.integers(*planes[rng.integers(len(planes))]))

    return ["".join(piece() for _ in range(rng.integers(1, 24))) for _ in range(count)]


@pytest.fixture(scope="module", params=FILES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Tokenizer]:
    """transformers' tokenizer of a file, and the one that is written for it."""
    from transformers import AutoTokenizer

    family, pre, flags = FILES[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    model = make_model(family)
    file = write_gguf(folder / "tiny.gguf", model, pre=pre, tokenizer=flags)
    write_tokenizer(folder, read_header(file).metadata, 512)
    theirs = AutoTokenizer.from_pretrained(str(folder), gguf_file=file.name)
    return theirs, Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_ids_and_text_are_those_of_transformers(pair: tuple[Any, Tokenizer], seed: int) -> None:
    theirs, ours = pair
    spoken = [str(message["content"]) for chat in read_dialogues()[:4] for message in chat]
    count = bounded(usual=1_500, long=10_000)
    for text in [*HARD, *spoken, *random_texts(seed, count)]:
        expected = theirs.backend_tokenizer.encode(text)
        found = ours.encode(text)
        assert found.ids == expected.ids, ascii(text)
        for skip in (False, True):
            decoded = theirs.backend_tokenizer.decode(found.ids, skip_special_tokens=skip)
            assert ours.decode(found.ids, skip_special_tokens=skip) == decoded, ascii(text)


def metadata(**changes: object) -> dict[str, Any]:
    """Of a byte-level vocabulary of five tokens; None leaves a key out."""
    values: dict[str, object] = {
        "model": "gpt2",
        "tokens": ["a", "b", "ab", "<x>", "\u0120"],
        "token_type": [1, 1, 1, 3, 1],
        "merges": ["a b"],
        "bos_token_id": 3,
    }
    kept = {key: value for key, value in (values | changes).items() if value is not None}
    return {f"tokenizer.ggml.{key}": value for key, value in kept.items()}


def written(folder: Path, **changes: object) -> Tokenizer:
    write_tokenizer(folder, metadata(**changes), 64)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_a_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    """As those of Hermes have."""
    names = {"": "no {{ messages }}", ".tool_use": "{{ tools }}"}
    templates = {f"tokenizer.chat_template{name}": text for name, text in names.items()}
    write_tokenizer(tmp_path, metadata() | templates, 64)
    template = ServedTokenizer.from_folder(tmp_path).chat_template
    assert template is not None
    assert (template.source, template.for_tools) == tuple(names.values())
    assert template.shows_tools


def test_flags_of_a_file_and_llama_cpps_defaults(tmp_path: Path) -> None:
    assert written(tmp_path).encode("ab").ids == [2]
    assert written(tmp_path, add_bos_token=True).encode("ab").ids == [3, 2]
    assert written(tmp_path, pre="llama-bpe").encode("ab").ids == [3, 2]
    assert written(tmp_path, pre="llama-bpe", add_bos_token=False).encode("ab").ids == [2]
    assert written(tmp_path, merges=["b a"], tokens=["a", "b", "ba", "<x>", "ab"]).encode(
        "ab"
    ).ids == [0, 1]
    # Llama 3's words that are tokens need no merge.
    assert written(
        tmp_path, pre="llama-bpe", add_bos_token=False, merges=["b a"],
        tokens=["a", "b", "ba", "<x>", "ab"],
    ).encode("ab").ids == [4]  # fmt: skip
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["model_max_length"]) == ("<x>", 64)


def cut(*patterns: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, in_bytes])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS_APART = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How the tokenizer.json of a model with such files cuts text, whether a word that is a token needs
# no merge, and whether texts begin with BOS by default, as in llama.cpp's llama-vocab.cpp.
BY_NAME: dict[str, tuple[Any, bool, bool]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "exaone4", "mellum"), (_GPT2, False, False)),
    **dict.fromkeys(("a.x-4.0", "trillion", "granite-docling"), (_GPT2, False, False)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (_DIGITS_APART, False, False)),
    **dict.fromkeys(("command-r", "minerva-7b"), (_DIGITS_APART, False, False)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), (cut(_LLAMA3), True, True)),
    **dict.fromkeys(("lfm2", "falcon-h1", "pixtral", "midm-2.0"), (cut(_LLAMA3), True, True)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), (cut(_LLAMA3), False, False)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (cut(_LLAMA3), True, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (cut(_QWEN2), False, False)),
    "kormo": (cut(_QWEN2), False, False),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (cut(_O200K), False, False)),
    "seed-coder": (cut(_SEED), False, False),
    "minicpm5": (cut(r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), True, False),
}


@pytest.mark.parametrize("pre", BY_NAME)
def test_text_is_cut_as_the_name_says(pre: str, tmp_path: Path, seed: int) -> None:
    theirs, whole_words_first, adds_bos = BY_NAME[pre]
    tokenizer = written(tmp_path, pre=pre)
    for text in [*HARD, "1234567 a!\n\nb", *random_texts(seed, bounded(usual=200, long=5_000))]:
        cut_here = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert cut_here == theirs.pre_tokenize_str(text), ascii(text)
    model = json.loads(tokenizer.to_str())["model"]
    assert (model["ignore_merges"], tokenizer.encode("ab").ids[0] == 3) == (
        whole_words_first,
        adds_bos,
    )


def test_each_supported_name_is_tested(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        written(tmp_path, pre="unknown")
    others = {"default", *(pre for _, pre, _ in FILES.values())} - {"sentencepiece"}
    names = str(refused.value).partition("Supported: ")[2].rstrip(".").split(", ")
    assert {*names} == {*BY_NAME, *others}


@pytest.mark.parametrize(
    ("architecture", "values", "begins", "warning"),
    [
        ("llama", {}, False, "names no tokenizer.ggml.pre"),
        ("llama", {"pre": "qwen2", "add_bos_token": False}, False, ""),
        ("gemma4", {"pre": "qwen2", "add_bos_token": False}, True, "as Gemma 4 needs BOS"),
    ],
)
def test_what_a_file_lacks_or_says_wrongly_is_warned_of(
    architecture, values, begins, warning, tmp_path, caplog
):
    write_tokenizer(tmp_path, metadata(**values) | {"general.architecture": architecture}, 64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.encode("ab").ids[0] == 3) == begins
    assert warning in caplog.text
    assert bool(caplog.records) == bool(warning)


@pytest.mark.parametrize(
    ("tokens", "form"), [(["a", "b"], "a b"), (["#version", "b"], ["#version", "b"])]
)
def test_merges_are_written_in_the_form_that_is_read_sooner_where_it_holds_them(
    tokens, form, tmp_path
):
    """As one text of two tokens; one that begins so would be taken for a comment."""
    spelled = [*tokens, "".join(tokens), "<x>", "\u0120"]
    read = json.loads(written(tmp_path, tokens=spelled, merges=[" ".join(tokens)]).to_str())
    assert read["model"]["merges"] == [tokens]
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"] == [form]


def test_a_user_defined_token_is_whole_and_not_special(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, token_type=[1, 1, 1, 4, 1], bos_token_id=None)
    assert tokenizer.encode("a<x>b").ids == [0, 3, 1]
    assert tokenizer.decode([0, 3, 1]) == "a<x>b"


def test_a_sentencepiece_file_says_whether_a_space_comes_first(tmp_path: Path) -> None:
    spelled = {"model": "llama", "tokens": ["a", "\u2581", "\u2581a", "<x>"], "merges": None}
    spelled |= {"scores": [-1.0, -2.0, 0.0, 0.0], "token_type": [1, 1, 1, 3]}
    assert written(tmp_path, **spelled).encode("a").ids == [3, 2]
    tokenizer = written(tmp_path, **spelled, add_space_prefix=False)
    assert tokenizer.encode("a").ids == [3, 0]
    assert tokenizer.decode([2]) == " a"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedModelError, "tokenizer.ggml.model 'bert'.*gpt2, llama"),
        ({"pre": "odd"}, UnsupportedModelError, "tokenizer.ggml.pre 'odd'.*llama-bpe"),
        ({"tokens": None}, ModelLoadError, "lacks tokenizer.ggml.tokens"),
        ({"model": "llama", "tokens": ["a" * (1 << 22)]}, ModelLoadError, "4194304 characters"),
        ({"bos_token_id": 5}, ModelLoadError, "bos_token is 5 of 5 tokens"),
        ({"merges": ["a"]}, ModelLoadError, "the merge 'a' is not two tokens"),
        ({"merges": ["a q"]}, ModelLoadError, "its tokenizer cannot be converted"),
    ],
)
def test_a_broken_tokenizer_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_tokenizer(tmp_path, metadata(**changes), 64)


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from prefixcache.models.gguf.tokenizer import write_tokenizer;"
        f"write_tokenizer(Path({str(tmp_path)!r}), {metadata()!r}, 64);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
