"""Options of requests that vLLM's clients send, as a client sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Ending, Request, RequestOutput, TokenLogprobs
from support.serving import MODEL, FakeEngine, client_of, events, fake_app, served_folder

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "The same question asked twice is answered from the blocks that are already there."
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
MESSAGES = {"messages": [{"role": "user", "content": TEXT}]}


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json={**GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def _ids(client: httpx.AsyncClient, text: str) -> list[int]:
    return (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]


async def _text(client: httpx.AsyncClient, ids: list[int]) -> str:
    return (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]


async def test_echo_of_a_prompt_alone_has_its_log_probabilities(client):
    """As lm-eval asks for them, which no sampled token may follow."""
    ids = await _ids(client, TEXT)
    scored = {"echo": True, "logprobs": 1}
    alone = await _post(client, COMPLETIONS, prompt=ids, max_tokens=0, **scored)
    longer = await _post(client, COMPLETIONS, prompt=ids, max_tokens=1, **scored)
    (choice,), (other,) = alone["choices"], longer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert choice["logprobs"]["token_logprobs"] == other["logprobs"]["token_logprobs"][:-1]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_computes_and_keeps(client, stream):
    body = {"prompt": f"{stream} {TEXT}", "cache_salt": "kept"}
    response = await client.post(COMPLETIONS, json={**body, "max_tokens": 0, "stream": stream})
    chunk = events(response.text)[-1] if stream else response.json()
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("", "length")
    usage = (await _post(client, COMPLETIONS, **body))["usage"]
    size, prompt = 16, usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // size * size > 0


async def test_a_prompt_as_long_as_the_context_has_no_answer(client):
    full = {"prompt": [5] * 512}
    assert (await _post(client, COMPLETIONS, **full, max_tokens=0))["usage"]["total_tokens"] == 512
    response = await client.post(COMPLETIONS, json={"prompt": [5] * 513, "max_tokens": 0})
    assert response.status_code == 400
    assert "513 in the prompt and 0 for the answer" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_token_ids_are_reported_whole_and_in_streams(client, path):
    body = {**(MESSAGES if path == CHAT else {"prompt": TEXT}), "return_token_ids": True, "n": 2}
    whole = await _post(client, path, **body)
    streamed = events((await client.post(path, json={**GREEDY, **body, "stream": True})).text)
    for index, choice in enumerate(whole["choices"]):
        place = whole if path == CHAT else choice
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert (await _text(client, choice["token_ids"])).startswith(text)
        chunks = [chunk for chunk in streamed if chunk["choices"][0]["index"] == index]
        reported = [token for c in chunks for token in c["choices"][0].get("token_ids") or ()]
        assert reported == choice["token_ids"]
        firsts = [
            (chunk if path == CHAT else chunk["choices"][0]).get("prompt_token_ids")
            for chunk in chunks
        ]
        assert firsts[0] == place["prompt_token_ids"]
        assert not any(firsts[1:])
    assert len(whole["choices"][0]["token_ids"]) == 8


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_only_allowed_tokens_are_said(client, path):
    body = {**(MESSAGES if path == CHAT else {"prompt": TEXT}), "return_token_ids": True}
    hot = {"temperature": 1.5, "allowed_token_ids": [70, 80, 90], "max_tokens": 30}
    (choice,) = (await _post(client, path, **body, **hot))["choices"]
    assert set(choice["token_ids"]) <= {70, 80, 90}
    response = await client.post(
        path, json={**body, "allowed_token_ids": [2], "min_tokens": 1, "max_tokens": 3}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "allowed_token_ids"


async def test_bad_words_are_not_said(client):
    body = {"prompt": TEXT, "return_token_ids": True, "max_tokens": 40}
    plain = (await _post(client, COMPLETIONS, **body))["choices"][0]["token_ids"]
    pairs = [plain[i : i + 2] for i in range(len(plain) - 1)]
    texts = [await _text(client, pair) for pair in pairs]
    again = [await _ids(client, text) for text in texts]
    word, ids = next(one[:2] for one in zip(texts, pairs, again, strict=True) if one[1] == one[2])
    (choice,) = (await _post(client, COMPLETIONS, **body, bad_words=[word]))["choices"]
    place = pairs.index(ids)
    assert choice["token_ids"][: place + 1] == plain[: place + 1]
    assert ids not in [choice["token_ids"][i : i + 2] for i in range(40)]


async def test_prompts_are_truncated_at_their_beginning(client):
    ids = await _ids(client, TEXT)
    reported = {"return_token_ids": True, "echo": True}
    for prompt in (TEXT, ids):
        cut = await _post(client, COMPLETIONS, prompt=prompt, truncate_prompt_tokens=9, **reported)
        (choice,) = cut["choices"]
        assert choice["prompt_token_ids"] == ids[-9:]
        assert choice["text"].startswith(await _text(client, ids[-9:]))
    long = {"prompt": "word " * 100_000, "truncate_prompt_tokens": -1}
    assert (await _post(client, COMPLETIONS, **long))["usage"]["prompt_tokens"] == 512 - 8
    chat = {"messages": [{"role": "user", "content": "word " * 2000}]}
    cut = await _post(client, CHAT, **chat, truncate_prompt_tokens=40)
    assert cut["usage"]["prompt_tokens"] == 40


async def test_the_best_of_several_answers_is_the_likeliest(client):
    drawn = {"prompt": TEXT, "temperature": 1.0, "seed": 3, "logprobs": 0}
    all_six = (await _post(client, COMPLETIONS, **drawn, n=6))["choices"]
    body = await _post(client, COMPLETIONS, **drawn, n=2, best_of=6)

    def mean(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    best = sorted(all_six, key=mean, reverse=True)[:2]
    assert [one["text"] for one in body["choices"]] == [one["text"] for one in best]
    assert [one["index"] for one in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 6 * 8
    stream = await client.post(COMPLETIONS, json={**drawn, "best_of": 2, "stream": True})
    assert stream.status_code == 400


async def test_a_choice_that_was_cut_off_is_not_the_best(tiny_checkpoint):
    ends = [("cache_threshold", -0.1), ("length", -0.5), ("abort", None), ("stop", -0.2)]

    async def script(request: Request) -> AsyncIterator[RequestOutput]:
        reason, logprob = ends[int(request.request_id.rpartition("-")[2])]
        scored = () if logprob is None else (TokenLogprobs(3, logprob, 1),)
        yield RequestOutput(
            request_id=request.request_id,
            token_ids=(3,) * len(scored),
            logprobs=scored,
            ending=Ending(reason),
        )

    app = fake_app(FakeEngine(script), Tokenizer.from_folder(tiny_checkpoint()))
    async with client_of(app) as client:
        choices = (await _post(client, COMPLETIONS, prompt="a", n=3, best_of=4))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "abort"]


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (COMPLETIONS, {"prompt": "a", "zz": 1, "user": "me"}, "zz"),
        (
            COMPLETIONS,
            {"prompt": "a", "stream": True, "stream_options": {"x\n\u2603": 1}},
            r"stream_options.x\n\u2603",
        ),
        (CHAT, {**MESSAGES, **{f"field{i}": i for i in range(12)}}, "field9 and 2 more"),
    ],
)
async def test_unknown_fields_are_reported_in_a_header(client, path, fields, names):
    response = await client.post(path, json={**GREEDY, **fields})
    assert response.status_code == 200
    warning = response.headers["x-prefixcache-warning"]
    assert warning.startswith("unknown fields: ")
    assert warning.endswith(names)
    known = await client.post(COMPLETIONS, json={**GREEDY, "prompt": "a", "user": "me"})
    assert "x-prefixcache-warning" not in known.headers


async def test_embeddings_and_suffixes_are_refused_by_name(client):
    for path, body in (("/v1/embeddings", {"input": "a"}), (COMPLETIONS, {"suffix": "b"})):
        error = (await client.post(path, json={"prompt": "a", **body})).json()["error"]
        assert "embeddings" in error["message"] or error["param"] == "suffix"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/tags", "/api/embed"])
async def test_clients_of_ollama_learn_where_to_go(client, path):
    response = await client.post(path, json={"model": "a", "prompt": "b"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert f"POST {path}. Ollama's API is not served." in error["message"]
    assert "/v1/chat/completions" in error["message"]
    assert error["code"] == "unsupported_endpoint"


_RESPONSES, _ANTHROPIC = "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (_RESPONSES, "max_output_tokens"),
        (_ANTHROPIC, "max_tokens"),
    ],
)
@pytest.mark.parametrize("most", [513, 10**30, -1])
async def test_an_answer_may_go_on_to_the_end_of_the_context(client, path, limit, most):
    """Claude Code asks for 32,000 tokens, llama.cpp's clients for -1, which is no limit."""
    prompts = {COMPLETIONS: {"prompt": TEXT}, _RESPONSES: {"input": TEXT}}
    fields = {**prompts.get(path, MESSAGES), limit: most, "min_tokens": 480}
    response = await client.post(path, json={"temperature": 0, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    answer, kinds = response.json(), ("cache_read_input", "cache_creation_input", "input", "output")
    usage = answer["usage"]
    assert (usage.get("total_tokens") or sum(usage[f"{kind}_tokens"] for kind in kinds)) == 512
    if path == _RESPONSES:
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    elif path == _ANTHROPIC:
        assert answer["stop_reason"] == "max_tokens"
    else:
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_truncated_prompts_leave_the_room_that_they_left(client):
    """Of a number of tokens that the context has no room for, as of fewer."""
    body = {"prompt": [5] * 600, "truncate_prompt_tokens": -1}
    lengths = [
        (await _post(client, COMPLETIONS, **body, max_tokens=most))["usage"]["prompt_tokens"]
        for most in (8, 600, -1)
    ]
    assert lengths == [504, 1, 511]


async def test_no_mass_is_the_likeliest_token(client):
    body = {"prompt": TEXT, "max_tokens": 20}
    greedy = await _post(client, COMPLETIONS, **body)
    drawn = await _post(client, COMPLETIONS, **body, temperature=1.5, top_p=0, seed=1)
    assert drawn["choices"] == greedy["choices"]


async def test_options_of_the_operator(tiny_checkpoint):
    served = {"any_name": True, "clamps_max_tokens": False, "strict": True}
    async with served_folder(tiny_checkpoint(), served=served) as (client, _):
        body = await _post(client, CHAT, **MESSAGES, model="gpt-5")
        assert body["model"] == "gpt-5"
        response = await client.post(CHAT, json={**MESSAGES, "max_tokens": 10_000})
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
        assert (await client.get("/v1/models/gpt-5")).json()["id"] == "gpt-5"
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == [MODEL]
        for path in (COMPLETIONS, CHAT, "/tokenize", "/prefix_cache/probe"):
            body = {**MESSAGES, "prompt": "x", "model": "any", "zz": 1}
            body.pop("prompt" if path == CHAT else "messages")
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "zz"
