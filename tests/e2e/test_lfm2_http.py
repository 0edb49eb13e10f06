"""A tiny random LFM2 through HTTP: chats and completions, and why a turn was computed again."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from equality import LFM2
from serving import MODEL, client_of, serve_folder

FLAGS: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8}
STEM = "the cat in the hat and the other cat on the mat " * 8


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("lfm2", max_position_embeddings=2048, **LFM2)


@pytest.fixture
def app(folder: Path) -> Generator[Any, None, None]:
    app, engine = serve_folder(folder, diagnostics_memory=1 << 20, **FLAGS)
    yield app
    engine.close()


async def say(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}
    more = {"logprobs": True, "ignore_eos": True}
    answer = await client.post("/v1/chat/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(client: httpx.AsyncClient, turns: int) -> tuple[list[Any], list[int]]:
    """What was said, with log probabilities, and the tokens of each prompt that were computed."""
    messages, said, computed = list[dict[str, str]](), list[Any](), list[int]()
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}: {STEM[: 40 + 3 * turn]}"})
        answer = await say(client, messages)
        usage, choice = answer["usage"], answer["choices"][0]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        computed.append(usage["prompt_tokens"] - cached)
        said.append(choice["logprobs"])
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    return said, computed


async def test_a_chat_says_the_same_with_the_cache_and_computes_little(
    folder: Path, client: httpx.AsyncClient
) -> None:
    said, warm = await chat(client, 4)
    app, engine = serve_folder(folder, enable_prefix_caching=False, **FLAGS)
    async with client_of(app) as cold:
        expected, whole = await chat(cold, 4)
    engine.close()
    assert said == expected
    assert warm[0] == whole[0]
    assert sum(warm[1:]) < sum(whole[1:]) / 2


async def test_a_completion_streams_what_it_says_at_once(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": STEM, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    streamed = await client.post("/v1/completions", json=body | {"stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    parts = [json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]"]
    assert "".join(parts) == whole
    assert whole


async def test_explain_says_that_a_convolution_keeps_no_inputs_there(folder: Path) -> None:
    """Where prompts part, in a pool with room for little more than anchors."""
    app, engine = serve_folder(folder, diagnostics_memory=1 << 20, **FLAGS | {"num_blocks": 34})
    ids = [3 + i * 7 % 380 for i in range(400)]
    async with client_of(app) as client:
        for prompt in (ids[:140], ids[150:350]):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        asked = {"model": MODEL, "prompt": ids[:100] + ids[300:]}
        answer = await client.post("/prefix_cache/explain", json=asked)
    engine.close()
    (one,) = answer.json()["prompts"]
    assert one["reason"] == "window_lost", one
    assert "a convolution needs" in one["description"]
