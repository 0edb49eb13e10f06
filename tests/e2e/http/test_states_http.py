"""A tiny random LFM2 and Qwen3.5 through HTTP: chats, completions, and why a turn was computed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from equality import LFM2, WIDE
from support.serving import MODEL, client_of, serve_folder

FLAGS: dict[str, Any] = {"state_block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8}
SHAPES = {"lfm2": LFM2, "qwen3.5": WIDE}
# A few more than 400 tokens need.
NUM_BLOCKS = {"lfm2": 34, "qwen3.5": 56}
WHY = {
    "lfm2": ("window_lost", "a convolution needs"),
    "qwen3.5": ("no_state", "No state is kept there"),
}
STEM = "the cat in the hat and the other cat on the mat " * 8


@pytest.fixture(params=SHAPES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path], architecture: str) -> Path:
    return tiny_checkpoint(architecture, max_position_embeddings=2048, **SHAPES[architecture])


@pytest.fixture
def app(folder: Path) -> Generator[Any, None, None]:
    app, engine = serve_folder(folder, diagnostics_memory=1 << 20, num_blocks=1000, **FLAGS)
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
    app, engine = serve_folder(folder, enable_prefix_caching=False, num_blocks=1000, **FLAGS)
    async with client_of(app) as cold:
        expected, whole = await chat(cold, 4)
    engine.close()
    assert said == expected
    assert warm[0] == whole[0]
    assert sum(warm[1:]) < sum(whole[1:]) / 2


async def test_explain_says_that_nothing_is_kept_there(folder: Path, architecture: str) -> None:
    """Where prompts part, in a pool with room for little more than anchors."""
    sizes = {"num_blocks": NUM_BLOCKS[architecture], "max_model_len": 240}
    app, engine = serve_folder(folder, diagnostics_memory=1 << 20, **FLAGS | sizes)
    ids = [3 + i * 7 % 380 for i in range(400)]
    async with client_of(app) as client:
        for prompt in (ids[:140], ids[150:350]):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        asked = {"model": MODEL, "prompt": ids[:100] + ids[300:]}
        answer = await client.post("/prefix_cache/explain", json=asked)
    engine.close()
    (one,) = answer.json()["prompts"]
    reason, said = WHY[architecture]
    assert one["reason"] == reason, one
    assert said in one["description"]
