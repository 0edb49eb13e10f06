"""The tokenizer against transformers' own, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer

from prefixcache.exceptions import InvalidRequestError, ModelLoadError
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.tiny_models import EOS, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def _edit(folder: Path, tmp_path: Path, name: str, **changes: object) -> Path:
    for file in folder.iterdir() if folder != tmp_path else ():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))
    return tmp_path


@pytest.mark.parametrize(
    "text", ["A block", " 🦙 天地 Zwölf", "<|im_start|>user\nhi<|im_end|>", "\x00"]
)
@pytest.mark.parametrize("special", [True, False])
def test_ids_equal_those_of_transformers(folder, tokenizer, text, special):
    theirs = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(text, add_special_tokens=special).tolist() == theirs.encode(
        text, add_special_tokens=special
    )


@pytest.mark.parametrize("flag", [True, False])
def test_tokenizer_json_alone_says_which_special_tokens_are_added(folder, tmp_path, flag):
    edited = _edit(folder, tmp_path, "tokenizer_config.json", add_bos_token=flag)
    theirs = AutoTokenizer.from_pretrained(edited).encode("hello")
    assert Tokenizer.from_folder(edited).encode("hello").tolist() == theirs
    rule = {
        "type": "TemplateProcessing",
        "pair": [],
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    edited = _edit(edited, edited, "tokenizer.json", post_processor=rule)
    assert Tokenizer.from_folder(edited).encode("hello").tolist() == [1, *theirs]
    assert AutoTokenizer.from_pretrained(edited).encode("hello") == [1, *theirs]


@given(text=st.text())
def test_decode_gives_the_text_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_special_tokens_are_shown_only_when_asked(tokenizer):
    ids = tokenizer.encode(f"hi{EOS}").tolist()
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"hi{EOS}"
    assert tokenizer.token_bytes(2) == EOS.encode()


def test_unknown_ids_add_nothing(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""
    assert tokenizer.token(tokenizer.vocab_size) is None
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_the_named_eos_token_has_an_id(tokenizer):
    assert tokenizer.eos_token_ids == (2,)
    assert Tokenizer(Backend(models.BPE({"a": 0}, []))).eos_token_ids == ()


def test_vocab_size_is_one_more_than_the_last_id(tokenizer):
    assert tokenizer.token(tokenizer.vocab_size - 1) is not None


def test_a_lone_surrogate_is_refused_by_field(tokenizer):
    with pytest.raises(InvalidRequestError, match="position 1") as caught:
        tokenizer.encode("a\ud800b", param="messages")
    assert caught.value.param == "messages"


def test_named_tokens_become_special_where_the_file_forgot():
    backend = Backend(models.BPE({"<end>": 0, "a": 1}, []))
    backend.add_tokens(["<end>"])
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<end>"})
    assert tokenizer.special_token_ids == {0}
    assert tokenizer.eos_token_ids == (0,)


def test_byte_fallback_tokens_have_their_byte():
    backend = Backend(models.BPE({"<0xE4>": 0, "▁a": 1, "a": 2}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(i) for i in range(3)] == [b"\xe4", b" a", b"a"]


def test_a_token_adds_what_its_decoder_makes_of_it():
    backend = Backend(models.WordPiece({"[UNK]": 0, "pre": 1, "##fix": 2}))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(i) for i in (1, 2)] == [b" pre", b"fix"]


def test_the_replacement_character_and_broken_bytes_are_distinguished(tokenizer):
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.add_tokens(["\ufffd", "é"])
    added = Tokenizer(backend)
    assert added.token_bytes(backend.token_to_id("\ufffd")) == "\ufffd".encode()
    assert added.token_bytes(backend.token_to_id("é")) == "é".encode()
    broken = added.encode("🦙", add_special_tokens=False)[0]
    assert added.token_bytes(broken)[:1] == b"\xf0"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_broken_file_is_a_load_error(folder, tmp_path, name, content):
    _edit(folder, tmp_path, name)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_that_is_not_there_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="nowhere"):
        Tokenizer.from_folder(tmp_path / "nowhere")
