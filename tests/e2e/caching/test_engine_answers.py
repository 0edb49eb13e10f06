"""Greedy float32 answers of tiny models: the batch, the cache and preemption change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixcache import LLM, SamplingParams
from prefixcache.llm import GenerationResult
from support.tiny_models import is_greedy, load_model

Checkpoint = Callable[..., Path]


def make_llm(folder: Path, **flags: Any) -> LLM:
    return LLM(str(folder), dtype="float32", **({"num_blocks": 257} | flags))


def branching_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share stems of many lengths, exact block multiples among them."""
    choose = random.Random(seed)
    stem = [choose.randrange(3, 384) for _ in range(96)]
    return [
        stem[: choose.choice([0, 5, 16, 31, 32, 48, 64, 96])]
        + [choose.randrange(3, 384) for _ in range(choose.randrange(1, 24))]
        for _ in range(count)
    ]


def answers(results: list[GenerationResult]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize(
    "architecture", ["smollm2", "qwen2", "gemma2", "gemma3", "gpt-oss", "qwen3.5"]
)
def test_greedy_answers_equal_those_of_transformers(tiny_checkpoint, architecture):
    folder = tiny_checkpoint(architecture)
    model = load_model(folder)
    prompts = branching_prompts(4)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    results = make_llm(folder).generate(prompts, params, use_tqdm=False)
    for prompt, answer in zip(prompts, answers(results), strict=True):
        assert len(answer) == 24
        assert is_greedy(model, prompt, answer)


def test_prompt_logprobs_equal_those_of_transformers(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    model = load_model(folder)
    prompt = branching_prompts(1, seed=5)[0] + [*range(20, 90)]
    llm = make_llm(folder, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    result = llm.generate(prompt, params, use_tqdm=False)[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    assert result.prompt_logprobs is not None
    assert result.num_cached_tokens == 0
    for position, entry in enumerate(result.prompt_logprobs[1:]):
        token = prompt[position + 1]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(expected[position, token].item(), abs=1e-4)
        assert set(expected[position].topk(2).indices.tolist()) <= set(entry)
