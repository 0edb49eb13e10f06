"""A tiny random Gemma 3 and 4 through HTTP, from GGUF files with their own kind of tokenizer."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.models.hub import resolve_model
from support.serving import MODEL, client_of, serve_folder
from support.tiny_gguf import GEMMA_SPECIAL_TOKENS, write_gguf
from support.tiny_models import make_model

BOS, START = GEMMA_SPECIAL_TOKENS.index("<bos>"), GEMMA_SPECIAL_TOKENS.index("<start_of_turn>")
STEM = "the cat in the hat and the other cat on the mat " * 4
HI = {"role": "user", "content": "Hi"}
# Windows shorter than a block, and chunks of a prompt.
FLAGS: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8}


GEMMA3: dict[str, Any] = {"num_hidden_layers": 7, "layer_types": None, "sliding_window": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "3": ("gemma3", GEMMA3),
    "3-pins": ("gemma3", GEMMA3),
    "4": ("gemma4", {}),
    "4-large-pins": ("gemma4-large", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, variant: str) -> Path:
    architecture, arguments = MODELS[variant]
    place = tmp_path_factory.mktemp("gemma")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFIXCACHE_HOME", str(place / "home"))
        model = make_model(architecture, **arguments)
        return resolve_model(str(write_gguf(place / "gemma.gguf", model)))


@pytest.fixture(scope="module")
def app(folder: Path, variant: str) -> Generator[Any, None, None]:
    app, engine = serve_folder(folder, pin_swa_tokens=variant.endswith("pins"), **FLAGS)
    yield app
    engine.close()


async def complete(client: httpx.AsyncClient, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 2}
    answer = await client.post("/v1/completions", json=body | {"ignore_eos": True} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def token_ids(client: httpx.AsyncClient, **fields: Any) -> list[int]:
    answer = await client.post("/tokenize", json={"model": MODEL} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def said(answer: dict[str, Any]) -> tuple[str, list[float]]:
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


async def test_hits_give_the_bits_of_a_cold_run(folder: Path, client: httpx.AsyncClient) -> None:
    prompts = [STEM + "and the dog", STEM + "and the dog", STEM + "but not the dog"]
    warm = [await complete(client, prompt) for prompt in prompts]
    app, engine = serve_folder(folder, enable_prefix_caching=False, **FLAGS)
    async with client_of(app) as cold:
        expected = [await complete(cold, prompt) for prompt in prompts]
    engine.close()
    assert [said(answer) for answer in warm] == [said(answer) for answer in expected]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in warm]
    assert cached[0] == 0
    assert cached[1] >= 64


async def test_a_prompt_begins_with_bos_once(client: httpx.AsyncClient) -> None:
    ids = await token_ids(client, prompt="the cat")
    assert (ids[0], ids.count(BOS)) == (BOS, 1)
    answer = await complete(client, "the cat")
    assert answer["usage"]["prompt_tokens"] == len(ids)


async def test_a_chat_begins_with_bos_once(client: httpx.AsyncClient) -> None:
    ids = await token_ids(client, messages=[HI])
    assert (ids[:2], ids.count(BOS)) == ([BOS, START], 1)
    body = {"model": MODEL, "messages": [HI], "max_tokens": 4, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
async def test_parts_that_are_no_text_are_refused_by_name(
    client: httpx.AsyncClient, path: str, kind: str
) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:x"}}]
    message = {"role": "user", "content": parts}
    answer = await client.post(path, json={"model": MODEL, "messages": [HI, message]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[1].content[1].type"
    assert kind in error["message"]
