"""Embeddings and ranks: what `transformers` computes, the same bits with hits, clear refusals."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from prefixcache import LLM
from prefixcache.config.pooling_mode import POOLING_FILE, read_pooling
from prefixcache.exceptions import FieldError, ModelLoadError, UnsupportedModelError
from prefixcache.models.hub import resolve_model
from prefixcache.server.openai.embeddings import nine_digits
from prefixcache.server.options.pooling import chosen_pooling
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.serving import MODEL, client_of, metric, serve_folder, served_folder
from support.tiny_gguf import write_gguf
from support.tiny_models import load_model, make_model

Checkpoint = Callable[..., Path]
INSTRUCTION = "Instruct: Given a web search query, retrieve passages that answer the query\nQuery:"
TEXTS = [f"{INSTRUCTION}{text}" for text in ("the cat in the hat", "a hat", "what is a dog?")]
# Files of Qwen3-Embedding-0.6B and all-MiniLM-L6-v2, as published, and the newer spelling.
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
LAST = {"pooling_mode_lasttoken": True} | {f"pooling_mode_{mode}": False for mode in MODES}
QWEN3 = {"word_embedding_dimension": 1024, "include_prompt": True} | LAST
MINILM = (
    {"word_embedding_dimension": 384}
    | QWEN3
    | {
        "pooling_mode_mean_tokens": True,
        "pooling_mode_lasttoken": False,
    }
)


def with_pooling(folder: Path, config: dict[str, Any]) -> Path:
    (folder / POOLING_FILE).parent.mkdir(exist_ok=True)
    (folder / POOLING_FILE).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As embedding models are saved: without a head, and without "model." before the names."""
    place = tmp_path_factory.mktemp("embedder") / "model"
    shutil.copytree(tiny_checkpoint("qwen3", tie_word_embeddings=False), place)
    weights = load_file(place / "model.safetensors")
    bare = {name.removeprefix("model."): weights[name] for name in weights if "lm_head" not in name}
    save_file(bare, place / "model.safetensors")
    return with_pooling(place, QWEN3)


@pytest.fixture(scope="module")
def ranker(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With yes and no as tokens."""
    place = tmp_path_factory.mktemp("ranker") / "model"
    shutil.copytree(tiny_checkpoint("qwen3"), place)
    tokenizer = json.loads((place / "tokenizer.json").read_text())
    added = {"special": False, "single_word": False, "lstrip": False, "rstrip": False}
    vocabulary = tokenizer["model"]["vocab"]
    for text, unused in (("yes", "\u0100"), ("no", "\u0101")):  # the bytes 0 and 1
        token_id = vocabulary[text] = vocabulary.pop(unused)
        given = added | {"normalized": True, "id": token_id, "content": text}
        tokenizer["added_tokens"].append(given)
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    return place


@pytest.fixture(params=["float32", "bfloat16", "torch"])
def flags(request: pytest.FixtureRequest) -> dict[str, Any]:
    runner = {"attention": "torch"} if request.param == "torch" else {}
    dtype = "float32" if request.param == "torch" else request.param
    return {"dtype": dtype, "block_size": 16} | runner


@pytest.fixture
async def client(folder: Path, flags: dict[str, Any]) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with served_folder(folder, served={"pooling": "last"}, **flags) as (client, _):
        yield client


async def embed(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/embeddings", json={"model": MODEL} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows(answer: dict[str, Any]) -> np.ndarray:
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


@given(st.lists(st.floats(-1, 1, width=32), min_size=1))
def test_the_numbers_of_an_embedding_are_short_and_the_same_in_float32(
    numbers: list[float],
) -> None:
    row = np.array(numbers, np.float32)
    shown = nine_digits(row)
    assert np.array_equal(np.array(shown, np.float32), row)
    long = [x for x in shown if abs(x) > 1e-9 and x != float(f"{x:.9g}")]
    assert not long


@torch.no_grad()
def expected(model: Any, tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    hidden = [
        model.model(
            torch.from_numpy(tokenizer.encode(text).astype(np.int64))[None]
        ).last_hidden_state[0, -1]
        for text in texts
    ]
    return torch.nn.functional.normalize(torch.stack(hidden), dim=1).numpy()


async def test_embeddings_are_those_of_transformers(
    client: httpx.AsyncClient, tiny_checkpoint: Checkpoint, flags: dict[str, Any]
) -> None:
    source = tiny_checkpoint("qwen3", tie_word_embeddings=False)
    answer = await embed(client, input=TEXTS)
    wanted = expected(load_model(source), Tokenizer.from_folder(source), TEXTS)
    bound = 1e-5 if flags["dtype"] == "float32" else 0.05
    assert np.abs(rows(answer) - wanted).max() < bound
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]


async def test_a_shared_instruction_is_a_hit_and_changes_no_bit(
    folder: Path, client: httpx.AsyncClient, flags: dict[str, Any]
) -> None:
    app, engine = serve_folder(
        folder, served={"pooling": "last"}, enable_prefix_caching=False, **flags
    )
    async with client_of(app) as cold:
        without = [await embed(cold, input=text) for text in TEXTS]
    engine.close()
    warm = [await embed(client, input=text) for text in (*TEXTS, *TEXTS)]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in warm]
    assert cached[0] == 0
    assert min(cached[1:]) >= 16
    bound = 1e-6 if "attention" in flags else 0  # torch promises no bits
    for number, answer in enumerate(warm):
        assert np.abs(rows(answer) - rows(without[number % len(TEXTS)])).max() <= bound


async def test_openais_client_reads_base64_and_fewer_dimensions(folder: Path) -> None:
    async with served_folder(folder, served={"pooling": "last"}) as (client, _):
        http: Any = client
        api = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="-", http_client=http
        ).embeddings
        floats = rows(await embed(client, input=TEXTS[0]))[0]
        made = await api.create(model=MODEL, input=TEXTS[0])  # asks for base64
        assert np.array_equal(np.array(made.data[0].embedding, np.float32), floats)
        cut = np.array(
            (await api.create(model=MODEL, input=TEXTS[0], dimensions=8)).data[0].embedding
        )
        assert np.allclose(cut, floats[:8] / np.linalg.norm(floats[:8]), atol=1e-6)
        ids = (await client.post("/tokenize", json={"prompt": TEXTS[0]})).json()["tokens"]
        by_ids = await api.create(model=MODEL, input=[ids, ids])
        assert np.array_equal(np.array(by_ids.data[1].embedding, np.float32), floats)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [1, -1]}, "input"),
        ({"input": [2**40]}, "input"),
        ({"input": "a " * 5000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
async def test_a_wrong_field_is_named(folder: Path, fields: dict[str, Any], param: str) -> None:
    async with served_folder(folder, served={"pooling": "last"}) as (client, _):
        answer = await client.post("/v1/embeddings", json={"model": MODEL} | fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        metrics = (await client.get("/metrics")).text
        assert metric(metrics, "prompt_tokens_total") == 0  # nothing was computed
        assert len(rows(await embed(client, input="a"))[0]) == 64


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/score"])
@pytest.mark.parametrize(("pooling", "said"), [(None, "--pooling"), ("mean_tokens", "mean_tokens")])
async def test_other_models_say_why_they_give_none(
    folder: Path, path: str, pooling: str | None, said: str
) -> None:
    async with served_folder(folder, served={"pooling": pooling}) as (client, _):
        answer = await client.post(path, json={"input": "a"})
        assert answer.status_code == 404
        assert said in answer.json()["error"]["message"]


@torch.no_grad()
def probability(model: Any, tokenizer: Tokenizer, prompt: str) -> float:
    ids = torch.from_numpy(tokenizer.encode(prompt).astype(np.int64))
    logits = model(ids[None]).logits[0, -1].double()
    yes, no = (tokenizer.encode(word)[0] for word in ("yes", "no"))
    return torch.softmax(logits[[int(yes), int(no)]], 0)[0].item()


def prompt_of(query: str, document: str, task: str) -> str:
    """As https://huggingface.co/Qwen/Qwen3-Reranker-0.6B writes it."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}<|im_end|>"
        "\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


TASK = "Given a web search query, retrieve relevant passages that answer the query"


async def test_ranks_are_the_probability_of_yes(ranker: Path) -> None:
    model, tokenizer = load_model(ranker), Tokenizer.from_folder(ranker)
    texts = ["the cat", "a dog in a hat", "no hat"]
    wanted = [probability(model, tokenizer, prompt_of("hats", text, TASK)) for text in texts]
    async with served_folder(ranker, served={"pooling": "rank"}, block_size=16) as (client, _):
        body = {"query": "hats", "documents": texts}
        first = (await client.post("/v1/rerank", json=body)).json()
        scores = {one["index"]: one["relevance_score"] for one in first["results"]}
        assert [scores[i] for i in range(3)] == pytest.approx(wanted, abs=1e-5)
        assert sorted(scores.values(), reverse=True) == [*scores.values()]
        assert {one["document"]["text"] for one in first["results"]} == {*texts}
        objects = {"query": "hats", "documents": [{"text": text} for text in texts], "top_n": 1}
        best = (await client.post("/v2/rerank", json=objects | {"return_documents": False})).json()
        assert best["results"] == [
            {"index": max(scores, key=scores.__getitem__)}
            | {"relevance_score": max(scores.values())}
        ]
        assert best["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        pairs = (await client.post("/score", json={"text_1": "hats", "text_2": texts})).json()
        assert [one["score"] for one in pairs["data"]] == [scores[i] for i in range(3)]
        # vLLM's own default, which its clients send.
        mixed = {"query": "hats", "documents": [texts[0], *({"text": text} for text in texts[1:])]}
        assert (await client.post("/rerank", json=mixed | {"top_n": 0})).json()["results"] == (
            first["results"]
        )
        task = "Find dogs"
        instructed = await client.post("/v1/rerank", json=body | {"instruction": task})
        other = {one["index"]: one["relevance_score"] for one in instructed.json()["results"]}
        assert other[1] == pytest.approx(
            probability(model, tokenizer, prompt_of("hats", texts[1], task)), abs=1e-5
        )
        # Clients of vLLM write the prompt themselves: its beginning as the query, its end behind.
        query, rest = prompt_of("hats", "MARK", TASK).split("MARK")
        written = await client.post("/score", json={"text_1": query, "text_2": texts[0] + rest})
        assert written.json()["data"][0]["score"] == scores[0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 5000]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 5000}, "documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
    ],
)
async def test_a_wrong_field_of_a_rank_is_named(
    ranker: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async with served_folder(ranker, served={"pooling": "rank"}) as (client, _):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(param)


async def test_a_query_before_each_document_may_not_fill_the_memory(ranker: Path) -> None:
    async with served_folder(ranker, served={"pooling": "rank"}) as (client, _):
        body = {"query": "a" * 10_000, "documents": ["b"] * 4000}
        error = (await client.post("/v1/rerank", json=body)).json()["error"]
        assert (error["param"], error["code"]) == ("documents", "too_long")


async def test_what_was_aborted_is_no_answer(ranker: Path) -> None:
    async with served_folder(ranker, served={"pooling": "rank"}) as (client, engine):
        await engine.run(lambda control: control.pause())
        body = {"query": "a", "documents": ["b", "c"]}
        task = asyncio.create_task(client.post("/v1/rerank", json=body))
        while engine.metrics.gauges().num_waiting < 2:
            await asyncio.sleep(0.01)
        await engine.run(lambda control: control.pause("abort"))
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")


def test_files_say_how_a_model_pools(
    tiny_checkpoint: Checkpoint, ranker: Path, tmp_path: Path
) -> None:
    plain = Tokenizer.from_folder(tiny_checkpoint("qwen3"))
    cases = [
        (None, None),
        (QWEN3, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        (MINILM, "mean_tokens"),
        ({"pooling_mode": "rank"}, "rank"),
    ]
    for number, (config, mode) in enumerate(cases):
        place = tmp_path / str(number)
        place.mkdir()
        if config is not None:
            with_pooling(place, config)
        assert chosen_pooling("auto", place, plain) == mode
        assert chosen_pooling("none", place, plain) is None
        assert chosen_pooling("last", place, plain) == "last"
    assert chosen_pooling("rank", tmp_path, Tokenizer.from_folder(ranker)) == "rank"
    with pytest.raises(FieldError, match="yes and no"):
        chosen_pooling("rank", tmp_path, plain)
    with_pooling(tmp_path, {})
    (tmp_path / POOLING_FILE).write_text("[]")
    with pytest.raises(ModelLoadError, match="1_Pooling"):
        read_pooling(tmp_path)


def test_a_gguf_file_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    model = make_model("qwen3")
    file = write_gguf(tmp_path / "last.gguf", model, pooling=3)
    assert read_pooling(resolve_model(str(file))) == "lasttoken"
    file = write_gguf(tmp_path / "rank.gguf", model, pooling=4)
    with pytest.raises(UnsupportedModelError, match="--pooling rank"):
        resolve_model(str(file))


def test_llm_embeds(folder: Path, tiny_checkpoint: Checkpoint) -> None:
    source = tiny_checkpoint("qwen3", tie_word_embeddings=False)
    llm = LLM(str(folder), dtype="float32", num_blocks=65)
    found = llm.embed(TEXTS, use_tqdm=False)
    wanted = expected(load_model(source), Tokenizer.from_folder(source), TEXTS)
    assert np.abs(np.array(found) - wanted).max() < 1e-5
