"""The default model as shipped: tokenizer, chat template, and answers equal to transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefixcache.cli.main import app
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.config.model_config import GenerationDefaults, ModelConfig
from prefixcache.models.hub import is_downloaded, read_config, resolve_model
from support.dequantized import save_dequantized
from support.loaded import torch_model
from support.paged_driver import PagedDriver
from support.repeatable import bounded

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_downloaded(DEFAULT_MODEL), reason="prefixcache download was not run"),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(DEFAULT_MODEL)


def test_chat_template_is_chatml_with_the_models_own_system_prompt(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode("<|im_start|><|im_end|><|endoftext|>") == [1, 2, 0]


@pytest.mark.parametrize(
    "text",
    [
        "Hello  world, it's 12:30 on 2024-05-06.",
        "a\n\n  b\t c   1,234.56%   ",
        "Zwölf Boxkämpfer; 天地玄黃 ½ ² ٣٤ 🦙🏽",
        "def f(x):\n    return x**2  # isn't it\r\n",
    ],
)
def test_words_are_cut_as_the_models_authors_do(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs = pre_tokenizers.Sequence([digits, words]).pre_tokenize_str(text)
    assert [piece for piece, _ in ours] == [piece for piece, _ in theirs]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_greedy_tokens_equal_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    config = ModelConfig.from_hf(folder)
    model = torch_model(folder, config=config)
    driver = PagedDriver(model)
    ours = driver.generate(prompt, bounded(usual=16, long=64))
    assert "Tokyo" in tokenizer.decode(ours)

    dense = save_dequantized(folder, tmp_path / "dense")
    theirs = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt + ours])).logits[0]
    logits = driver.forward([(0, 0, prompt + ours)])
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)
    assert ours == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        ["The capital of Japan is", "--max-tokens", "4"],
        ["--chat", "What is the capital of Japan?"],
    ],
    ids=["text", "chat"],
)
def test_what_a_newcomer_tries_first_makes_sense(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exit_code == 0
    assert "Tokyo" in result.output
    assert len(result.output) < 100


def test_it_is_greedy_where_nothing_is_said(folder: Path) -> None:
    assert ModelConfig.from_hf(folder).generation == GenerationDefaults()
    generation = read_config(DEFAULT_MODEL, folder).generation
    assert generation == GenerationDefaults(temperature=0.0)
    assert read_config(str(folder), folder).generation == GenerationDefaults()
