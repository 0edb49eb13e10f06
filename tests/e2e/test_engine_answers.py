"""Greedy float32 answers of tiny models: the batch, the cache and preemption change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixcache import LLM, SamplingParams
from prefixcache.llm import GenerationResult
from tiny_models import greedy

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


def mixed_params(count: int) -> list[SamplingParams]:
    """Greedy and seeded sampling, of many lengths."""
    return [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.8,
            seed=i,
            top_p=0.95,
            max_tokens=4 + 5 * (i % 6),
            logprobs=0,
            ignore_eos=True,
        )
        for i in range(count)
    ]


def answers(results: list[GenerationResult]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def alone(folder: Path, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Each request by itself, with the cache off."""
    llm = make_llm(folder, enable_prefix_caching=False)
    return [
        answers(llm.generate(prompt, options, use_tqdm=False))[0]
        for prompt, options in zip(prompts, params, strict=True)
    ]


@pytest.mark.parametrize("architecture", ["smollm2", "qwen2", "gemma3", "gpt-oss", "qwen3.5"])
def test_greedy_answers_equal_those_of_transformers(tiny_checkpoint, architecture):
    folder = tiny_checkpoint(architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = branching_prompts(4)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    results = make_llm(folder).generate(prompts, params, use_tqdm=False)
    for prompt, answer in zip(prompts, answers(results), strict=True):
        assert answer == greedy(model, prompt, 24)


def test_a_batch_gives_the_lone_answers_with_the_cache_on_and_off(tiny_checkpoint, seed):
    folder = tiny_checkpoint()
    prompts, params = branching_prompts(16, seed), mixed_params(16)
    expected = alone(folder, prompts, params)
    for caching in (True, False):
        llm = make_llm(folder, enable_prefix_caching=caching, max_num_batched_tokens=64)
        for _ in range(2):
            assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert (llm.control.stats()["hits"] > 0) is caching
        assert llm.control.stats()["blocks_in_use"] == 0


@pytest.mark.parametrize("chunk", [8, 17, 64, 512])
def test_any_chunk_size_gives_the_same_answers(tiny_checkpoint, chunk, seed):
    folder = tiny_checkpoint("qwen3")
    prompts, params = branching_prompts(6, seed), mixed_params(6)
    llm = make_llm(folder, max_num_batched_tokens=chunk, max_num_seqs=8)
    results = answers(llm.generate(prompts, params, use_tqdm=False))
    assert results == alone(folder, prompts, params)


def test_preempted_requests_give_the_lone_answers(tiny_checkpoint: Checkpoint, seed: int) -> None:
    """Nearly every draw of prompts preempts; what is certain is one of ten."""
    folder, params = tiny_checkpoint(), mixed_params(12)
    for turn in range(10):
        prompts = branching_prompts(12, seed + turn)
        llm = make_llm(folder, num_blocks=14, max_model_len=160, max_num_seqs=8)
        results = answers(llm.generate(prompts, params, use_tqdm=False))
        assert results == alone(folder, prompts, params)
        assert llm.control.stats()["blocks_in_use"] == 0
        sample = llm._engine.metrics.registry.get_sample_value
        hits = sample("prefixcache:prefix_cache_hits_total")
        if (
            sample("prefixcache:num_preemptions_total")
            and hits
            and llm.control.stats()["evictions"]
        ):
            return
    pytest.fail("nothing was preempted, hit and evicted")


def test_a_fully_cached_block_multiple_answers_the_same(tiny_checkpoint: Checkpoint) -> None:
    llm = make_llm(tiny_checkpoint())
    prompt = [*range(10, 74)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
    cold, warm = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


def test_prompt_logprobs_equal_those_of_transformers(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
