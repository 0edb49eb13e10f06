"""The endpoints over a real engine with a tiny model, as a client sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from prefixcache.config.model_config import GenerationDefaults
from prefixcache.server.http.workers import Workers
from prefixcache.server.jobs.answers import AnswerChoice
from support.serving import MODEL, events, served_folder
from support.tiny_models import EOS

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
TEXT = "The same question asked twice is answered from the blocks that are already there."
CHAT = [{"role": "user", "content": TEXT}]


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def _complete(client: httpx.AsyncClient, prompt: Any, **options: Any) -> Any:
    return await _post(client, "/v1/completions", prompt=prompt, **{**GREEDY, **options})


async def _chat(client: httpx.AsyncClient, **options: Any) -> Any:
    return await _post(client, "/v1/chat/completions", **{"messages": CHAT, **GREEDY, **options})


async def _stream(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    response = await client.post(path, json={**GREEDY, **body, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(response.text)


def _texts(chunks: list[Any], key: Callable[[Any], str]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + key(choice)
    return texts


async def test_a_completion_has_openais_form(client):
    body = await _complete(client, TEXT, model=MODEL)
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert choice["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["total_tokens"] == 12 + body["usage"]["prompt_tokens"]


async def test_a_chat_completion_has_openais_form(client):
    body = await _chat(client)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = body["choices"][0]["message"]
    assert message["role"] == "assistant"
    rendered = f"<|im_start|>user\n{TEXT}{EOS}\n<|im_start|>assistant\n"
    same = await _complete(client, rendered)
    assert message["content"] == same["choices"][0]["text"]


async def test_token_ids_and_text_give_the_same_answer(client):
    tokens = (await _post(client, "/tokenize", prompt=TEXT))["tokens"]
    by_ids, by_text = await _complete(client, tokens), await _complete(client, TEXT)
    assert by_ids["choices"] == by_text["choices"]


async def test_streams_say_what_the_whole_answer_says(client):
    whole = (await _complete(client, TEXT))["choices"][0]["text"]
    chunks = await _stream(client, "/v1/completions", prompt=TEXT)
    assert _texts(chunks, lambda choice: choice["text"]) == {0: whole}
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    chunks = await _stream(client, "/v1/chat/completions", messages=CHAT)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    whole = (await _chat(client))["choices"][0]["message"]["content"]
    assert _texts(chunks, lambda choice: choice["delta"].get("content", "")) == {0: whole}


async def test_usage_in_streams_comes_when_asked(client):
    plain = await _stream(client, "/v1/completions", prompt=TEXT)
    assert all("usage" not in chunk for chunk in plain)
    options = {"include_usage": True}
    *chunks, last = await _stream(
        client, "/v1/chat/completions", messages=CHAT, stream_options=options
    )
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await _stream(client, "/v1/completions", prompt=TEXT, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 12


async def test_each_output_of_a_stream_costs_the_same_however_many_choices_there_are(
    client, monkeypatch
):
    """Their tokens are not counted again for it, and no thread is asked."""
    looks, pieces = [], []
    num_tokens, run = AnswerChoice.num_tokens, Workers.run
    monkeypatch.setattr(
        AnswerChoice, "num_tokens", property(lambda one: looks.append(1) or num_tokens.fget(one))
    )
    monkeypatch.setattr(Workers, "run", lambda *given: pieces.append(1) or run(*given))
    options = {"continuous_usage_stats": True}
    *chunks, last = await _stream(
        client, "/v1/completions", prompt=["a", "b b"] * 16, n=4, stream_options=options
    )
    assert len(chunks) > 1000
    assert len(looks) < 8 * len(chunks)
    assert len(pieces) < 8
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 12 * 128


async def test_lists_of_prompts_and_n_are_answered_in_order(client):
    prompts = ["one", "two two", TEXT]
    alone = [(await _complete(client, p))["choices"][0]["text"] for p in prompts]
    body = await _complete(client, prompts, n=2)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == [t for t in alone for _ in (0, 1)]
    assert body["usage"]["completion_tokens"] == 6 * 12
    single = [(await _complete(client, p))["usage"]["prompt_tokens"] for p in prompts]
    assert body["usage"]["prompt_tokens"] == sum(single)
    streamed = await _stream(client, "/v1/completions", prompt=prompts, n=2)
    expected = dict(enumerate(choice["text"] for choice in body["choices"]))
    assert _texts(streamed, lambda choice: choice["text"]) == expected


async def test_a_seed_repeats_the_draw_and_choices_differ(client):
    options = {"temperature": 1.5, "n": 3, "seed": 7, "max_tokens": 20}
    first, second = (
        await _complete(client, TEXT, **options),
        await _complete(client, TEXT, **options),
    )
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    alone = await _complete(client, TEXT, **{**options, "n": 1, "seed": 8})
    assert alone["choices"][0]["text"] == texts[1]


async def test_the_second_time_is_read_from_the_cache(client):
    await client.post("/reset_prefix_cache")
    prompt = list(range(3, 103))

    async def cached(**options: Any) -> int:
        body = await _complete(client, prompt, **options)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0
    assert await cached() == 96
    assert await cached(cache_read=False) == 0
    assert await cached(cache_salt="mine") == 0
    assert await cached(cache_salt="mine") == 96
    assert await cached(cache_salt="yours", cache_write=False) == 0
    assert await cached(cache_salt="yours") == 0
    assert (await client.post("/reset_prefix_cache")).status_code == 200
    assert await cached() == 0


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_end_the_text(client, include):
    whole = (await _complete(client, TEXT, max_tokens=40))["choices"][0]["text"]
    stop = next(whole[i : i + 2] for i in range(8, len(whole)) if whole[i : i + 2].isascii())
    options = {"stop": [stop], "max_tokens": 40, "include_stop_str_in_output": include}
    (choice,) = (await _complete(client, TEXT, **options))["choices"]
    end = whole.index(stop) + len(stop) * include
    assert choice["text"] == whole[:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    chunks = await _stream(client, "/v1/completions", prompt=TEXT, **options)
    assert _texts(chunks, lambda choice: choice["text"]) == {0: whole[:end]}


async def test_a_stop_token_ends_the_text(client):
    body = await _complete(client, TEXT, logprobs=0)
    token = body["choices"][0]["logprobs"]["tokens"][3]
    token_id = (await _post(client, "/tokenize", prompt=token))["tokens"][0]
    if len((await _post(client, "/tokenize", prompt=token))["tokens"]) != 1:
        pytest.fail("pick another position: the token there has no text of its own")
    (choice,) = (await _complete(client, TEXT, stop_token_ids=[token_id]))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token_id)


async def test_logprobs_in_the_completions_form(client):
    body = await _complete(client, TEXT, logprobs=3)
    shown = body["choices"][0]["logprobs"]
    assert [len(column) for column in shown.values()] == [12] * 4
    for token, logprob, top in zip(
        shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert 3 <= len(top) <= 4
    text = body["choices"][0]["text"]
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    streamed = await _stream(client, "/v1/completions", prompt=TEXT, logprobs=3)
    parts = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
    joined = {key: [item for part in parts for item in part[key]] for key in shown}
    assert joined == shown


def _spelled(token: str) -> bytes:
    """The bytes that a token's text stands for; parts of characters are written in hexadecimal."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


async def test_logprobs_in_the_chat_form(client):
    body = await _chat(client, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        for one in (entry, *entry["top_logprobs"]):
            assert bytes(one["bytes"]) == _spelled(one["token"])
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    shown = body["choices"][0]["message"]["content"]
    assert raw.decode(errors="replace").startswith(shown)
    plain = await _chat(client, logprobs=True)
    assert [e["top_logprobs"] for e in plain["choices"][0]["logprobs"]["content"]] == [[]] * 12


async def test_echo_shows_the_prompt_and_its_logprobs(client):
    body = await _complete(client, TEXT, echo=True, logprobs=1)
    (choice,) = body["choices"]
    answer = (await _complete(client, TEXT))["choices"][0]["text"]
    assert choice["text"] == TEXT + answer
    shown = choice["logprobs"]
    num_prompt = body["usage"]["prompt_tokens"]
    assert "".join(shown["tokens"][:num_prompt]) == TEXT
    assert shown["token_logprobs"][0] is None
    assert all(math.isfinite(value) for value in shown["token_logprobs"][1:])
    chunks = await _stream(client, "/v1/completions", prompt=TEXT, echo=True)
    assert _texts(chunks, lambda choice: choice["text"]) == {0: TEXT + answer}
    ids = (await _post(client, "/tokenize", prompt=TEXT))["tokens"]
    assert (await _complete(client, ids, echo=True))["choices"][0]["text"] == TEXT + answer


async def test_prompt_logprobs_in_vllms_form(client):
    ids = (await _post(client, "/tokenize", prompt=TEXT))["tokens"]
    (choice,) = (await _complete(client, TEXT, prompt_logprobs=2))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for token_id, entry in zip(ids[1:], others, strict=True):
        assert entry[str(token_id)]["rank"] >= 1
        assert {1, 2} <= {detail["rank"] for detail in entry.values()}
    body = await _chat(client, prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


async def test_max_tokens_have_their_defaults(client):
    response = await client.post("/v1/completions", json={"prompt": TEXT, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 16
    long = list(range(3, 373)) + list(range(3, 133))
    body = {"prompt": long, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.json()["usage"]["completion_tokens"] == 12
    body = {"messages": CHAT, "ignore_eos": True}
    usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    assert usage["total_tokens"] == 512
    body["max_completion_tokens"], body["max_tokens"] = 3, 9
    usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    assert usage["completion_tokens"] == 3


async def test_an_open_final_message_is_continued(client):
    messages = [*CHAT, {"role": "assistant", "content": "It is"}]
    body = await _chat(client, messages=messages, continue_final_message=True)
    rendered = f"<|im_start|>user\n{TEXT}{EOS}\n<|im_start|>assistant\nIt is"
    same = await _complete(client, rendered)
    assert body["choices"][0]["message"]["content"] == same["choices"][0]["text"]


async def test_parts_of_type_text_are_joined_by_lines(client):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    split = await _chat(client, messages=[{"role": "user", "content": parts}])
    joined = await _chat(client, messages=[{"role": "user", "content": "one\ntwo"}])
    assert split["choices"] == joined["choices"]


async def test_fields_without_effect_are_accepted(client):
    nothing = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": None,
        "service_tier": "auto",
        "never_heard_of": 1,
        "temperature": None,
        "stop": None,
    }
    assert (await _chat(client, **nothing))["choices"][0]["finish_reason"] == "length"


async def test_sampling_options_reach_the_engine(client):
    plain = (await _complete(client, TEXT))["choices"][0]["text"]
    banned = await _complete(client, TEXT, logit_bias={"75": 100.0}, max_tokens=3)
    assert banned["choices"][0]["text"] == "iii"
    for option in ({"repetition_penalty": 9.0}, {"presence_penalty": 2.0}):
        assert (await _complete(client, TEXT, **option, max_tokens=40))["choices"][0][
            "text"
        ] != plain
    narrow = {"temperature": 5.0, "top_k": 1}
    assert (await _complete(client, TEXT, **narrow))["choices"][0]["text"] == plain
    narrow = {"temperature": 5.0, "min_p": 1.0}
    assert (await _complete(client, TEXT, **narrow))["choices"][0]["text"] == plain
    narrow = {"temperature": 5.0, "top_p": 1e-9}
    assert (await _complete(client, TEXT, **narrow))["choices"][0]["text"] == plain


async def test_the_end_token_ends_unless_ignored(client):
    bias = {"logit_bias": {"2": 100.0}}
    (choice,) = (await _complete(client, TEXT, **bias, ignore_eos=False))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
    (choice,) = (await _complete(client, TEXT, **bias, skip_special_tokens=False))["choices"]
    assert choice["text"] == EOS * 12
    body = await _complete(client, TEXT, **bias, ignore_eos=False, min_tokens=5)
    assert body["usage"]["completion_tokens"] == 6


async def test_models_are_listed(client):
    body = (await client.get("/v1/models")).json()
    assert [card["id"] for card in body["data"]] == [MODEL]
    card = (await client.get(f"/v1/models/{MODEL}")).json()
    assert (card["object"], card["max_model_len"]) == ("model", 512)
    response = await client.get("/v1/models/some/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_tokenize_and_detokenize_are_inverse(client):
    body = await _post(client, "/tokenize", prompt="Zwölf 🦙", return_token_strs=True)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 512
    assert (await _post(client, "/detokenize", tokens=body["tokens"]))["prompt"] == "Zwölf 🦙"
    body = await _post(client, "/tokenize", messages=CHAT)
    text = (await _post(client, "/detokenize", tokens=body["tokens"]))["prompt"]
    assert text == f"<|im_start|>user\n{TEXT}{EOS}\n<|im_start|>assistant\n"


async def test_health_and_version(client):
    assert (await client.get("/health")).status_code == 200
    version = (await client.get("/version")).json()
    assert set(version) == {
        "version",
        "batch_invariant",
        "dtype",
        "cpu_activations",
        "kv_cache_dtype",
        "weights",
        "prefix_hash",
    }


async def test_a_request_id_is_kept_when_it_is_usable(client):
    headers = {"X-Request-Id": "abc-1"}
    body = {"prompt": "x", "max_tokens": 1}
    for _ in range(2):
        response = await client.post("/v1/completions", json=body, headers=headers)
        assert response.headers["x-request-id"] == "abc-1"
        assert response.json()["id"] == "cmpl-abc-1"
    response = await client.get("/health", headers={"X-Request-Id": "no spaces"})
    assert len(response.headers["x-request-id"]) == 32


async def test_the_models_own_defaults_apply_when_a_value_is_left_out(tiny_checkpoint):
    generation = GenerationDefaults(temperature=5.0, top_k=1, max_new_tokens=4)
    async with served_folder(tiny_checkpoint(), served={"generation": generation}) as (client, _):
        body = {"prompt": TEXT, "ignore_eos": True}
        usual = (await client.post("/v1/completions", json=body)).json()
        greedy = await _complete(client, TEXT, max_tokens=4)
        assert usual["choices"] == greedy["choices"]
        own = {**body, "temperature": 5.0, "top_k": 0, "seed": 1}
        assert (await client.post("/v1/completions", json=own)).json()["choices"] != usual[
            "choices"
        ]


@pytest.mark.parametrize(
    ("served", "allowed", "refused"),
    [
        ({}, [0, None], [1, -1, -(10**300)]),
        ({"priorities": True}, [0, -(2**31) + 1, 2**31 - 1], [2**31, -(2**31), -(10**300)]),
    ],
)
async def test_priorities_count_where_the_operator_says_so(
    tiny_checkpoint, served, allowed, refused
):
    async with served_folder(tiny_checkpoint(), served=served) as (client, _):
        for priority in (*allowed, *refused):
            body = {"prompt": "x", "max_tokens": 1, "priority": priority}
            response = await client.post("/v1/completions", json=body)
            if priority in allowed:
                assert response.is_success
            else:
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "priority"
