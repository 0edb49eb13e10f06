"""OpenAI's caching controls over HTTP: what is read and written, what usage tells, what is refused.

The model is tiny, the cache is the real one; a block holds 16 tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.server.http.access import AccessRules
from support.serving import MODEL, client_of, serve_folder, served_folder

COMPLETIONS, CHAT, WARM = "/v1/completions", "/v1/chat/completions", "/prefix_cache/warm"
PROMPT = list(range(10, 90))
EXPLICIT = {"mode": "explicit"}
TEXTS = [f"Part {n} of a text that many ask about, each with a question." for n in range(3)]


@pytest.fixture
async def client(tiny_checkpoint: Callable[..., Path]) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with served_folder(tiny_checkpoint()) as (client, _):
        yield client


def completion(prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}


def chat(texts: list[str], marked: int | None = None, **fields: Any) -> dict[str, Any]:
    """One message of several parts, one of which ends at a breakpoint."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if marked is not None:
        parts[marked]["prompt_cache_breakpoint"] = EXPLICIT
    messages = [{"role": "user", "content": parts}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


async def sent(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def counts(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Tokens read and written, as usage tells."""
    details = (await sent(client, path, body))["usage"]["prompt_tokens_details"]
    assert list(details) == ["cached_tokens", "cache_write_tokens"]
    return details["cached_tokens"], details["cache_write_tokens"]


async def test_usage_tells_what_was_read_and_written(client: httpx.AsyncClient) -> None:
    assert await counts(client, COMPLETIONS, completion()) == (0, 80)
    assert await counts(client, COMPLETIONS, completion()) == (64, 0)
    parted = completion([*PROMPT[:40], *range(200, 230)])
    assert await counts(client, COMPLETIONS, parted) == (32, 32)
    assert await counts(client, COMPLETIONS, completion(cache_salt="x", n=3)) == (0, 80)
    unwritten = completion(cache_write=False, cache_salt="y")
    assert await counts(client, COMPLETIONS, unwritten) == (0, 0)
    streamed = completion(cache_salt="z", stream=True, stream_options={"include_usage": True})
    assert '"cache_write_tokens":80' in (await client.post(COMPLETIONS, json=streamed)).text


async def test_explicit_mode_reads_as_ever_and_writes_nothing(client: httpx.AsyncClient) -> None:
    explicit = completion(prompt_cache_options=EXPLICIT)
    first = await sent(client, COMPLETIONS, explicit)
    assert await counts(client, COMPLETIONS, explicit) == (0, 0)
    assert await counts(client, COMPLETIONS, completion()) == (0, 80)
    assert await counts(client, COMPLETIONS, explicit) == (64, 0)
    assert (await sent(client, COMPLETIONS, explicit))["choices"] == first["choices"]


async def test_explicit_mode_writes_up_to_the_last_breakpoint(client: httpx.AsyncClient) -> None:
    body = chat([*TEXTS, "Which?"], marked=1, prompt_cache_options=EXPLICIT)
    reply = await client.post("/tokenize", json={"model": MODEL, **chat(TEXTS[:2])})
    # The ids of the same message cut at the breakpoint, without what closes its turn.
    text = (await client.post("/detokenize", json={"tokens": reply.json()["tokens"]})).json()
    shown = text["prompt"][: text["prompt"].index(TEXTS[1]) + len(TEXTS[1])]
    reply = await client.post("/tokenize", json={"prompt": shown, "add_special_tokens": False})
    upto = reply.json()["count"] // 16 * 16
    assert upto > 32
    assert await counts(client, CHAT, body) == (0, upto)
    other = chat([*TEXTS[:2], "Another text.", "Where?"], marked=1, prompt_cache_options=EXPLICIT)
    assert await counts(client, CHAT, other) == (upto, 0)
    assert (await counts(client, CHAT, chat([*TEXTS, "Which?"])))[0] == upto


async def test_breakpoints_with_the_implicit_one_write_everything(client):
    plain = await sent(client, CHAT, chat(TEXTS, cache_salt="a"))
    marked = await sent(client, CHAT, chat(TEXTS, marked=0, cache_salt="b"))
    assert marked["usage"] == plain["usage"]
    assert marked["choices"] == plain["choices"]


async def test_a_cache_key_is_no_salt(client: httpx.AsyncClient) -> None:
    assert await counts(client, COMPLETIONS, completion(prompt_cache_key="a")) == (0, 80)
    assert await counts(client, COMPLETIONS, completion(prompt_cache_key="b")) == (64, 0)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt_cache_key": "x" * 1025}, "prompt_cache_key"),
    ({"prompt_cache_options": {"mode": "none"}}, "prompt_cache_options.mode"),
    ({"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"ttl": 1800}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_retention": "12h"}, "prompt_cache_retention"),
    ({"prompt_cache_retention": "24h", "prompt_cache_options": {}}, "prompt_cache_retention"),
    ({"retention": [{}], "prompt_cache_retention": "24h"}, "retention"),
    ({"retention": {}}, "retention"),
    ({"retention": [{"start": 1.5}]}, "retention[0].start"),
    ({"retention": [{"end": 81}]}, "retention[0].end"),
    ({"retention": [{"end": 8}, {"start": 7}]}, "retention[1].start"),
    ({"retention": [{"priority": 101}]}, "retention[0].priority"),
    ({"retention": [{"ttl_s": 0}]}, "retention[0].ttl_s"),
    ({"retention": [{"ttl_s": "60"}]}, "retention[0].ttl_s"),
    ({"retention": [{"ttl": 60}]}, "retention[0].ttl"),
    ({"retention": [{"start": i, "end": i + 1} for i in range(33)]}, "retention"),
]


async def test_a_wrong_control_is_refused_by_name_and_leaves_nothing(client):
    for fields, named in WRONG:
        response = await client.post(COMPLETIONS, json=completion([PROMPT, PROMPT], **fields))
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == named
    assert await counts(client, COMPLETIONS, completion()) == (0, 80)


async def test_a_wrong_breakpoint_is_refused_by_name(client: httpx.AsyncClient) -> None:
    body = chat(TEXTS, marked=2)
    body["messages"][0]["content"][2]["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "1h"}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[2].prompt_cache_breakpoint.ttl"


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens read and written, as Anthropic's and the Responses API tell."""
    details = usage.get("input_tokens_details", {})
    read = usage.get("cache_read_input_tokens", details.get("cached_tokens"))
    written = usage.get("cache_creation_input_tokens", details.get("cache_write_tokens"))
    return read, written


SYSTEM = "You answer questions of those who ask them, in few words and with care."
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
QUESTION = {"role": "user", "content": [{"type": "text", "text": TEXTS[0]}]}
MARKED = {"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
ASKED = {"role": "user", "content": [MARKED, {"type": "text", "text": TEXTS[1]}]}


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/responses", {"input": TEXTS[0], "instructions": SYSTEM}, {}),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "input_text",
                                "text": SYSTEM,
                                "prompt_cache_breakpoint": EXPLICIT,
                            },
                            {"type": "input_text", "text": TEXTS[0]},
                        ],
                    }
                ],
                "prompt_cache_options": EXPLICIT,
            },
            {},
        ),
        ("/v1/messages", {"messages": [QUESTION]}, {"anthropic-version": "2023-06-01"}),
        ("/v1/messages", {"system": [MARKED], "messages": [QUESTION]}, {}),
        ("/v1/messages", {"messages": [ASKED]}, {}),
        (
            "/v1/messages",
            {"tools": [TOOL | {"cache_control": EPHEMERAL}], "messages": [QUESTION]},
            {},
        ),
    ],
)
async def test_warming_and_probing_read_bodies_of_every_api(client, path, body, headers):
    async def posted(where: str) -> dict[str, Any]:
        response = await client.post(where, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    cold = await posted(WARM)
    written = cold["cache_write_tokens"]
    assert cold["cached_tokens"] == 0 < written <= cold["prompt_tokens"]
    probed = await posted("/prefix_cache/probe")
    hit = probed["cached_tokens"]
    assert probed["prompt_tokens"] == cold["prompt_tokens"]
    assert written // 16 * 16 == hit > 0
    assert await posted(WARM) == cold | {"cached_tokens": hit, "cache_write_tokens": written - hit}
    body |= {"max_tokens": 2} if path == "/v1/messages" else {"max_output_tokens": 2}
    read, again = counted((await posted(path))["usage"])
    assert (read, again) == (hit, written - hit)


async def test_a_wrong_message_is_refused_in_the_form_of_its_client(client):
    body = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    header = {"anthropic-version": "2023-06-01"}
    error = (await client.post(WARM, json=body, headers=header)).json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith("messages[0].content[0].type")
    body["system"] = SYSTEM
    error = (await client.post(WARM, json=body)).json()["error"]
    assert error["param"] == "messages[0].content[0].type"


async def test_a_response_that_goes_on_is_warmed_with_what_was_said(client):
    first = await sent(client, "/v1/responses", {"input": TEXTS[0], "max_output_tokens": 2})
    body = {"input": TEXTS[1], "previous_response_id": first["id"]}
    counted = await sent(client, "/v1/responses/input_tokens", body)
    assert (await sent(client, WARM, body))["prompt_tokens"] == counted["input_tokens"]


PROMPTS = completion([[*PROMPT, 1], list(range(200, 240))], n=2, max_tokens=100, stream=True)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPTS), (CHAT, chat(TEXTS))])
async def test_warming_computes_a_prompt_and_answers_nothing(client, path, body):
    cold = await sent(client, WARM, body)
    full = 80 + 32 if path == COMPLETIONS else cold["prompt_tokens"] // 16 * 16
    assert (cold["cached_tokens"], cold["cache_write_tokens"]) == (0, full)
    assert await counts(client, path, {**body, "stream": False}) == (full, 0)
    assert await sent(client, WARM, body) == cold | {"cached_tokens": full, "cache_write_tokens": 0}


async def test_warming_obeys_the_controls_and_ignores_thresholds(client: httpx.AsyncClient) -> None:
    body = completion(cache_hit_threshold=1.0)
    assert (await sent(client, WARM, body | {"prompt_cache_options": EXPLICIT}))[
        "cache_write_tokens"
    ] == 0
    assert (await sent(client, WARM, body))["cache_write_tokens"] == 80
    response = await client.post(WARM, json=completion(temperature=-1))
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("opened", [False, True])
async def test_clients_may_warm_where_an_option_says_so(tiny_checkpoint, opened):
    rules = AccessRules(api_keys=("k",), admin_api_keys=("root",), client_warming=opened)
    app, engine = serve_folder(tiny_checkpoint(), access={"rules": rules})
    try:
        async with client_of(app) as client:
            await check_warming(client, opened)
    finally:
        await engine.shutdown()


async def check_warming(client: httpx.AsyncClient, opened: bool) -> None:
    def key(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {name}"}

    response = await client.post(WARM, json=completion(), headers=key("k"))
    assert response.status_code == (200 if opened else 403)
    assert (await client.post(WARM, json=completion(), headers=key("root"))).status_code == 200
    assert (await client.post(WARM, json=completion())).status_code == 401
