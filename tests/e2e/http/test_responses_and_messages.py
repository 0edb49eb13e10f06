"""`/v1/responses` and `/v1/messages` over a real engine with a tiny model.

What they answer is what a chat answers to the same messages; a block of the cache holds 16 tokens.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from prefixcache._core import parse_json
from prefixcache.server.anthropic.message_blocks import Conversation
from prefixcache.server.http import workers
from prefixcache.server.http.access import AccessRules
from prefixcache.server.http.workers import Workers
from prefixcache.server.openai import responses
from prefixcache.server.openai.response_store import ResponseStore, StoredResponse
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Ending, Request, RequestOutput
from prefixcache.types.retention_range import RetentionRange
from support.serving import FakeEngine, client_of, fake_app, says, served_folder

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = "The same question asked twice is answered from the blocks that are already there."
SAMPLING = {"temperature": 0, "ignore_eos": True}


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    limit = {RESPONSES: {"max_output_tokens": 8}, CHAT: {"max_tokens": 8}}
    response = await client.post(path, json={**SAMPLING, **limit.get(path, {}), **body})
    assert response.status_code == 200, response.text
    return response.json()


async def _respond(client: httpx.AsyncClient, value: Any, **body: Any) -> Any:
    return await _post(client, RESPONSES, input=value, **body)


async def _message(client: httpx.AsyncClient, messages: Any, **body: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return await _post(client, MESSAGES, messages=messages, **{"max_tokens": 8, **body})


async def _chat(client: httpx.AsyncClient, *texts: str, system: str | None = None) -> Any:
    roles = [{"role": "system", "content": system}] if system else []
    for index, text in enumerate(texts):
        roles.append({"role": ("user", "assistant")[index % 2], "content": text})
    body = await _post(client, CHAT, messages=roles)
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]


async def _events(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    response = await client.post(path, json={**SAMPLING, **body, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def _said(response: Any) -> str:
    return response["output"][0]["content"][0]["text"]


async def test_the_end_of_a_long_stream_is_written_in_a_thread(client, monkeypatch):
    """It repeats the log probabilities of all tokens several times."""
    pieces: list[int] = []

    async def in_thread(self: Workers, function: Callable[[], Any]) -> Any:
        made = function()
        # On a busy machine other work of the request goes to a thread too.
        pieces.extend([len(made)] if isinstance(made, bytes) else [])
        return made

    monkeypatch.setattr(workers, "_SMALL", 1000)
    monkeypatch.setattr(Workers, "in_thread", in_thread)
    options = {"input": "a", "top_logprobs": 20, "max_output_tokens": 60}
    last = (await _events(client, RESPONSES, **options))[-1]
    assert len(last["response"]["output"][0]["content"][0]["logprobs"]) == 60
    assert pieces
    assert pieces[-1] > len(json.dumps(last))


async def test_what_is_remembered_is_read_while_other_threads_run(client, monkeypatch):
    read: list[bytes] = []

    def parsed(text: bytes, **limits: int) -> Any:
        read.append(text)
        return parse_json(text, **limits)

    first = await _respond(client, [{"role": "user", "content": TEXT, "junk": [0.5] * 100_000}])
    monkeypatch.setattr(responses, "parse_json", parsed)
    items = (await client.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
    assert [len(item["junk"]) for item in items] == [100_000]
    await _respond(client, "More?", previous_response_id=first["id"])
    assert len(read) == 2  # the items, and the conversation


async def test_a_response_says_what_a_chat_says(client):
    text, length = await _chat(client, TEXT, system="Be short.")
    body = await _respond(client, TEXT, instructions="Be short.", metadata={"a": "b"})
    assert (_said(body), body["usage"]["input_tokens"]) == (text, length)
    assert (body["object"], body["status"]) == ("response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (body["metadata"], body["instructions"]) == ({"a": "b"}, "Be short.")
    events = await _events(
        client, RESPONSES, input=TEXT, instructions="Be short.", max_output_tokens=8
    )
    streamed = events[-1]["response"]
    assert _said(streamed) == text
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == text
    assert set(streamed) == set(body)
    parts = [{"type": "input_text", "text": TEXT}]
    items = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}]
    assert _said(await _respond(client, items)) == text
    untyped = [{**item, "type": None} for item in items]  # as OpenAI's client writes its objects
    assert _said(await _respond(client, untyped)) == text


async def test_a_response_goes_on_from_one_before(client):
    first = await _respond(client, "one", instructions="Left out later.")
    second = await _respond(client, "two", previous_response_id=first["id"])
    third = await _respond(client, "three", previous_response_id=second["id"])
    reported = ("one", _said(first), "two", _said(second), "three")
    assert (_said(third), third["usage"]["input_tokens"]) == await _chat(client, *reported)
    assert third["previous_response_id"] == second["id"]
    stored = await client.get(f"{RESPONSES}/{second['id']}")
    assert stored.json() == second
    items = (await client.get(f"{RESPONSES}/{second['id']}/input_items")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["two"]
    counted = {"input": "three", "previous_response_id": second["id"]}
    count = await client.post(f"{RESPONSES}/input_tokens", json=counted)
    assert count.json()["input_tokens"] == third["usage"]["input_tokens"]
    deleted = await client.delete(f"{RESPONSES}/{second['id']}")
    assert deleted.json()["deleted"] is True
    assert (await client.get(f"{RESPONSES}/{second['id']}")).status_code == 404


async def test_a_conversation_holds_no_more_values_than_a_body(client):
    """A short body could have its turns read again and again, which take gigabytes."""
    turn = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 7000}]
    fields = {"max_output_tokens": 1, "truncate_prompt_tokens": 8}
    first = await _respond(client, turn, **fields)
    second = await _respond(client, turn, previous_response_id=first["id"], **fields)
    for path in (RESPONSES, f"{RESPONSES}/input_tokens", "/prefix_cache/probe"):
        body = {"input": "More?", "previous_response_id": second["id"], **fields}
        refused = await client.post(path, json=body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "too_many_values")


async def test_input_items_come_in_pages(client):
    parts = [{"role": "user", "content": f"{number}"} for number in range(25)]
    parts[3]["id"] = "mine"
    url = f"{RESPONSES}/{(await _respond(client, parts))['id']}/input_items"

    async def page(**query: Any) -> tuple[list[int], bool, list[str]]:
        body = (await client.get(url, params=query)).json()
        ids = [item["id"] for item in body["data"]]
        assert (body["first_id"], body["last_id"]) == (ids[0], ids[-1])
        return [int(item["content"]) for item in body["data"]], body["has_more"], ids

    numbers, more, ids = await page()
    assert (numbers, more) == ([*range(24, 4, -1)], True)
    assert (await page(after=ids[-1]))[:2] == ([4, 3, 2, 1, 0], False)
    assert (await page(order="asc", limit=2, after="mine"))[:2] == ([4, 5], True)
    assert (await page(order="asc", limit=2, before="mine"))[:2] == ([1, 2], True)
    for query in ({"limit": 0}, {"limit": "x"}, {"limit": 101}, {"order": "up"}, {"after": "?"}):
        response = await client.get(url, params=query)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(query))


async def test_models_are_listed_in_the_form_of_the_client(tiny_checkpoint):
    header = {"anthropic-version": "2023-06-01"}
    names = {"names": ("a", "b", "c")}
    async with served_folder(tiny_checkpoint(), served=names) as (client, engine):
        plain = (await client.get("/v1/models")).json()
        assert [card["id"] for card in plain["data"]] == ["a", "b", "c"]
        reported = [
            (await client.get("/v1/models", headers=header, params=query)).json()
            for query in ({}, {"limit": 2}, {"after_id": "b"}, {"before_id": "c", "limit": 1})
        ]
        pages = [([card["id"] for card in one["data"]], one["has_more"]) for one in reported]
        assert pages == [
            (["a", "b", "c"], False),
            (["a", "b"], True),
            (["c"], False),
            (["b"], True),
        ]
        card = (await client.get("/v1/models/b", headers=header)).json()
        assert card == reported[0]["data"][1]
        assert (card["type"], card["max_input_tokens"]) == ("model", engine.max_model_len)
        wrong = await client.get("/v1/models/d", headers=header)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
        assert (await client.get("/v1/models/d")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "tool", "reported"),
    [
        (
            MESSAGES,
            {"name": "f", "input_schema": {"properties": {"a": {"type": "x"}}}},
            "input_schema",
        ),
        (MESSAGES, {"name": "f", "input_schema": {"type": "array"}}, "input_schema.type"),
        (MESSAGES, {"name": "no name", "input_schema": {}}, "name"),
        (
            RESPONSES,
            {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}},
            "parameters",
        ),
        (RESPONSES, {"name": "f", "parameters": {"type": "array"}}, "parameters.type"),
        (RESPONSES, {"name": "no name"}, "name"),
    ],
)
async def test_what_is_wrong_with_a_tool_is_named_as_it_was_given(client, path, tool, reported):
    good = {"name": "good", "input_schema": {}} if path == MESSAGES else {"name": "good"}
    kind = {} if path == MESSAGES else {"type": "function"}
    body = {"tools": [kind | good, kind | tool], "max_tokens": 2}
    body |= {"messages": [_USER]} if path == MESSAGES else {"input": "a"}
    error = (await client.post(path, json=body)).json()["error"]
    assert error["message"].startswith(f"tools[1].{reported}")
    assert error.get("param", f"tools[1].{reported}") == f"tools[1].{reported}"


async def test_responses_are_found_by_their_own_key_alone(tiny_checkpoint):
    rules = AccessRules(api_keys=("one", "two"))
    async with served_folder(tiny_checkpoint(), access={"rules": rules}) as (client, _):

        async def ask(key: str, name: str | None, **body: Any) -> httpx.Response:
            fields = {"input": "a", "max_output_tokens": 2, "previous_response_id": name, **body}
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post(RESPONSES, json=fields, headers=headers)

        name = (await ask("one", None)).json()["id"]
        unkept = (await ask("one", None, store=False)).json()["id"]
        assert (await ask("one", name)).status_code == 200
        answers = [await ask("two", name), await ask("one", unkept), await ask("one", "resp_x")]
        for answer, given in zip(answers, (name, unkept, "resp_x"), strict=True):
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("previous_response_id", "response_not_found")
            assert error["message"].replace(given, "X") == answers[2].json()["error"][
                "message"
            ].replace("resp_x", "X")
        for method in ("GET", "DELETE"):
            url = f"{RESPONSES}/{name}"
            other = await client.request(method, url, headers={"Authorization": "Bearer two"})
            assert other.status_code == 404


EXPLICIT = {"prompt_cache_options": {"mode": "explicit"}}
HINT = {"retention": [{"start": 0, "end": 20, "priority": 90}]}
HINTS = (RetentionRange(0, 20, 90),)
HALF_HOUR = (RetentionRange(0, None, None, 1800),)
DAY = (RetentionRange(0, None, None, 86400),)


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ({"cache_salt": "s"}, {}, {"salt": "s"}),
        ({"cache_salt": "s"}, {"cache_salt": None}, {"salt": None}),
        ({"cache_salt": "s"}, {"cache_salt": "t"}, {"salt": "t"}),
        ({"cache_read": False}, {}, {"read": False}),
        ({"cache_write": False}, {"cache_salt": "s"}, {"salt": "s", "write": False}),
        ({"cache_write": False}, {"cache_write": True}, {"write": True}),
        (HINT, {}, {"retention": HINTS}),
        (HINT, {"retention": None}, {"retention": ()}),
        (HINT, {"prompt_cache_options": {}}, {"retention": HALF_HOUR}),
        ({"prompt_cache_retention": "24h"}, {}, {"retention": DAY}),
        ({"prompt_cache_retention": "24h"}, HINT, {"retention": HINTS}),
        (EXPLICIT, {}, {"write_upto": 0}),
        (EXPLICIT, {"prompt_cache_options": {"ttl": "12h"}}, {"write_upto": 0}),
        (EXPLICIT, {"prompt_cache_options": {"mode": "implicit"}}, {"retention": HALF_HOUR}),
        ({"cache_hit_threshold": 0.1}, {}, {"hit_threshold": None}),
    ],
)
async def test_a_conversation_keeps_its_choices_about_the_cache(
    tiny_checkpoint, first, later, expected
):
    engine = FakeEngine(lambda request: says(request, "So"))
    async with client_of(fake_app(engine, Tokenizer.from_folder(tiny_checkpoint()))) as client:
        name = None
        for fields in (first, later, {}):
            body = {"input": TEXT, "previous_response_id": name, **fields}
            answer = await client.post(RESPONSES, json=body)
            assert answer.status_code == 200, answer.text
            name = answer.json()["id"]
        await client.post("/prefix_cache/warm", json={"input": "a", "previous_response_id": name})
    assert len(engine.requests) == 4
    cache = {"salt": None, "read": True, "write": True, "write_upto": None, "retention": ()}
    for request in engine.requests[1:]:
        for field, value in {**cache, **expected}.items():
            assert getattr(request.cache, field) == value


async def test_hints_of_a_longer_prompt_end_with_a_shorter_one(client):
    """Instructions are left out of a conversation that goes on."""
    hints = [{"start": 0, "end": 80, "priority": 90}, {"start": 80, "end": 90, "ttl_s": 60}]
    first = await _respond(client, "a", instructions=TEXT * 2, retention=hints)
    later = await _respond(client, "b", previous_response_id=first["id"])
    assert later["usage"]["input_tokens"] < 80 < first["usage"]["input_tokens"]


@pytest.mark.parametrize("kept_out", [{"cache_salt": "s"}, {"cache_write": False}, EXPLICIT])
async def test_what_a_conversation_keeps_out_of_the_cache_stays_out(tiny_checkpoint, kept_out):
    rules = AccessRules(api_keys=("one", "two"))
    async with served_folder(tiny_checkpoint(), access={"rules": rules}) as (client, _):
        client.headers["Authorization"] = "Bearer one"
        first = await _respond(client, TEXT, **kept_out)
        await _respond(client, "More?", previous_response_id=first["id"])
        client.headers["Authorization"] = "Bearer two"
        usage = (await _respond(client, TEXT))["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == 0


def test_a_store_forgets_what_is_longest_unused():
    def stored(size: int) -> StoredResponse:
        return StoredResponse(b"b" * (size - 3), b"i", (b"m",), b"c")

    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abc":
        store.put("key", name, stored(10))
    assert store.get("key", "a") is not None
    store.put("key", "d", stored(10))
    store.put("other", "e", stored(10))
    assert [name for name in "abcd" if store.get("key", name)] == ["a", "c", "d"]
    store.put("key", "f", stored(85))
    assert [name for name in "acdf" if store.get("key", name)] == ["d", "f"]
    store.put("key", "g", stored(101))
    assert store.get("key", "g") is None
    assert store.get("other", "e") is not None
    assert store.delete("key", "f")
    assert not store.delete("other", "d")


async def test_a_message_says_what_a_chat_says(client):
    text, length = await _chat(client, "one", "two", TEXT, system="Be short.")
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": TEXT},
    ]
    fields = {"system": [{"type": "text", "text": "Be short."}], "max_tokens": 8}
    body = await _message(client, messages, **fields)
    assert body["content"] == [{"type": "text", "text": text}]
    assert (body["type"], body["role"], body["stop_reason"]) == (
        "message",
        "assistant",
        "max_tokens",
    )
    counted = await client.post(
        f"{MESSAGES}/count_tokens", json={"messages": messages, "system": fields["system"]}
    )
    assert counted.json() == {"input_tokens": length}
    events = await _events(client, MESSAGES, messages=messages, **fields)
    assert "".join(e["delta"]["text"] for e in events if "text" in e.get("delta", ())) == text
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["usage"]["output_tokens"] == body["usage"]["output_tokens"] == 8


async def test_a_turn_without_text_is_no_error(client):
    asked = {"messages": [_USER], "max_tokens": 4}
    reported = await _post(client, MESSAGES, **asked)
    nothing = {"role": "assistant", "content": []}
    begun = await _post(client, MESSAGES, **{**asked, "messages": [_USER, nothing]})
    assert begun["content"] == reported["content"]
    await _post(client, MESSAGES, **{**asked, "messages": [_USER, nothing, _USER]})
    await _post(client, MESSAGES, **{**asked, "messages": [{"role": "user", "content": ""}]})
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    await _respond(client, [_USER, thought])
    await _respond(client, [_USER, thought, nothing, _USER])


async def test_a_system_entry_may_end_the_messages(client):
    """Claude Code sends one behind each turn of the user, the first and those of results too."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "ok"}
    said = {"role": "system", "content": [{"type": "text", "text": "Available agents: none."}]}
    asked = [_USER, said]
    called = [_USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    directive = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    for messages in (asked, [*called, said], [*called, {**said, "content": "Go on."}]):
        assert (await _message(client, messages))["content"]
        await _message(client, [*messages, directive])
    chat = await _post(client, CHAT, messages=asked)
    counted = await client.post(f"{MESSAGES}/count_tokens", json={"messages": asked})
    assert counted.json()["input_tokens"] == chat["usage"]["prompt_tokens"]
    alone = await client.post(MESSAGES, json={"messages": [said], "max_tokens": 2})
    assert "messages must hold a message" in alone.json()["error"]["message"]


async def test_every_api_writes_the_template_that_is_given(tiny_checkpoint, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[-1].content }}" + "x" * 300)
    async with served_folder(tiny_checkpoint(), chat_template=str(file)) as (client, _):
        tokenized = await client.post("/tokenize", json={"prompt": "Hi" + "x" * 300})
        expected = tokenized.json()["count"]
        _, chat = await _chat(client, "Hi")
        responses = (await _respond(client, "Hi"))["usage"]["input_tokens"]
        usage = (await _message(client, "Hi"))["usage"]
        messages = usage["input_tokens"] + usage["cache_read_input_tokens"]
        asked = {"messages": [{"role": "user", "content": "Hi"}]}
        counted = await client.post(f"{MESSAGES}/count_tokens", json=asked)
        rendered = await client.post("/tokenize", json=asked)
    counts = [chat, responses, messages, counted.json()["input_tokens"], rendered.json()["count"]]
    assert counts == [expected] * 5


def test_turns_of_one_role_are_one_message():
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}, "cache_control": _EPHEMERAL}
    result = {"type": "tool_result", "tool_use_id": "c", "content": _parts(None, "5m")}
    thoughts = [{"type": "thinking", "thinking": thought} for thought in ("Hm.", "Well.")]
    turns = (
        ("user", _parts(None, "5m", "1h")),
        ("assistant", [*thoughts, *_parts(None), use]),
        ("user", [result, *_parts("1h", None)]),
    )
    whole = [{"role": role, "content": blocks} for role, blocks in turns]
    split = [{"role": role, "content": [block]} for role, blocks in turns for block in blocks]
    one, other = Conversation(None, whole), Conversation(None, split)
    assert one.messages == other.messages
    assert [mark.place for mark in one.marked] == [mark.place for mark in other.marked]
    assert one.messages[1]["reasoning_content"] == "Hm.\nWell."
    assert [message["role"] for message in one.messages] == ["user", "assistant", "tool", "user"]


async def test_the_end_of_a_message_is_reported(client):
    text = (await _message(client, TEXT))["content"][0]["text"]
    stopped = await _message(client, TEXT, stop_sequences=[text[2:4], "zzzz"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[2:4])
    begun = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": text[:2]}]
    chat = await _post(client, CHAT, messages=begun, continue_final_message=True)
    goes_on = (await _message(client, begun))["content"][0]["text"]
    assert goes_on == chat["choices"][0]["message"]["content"]


def _parts(*ttls: str | None) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": f"Part {i}. {TEXT}"} for i in range(len(ttls))]
    for part, ttl in zip(parts, ttls, strict=True):
        if ttl is not None:
            part["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return parts


async def test_cache_control_reads_and_writes_up_to_its_blocks(tiny_checkpoint):
    async with served_folder(tiny_checkpoint()) as (client, _):

        async def sent(parts: Any, **fields: Any) -> Any:
            body = await _message(client, [{"role": "user", "content": parts}], **fields)
            counts = body["usage"]
            created = counts["cache_creation"]
            assert sum(created.values()) == counts["cache_creation_input_tokens"]
            read, written = counts["cache_read_input_tokens"], sum(created.values())
            return read, written, counts["input_tokens"], created["ephemeral_1h_input_tokens"]

        first = await sent(_parts("1h", "5m", None))
        assert first[0] == 0
        assert 0 < first[3] < first[1]
        assert first[2] > 16  # the last part is not written
        again = await sent(_parts("1h", "5m", None))
        assert again == (first[1], 0, first[2], 0)
        plain = await sent(_parts(None, None, None))
        assert plain[0] == first[1]
        assert plain[1] > 0
        texts = _parts(None, None)
        texts[0]["text"] = "Another beginning. " + TEXT
        automatic = await sent(texts, cache_control={"type": "ephemeral"}, max_tokens=0)
        assert automatic[2] < 32
        assert (await sent(texts))[0] == automatic[1]
        system = [{"type": "text", "text": 3 * TEXT, "cache_control": {"type": "ephemeral"}}]
        assert (await sent("a", system=system))[1] > 48
        assert (await sent("b", system=system))[0] > 48


async def test_cache_control_on_tools_keeps_them(tiny_checkpoint):
    """The tools stand before what is asked, and before the system message's own text."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"name": f"f{i}", "input_schema": schema} for i in range(1)]
    marked = [{**tools[0], "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    calls = [{"type": "tool_use", "id": "c", "name": "f0", "input": {"city": "x"}}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "18", "cache_control": {}}
    asked = {"tool_choice": {"type": "none"}}
    async with served_folder(tiny_checkpoint(), num_blocks=400) as (client, _):
        first = (await _message(client, "a", tools=marked, **asked))["usage"]
        second = (await _message(client, "b", tools=tools, **asked))["usage"]
        assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"] > 64
        history = [_USER, {"role": "assistant", "content": calls}]
        history.append({"role": "user", "content": [result]})
        body = {"messages": history, "tools": marked, "max_tokens": 2}
        wrong = await client.post(MESSAGES, json=body)
        assert "messages[2].content[0].cache_control.type" in wrong.json()["error"]["message"]


async def test_a_prewarmed_response_is_read_by_the_next(tiny_checkpoint):
    async with served_folder(tiny_checkpoint()) as (client, _):
        options = {"prewarm": True, "ttl": "12h"}
        warm = await _respond(client, TEXT, prompt_cache_options=options)
        assert (warm["status"], warm["output"]) == ("completed", [])
        details = warm["usage"]["input_tokens_details"]
        assert details["cached_tokens"] == 0 < details["cache_write_tokens"]
        after = (await _respond(client, TEXT))["usage"]["input_tokens_details"]
        assert after["cached_tokens"] == details["cache_write_tokens"] // 16 * 16
        part = {"type": "input_text", "text": TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}
        items = [{"role": "user", "content": [part]}]
        marked = await _respond(client, items, prompt_cache_options={"mode": "explicit"})
        assert marked["usage"]["input_tokens_details"]["cached_tokens"] > 0


_USER = {"role": "user", "content": "a"}
_EPHEMERAL = {"type": "ephemeral"}


def _asks(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts or "a"}], "max_tokens": 2, **fields}


@pytest.mark.parametrize(
    ("path", "fields", "reported"),
    [
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": 7}, "input must be a list"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [1]}, "input[0] must be an object"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type"),
        (RESPONSES, {"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        (RESPONSES, {"input": [{"role": ["user"], "content": "a"}]}, "input[0].role"),
        (RESPONSES, {"input": [{"type": {}}]}, "input[0].type"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": []}]}]}, "content[0].type"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ".type"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]},
            "input: call_id must be the id of a call in a message before it",
        ),
        (RESPONSES, {"input": "a", "max_output_tokens": -2}, "max_output_tokens"),
        (RESPONSES, {"input": "a", "temperature": 101}, "temperature"),
        (RESPONSES, {"input": "a", "background": True}, "background"),
        (RESPONSES, {"input": "a", "n": 2}, "n is not supported"),
        (RESPONSES, {"input": "a", "tools": [{"type": "xml"}]}, "tools[0].type"),
        (RESPONSES, {"input": "a", "tools": [{"type": []}]}, "tools[0].type"),
        (RESPONSES, {"input": "a", "tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        (RESPONSES, {"input": "a", "truncation": "middle"}, "truncation"),
        (RESPONSES, {"input": "a", "prompt_cache_options": {"ttl": "2h"}}, "ttl"),
        (
            RESPONSES,
            {"input": "a", "prompt_cache_options": {}, "prompt_cache_retention": "24h"},
            "not both",
        ),
        (RESPONSES, {"input": "word " * 600}, "512"),
        (MESSAGES, {"max_tokens": 2}, "messages must hold a message"),
        (MESSAGES, {"messages": [_USER]}, "max_tokens is required"),
        (MESSAGES, {"messages": [_USER], "max_tokens": "2"}, "max_tokens"),
        (MESSAGES, {"messages": [_USER], "max_tokens": -2}, "max_tokens"),
        (MESSAGES, {"messages": [_USER] * 4097, "max_tokens": 2}, "messages"),
        (MESSAGES, {"messages": [{"role": "x"}], "max_tokens": 2}, "messages[0].role"),
        (MESSAGES, {"messages": [{"role": "user"}], "max_tokens": 2}, "messages[0].content"),
        (MESSAGES, _asks({"type": "image"}), "messages[0].content[0].type"),
        (
            MESSAGES,
            _asks({"type": "tool_result", "tool_use_id": "x", "content": "1"}),
            "messages: tool_use_id must be the id of a call in a message before it",
        ),
        (MESSAGES, _asks(stop_sequences=[""]), "stop"),
        (MESSAGES, _asks(tools=[{"name": "f"}]), "tools[0]."),
        (MESSAGES, _asks(tool_choice={"type": "x"}), "tool_"),
        (MESSAGES, _asks(container="c"), "container"),
        (MESSAGES, _asks(cache_control={"type": "for ever"}), "cache_control.type"),
        (MESSAGES, _asks(*_parts("5m", "1h")), "messages[0].content[1].cache_control.ttl"),
        (MESSAGES, _asks(*_parts(*["5m"] * 5)), "At most 4"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_named_in_the_apis_own_form(client, path, fields, reported, stream):
    response = await client.post(path, json={**fields, "stream": stream})
    assert response.status_code == 400, response.text
    body = response.json()
    assert reported in body["error"]["message"]
    if path == RESPONSES:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    else:
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["request_id"] == response.headers["x-request-id"]


async def test_anthropics_errors_have_their_types(tiny_checkpoint):
    rules = AccessRules(api_keys=("secret",))
    good = {"messages": [_USER], "max_tokens": 1}
    key = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    async with served_folder(tiny_checkpoint(), access={"rules": rules}) as (client, _):
        answers = [
            (await client.post(MESSAGES, json=good, headers=key), 200, None),
            (await client.post(MESSAGES, json=good), 401, "authentication_error"),
            (
                await client.post(MESSAGES, json={**good, "model": "x"}, headers=key),
                404,
                "not_found_error",
            ),
            (await client.get(MESSAGES, headers=key), 405, "invalid_request_error"),
            (await client.get(f"{MESSAGES}/x", headers=key), 404, "not_found_error"),
        ]
    for answer, status, kind in answers:
        assert answer.status_code == status
        assert answer.json().get("error", {}).get("type") == kind


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_stream_that_fails_ends_with_its_error(tiny_checkpoint, path):
    async def fails(request: Request) -> AsyncIterator[RequestOutput]:
        yield RequestOutput(request_id=request.request_id, token_ids=(3,), text="half")
        ending = Ending("error", error="out of order")
        yield RequestOutput(request_id=request.request_id, ending=ending)

    engine = FakeEngine(fails)
    app = fake_app(engine, Tokenizer.from_folder(tiny_checkpoint()))
    async with client_of(app) as client:
        body = {"input": "a"} if path == RESPONSES else {"messages": [_USER], "max_tokens": 4}
        events = await _events(client, path, **body)
    last = events[-1]
    if path == RESPONSES:
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        assert _said(last["response"]) == "half"
    else:
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert engine.num_open == 0
