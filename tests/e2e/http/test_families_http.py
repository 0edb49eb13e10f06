"""A tiny random model of each family over HTTP: calls in its own form, and completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.chat_models import QUESTION, TOOLS, with_special_tokens
from support.repeatable import slow
from support.serving import MODEL, served_folder

# The family's model, and the template whose form of calls is its own.
FAMILIES = {
    "qwen3-moe": "qwen3",
    "olmoe": "smollm2",
    "gpt-oss": "gpt-oss",
    "lfm2": "lfm2",
    "lfm2-moe": "lfm2",
    "phi3": "phi4-mini-own",
    "olmo2": "smollm2",
    "olmo3": "olmo3",
    "exaone4": "exaone4",
    "arcee": "deepseek-v31",
    "granite": "granite3",
    "granite4": "qwen2",
    "granite4-h": "qwen2",
    "nemotron-h": "qwen2",
    "smollm3": "qwen3",
    "ministral3": "ministral3",
    "seed-oss": "seed-oss",
    "gemma3": "gemma4",
    "qwen3.5": "qwen3-coder",
}
# Of each way to write calls that no other has, in `make test`.
QUICK = {"gpt-oss", "lfm2", "ministral3", "gemma3", "qwen3.5"}
PROMPT = "the cat in the hat and the other cat on the mat " * 4
OPTIONS = {"num_blocks": 300, "block_size": 16, "max_num_batched_tokens": 512}


@pytest.mark.parametrize("family", [one if one in QUICK else slow(one) for one in FAMILIES])
async def test_a_family_calls_tools_and_completes(tiny_checkpoint: Callable[..., Path], family):
    template = FAMILIES[family]
    folder = tiny_checkpoint(family, max_position_embeddings=4096, vocab_size=416)
    folder = with_special_tokens(folder, template)
    async with served_folder(folder, **OPTIONS) as (http, _):
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
        )
        await _check_calls(client, _unthinking(Tokenizer.from_folder(folder), template))
        await _check_completion(client)


def _unthinking(tokenizer: Tokenizer, template: str) -> dict[str, Any]:
    """A random model never ends what it thinks: it is kept from beginning."""
    if template == "gpt-oss":
        begun = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] == b"a"]
        banned = [*begun, tokenizer.added_token_ids["<|message|>"]]
    else:
        banned = [one for text, one in tokenizer.added_token_ids.items() if text == "[THINK]"]
    silent = {"chat_template_kwargs": {"enable_thinking": False, "thinking_budget": 0}}
    return {"logit_bias": {str(one): -100 for one in banned}, "extra_body": silent}


async def _check_calls(client: openai.AsyncOpenAI, options: dict[str, Any]) -> None:
    """Whole and streamed alike, and the second prompt is a hit."""
    asked = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    asked |= {"temperature": 1, "seed": 5, "max_tokens": 200, "parallel_tool_calls": False}
    whole = await client.chat.completions.create(**asked, **options)
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None), choice
    (call,) = choice.message.tool_calls
    given = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert given.keys() == {"city", "unit"}
        assert len(given["city"]) <= 12
        assert given["unit"] in ("C", "F")
    else:
        assert (call.function.name, given) == ("get_time", {})
    streamed, usage = [], None
    chunks = await client.chat.completions.create(
        **asked, **options, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in chunks:
        usage = chunk.usage or usage
        for one in chunk.choices:
            assert not one.delta.content
            streamed += one.delta.tool_calls or ()
    assert streamed[0].function.name == call.function.name
    assert "".join(one.function.arguments for one in streamed) == call.function.arguments
    # Not all where a layer keeps states: those stand at some blocks alone.
    assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens / 2


async def _check_completion(client: openai.AsyncOpenAI) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    asked |= {"extra_body": {"ignore_eos": True}}
    whole = await client.completions.create(**asked)
    chunks = await client.completions.create(**asked, stream=True)
    texts = [chunk.choices[0].text async for chunk in chunks]
    assert len(texts) > 4
    assert "".join(texts) == whole.choices[0].text
