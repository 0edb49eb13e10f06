"""Headers of GGUF files as published: how texts begin, and what ends an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ModelLoadError
from prefixcache.models.gguf.special_tokens import end_token_ids, suppressed_token_ids
from prefixcache.models.hub import resolve_model
from prefixcache.text.grammar.vocabulary import vocabulary_of
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.tiny_gguf import write_gguf
from support.tiny_models import VOCAB_SIZE, make_model

HEADERS = json.loads((Path(__file__).parents[2] / "data" / "gguf_headers.json").read_text())
_CONTROL, _NORMAL = 3, 1


def tiny_file(header: dict[str, Any], file: Path) -> tuple[Path, dict[int, int]]:
    """The file, and its ids by those of the header, whose vocabulary is larger."""
    plain = header.get("not_control", [])
    texts = {int(i): text for i, text in header["tokens"].items()}
    types = {text: _NORMAL if i in plain else _CONTROL for i, text in texts.items()}
    ids = {i: VOCAB_SIZE - len(texts) + place for place, i in enumerate(texts)}

    def of_file(key: str, value: Any) -> Any:
        if key == "eos_token_ids":
            return [ids[i] for i in value]
        return ids[value] if key.endswith("_token_id") else value

    values = {key: of_file(key, value) for key, value in header["kv"].items()}
    kind = "sentencepiece" if values["model"] != "gpt2" else "smollm"
    model = make_model(header["family"])
    write_gguf(file, model, pre=kind, tokenizer=values, whole_tokens=types)
    return file, ids


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header["name"])
def test_a_published_header_gives_the_ends_of_answers(
    header: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    file, ids = tiny_file(header, tmp_path / "tiny.gguf")
    folder = resolve_model(str(file))
    tokenizer, model = Tokenizer.from_folder(folder), ModelConfig.from_hf(folder)
    turn = header["tokens"][str(header["turn"])]
    ends = vocabulary_of(tokenizer, model).eos_token_ids
    assert ids[header["turn"]] in ends
    if "ends" in header:
        assert {*ends} == {ids[i] for i in header["ends"]}
    assert {*ends} <= tokenizer.special_token_ids
    chat = tokenizer.encode(f"a{turn}b{turn}")
    assert chat.tolist().count(ids[header["turn"]]) == 2
    assert "the" in tokenizer.decode(tokenizer.encode("the cat"))
    if "begins_with_bos" in header:
        bos = ids.get(header["kv"].get("bos_token_id"))
        assert (chat[0] == bos) == header["begins_with_bos"]


@pytest.mark.parametrize(
    ("tokens", "values", "ends"),
    [
        (["a", "<|im_end|>", "<|eom_id|>"], {"eos_token_id": 0}, [0, 1, 2]),
        (["a", "b", "c"], {"eos_token_id": 2, "eot_token_id": 0, "eom_token_id": 1}, [2, 0, 1]),
        (["a", "b"], {"eos_token_id": 9, "eot_token_id": 1}, [1]),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos_token_id": 1}, [1, 2]),
        (["<|end|>", "<|flush|>", "<|calls|>"], {}, [1, 2]),
        (["<|end|>", "<|return|>"], {}, [0, 1]),
        (["</s>", "a"], {"token_type": [3, 1]}, [0]),
        (["</s>", "<|tool_response>"], {"token_type": [1, 3]}, [1]),
        (["a"], {}, []),
    ],
)
def test_ends_are_named_or_found_by_their_text(tokens, values, ends):
    named = {"tokens": tokens, **values}
    assert end_token_ids({f"tokenizer.ggml.{key}": value for key, value in named.items()}) == ends


def test_a_file_may_suppress_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    ids = {"suppress_tokens": [5, VOCAB_SIZE, -1]}
    file = write_gguf(tmp_path / "tiny.gguf", make_model("smollm2"), tokenizer=ids)
    model = ModelConfig.from_hf(resolve_model(str(file)))
    assert model.generation.suppress_tokens == (5,)
    assert suppressed_token_ids({}) == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("eos_token_ids", 3, "must be a list of integers, is int"),
        ("eos_token_ids", "3", "must be a list of integers, is str"),
        ("eos_token_ids", ["3"], "must be a list of integers, is list of str"),
        ("suppress_tokens", [1.5], "must be a list of integers, is list of float"),
        ("eos_token_id", "</s>", "must be an integer, is str"),
        ("eot_token_id", [1], "must be an integer, is list of int"),
        ("bos_token_id", True, "must be an integer, is bool"),
        ("padding_token_id", "0", "must be an integer, is str"),
        ("unknown_token_id", "0", "must be an integer, is str"),
    ],
)
def test_a_value_that_is_no_id_is_refused_by_its_key(
    key: str, value: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    file = write_gguf(tmp_path / "tiny.gguf", make_model("smollm2"), tokenizer={key: value})
    with pytest.raises(ModelLoadError, match=f"its tokenizer.ggml.{key} {problem}$"):
        resolve_model(str(file))
