"""`/prefix_cache/explain` and `cache_diagnostics` over HTTP: what each caller is shown."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.server.http.access import AccessRules
from support.serving import MODEL, client_of, serve_folder

EXPLAIN = "/prefix_cache/explain"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
RULES = AccessRules(api_keys=("alice", "bob"), admin_api_keys=("root",))
STORY = "The same question asked twice is answered from the blocks that are there, so ask. " * 2


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    sizes = {"diagnostics_memory": 1 << 20, "num_blocks": 64}
    return {"access": {"rules": RULES}, "kv_cache_metrics": True, **sizes}


@pytest.fixture
async def client(app: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with client_of(app) as client:
        yield client
        await post(client, "/reset_prefix_cache", {}, "root")


async def post(client: httpx.AsyncClient, path: str, body: Any, key: str) -> httpx.Response:
    return await client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


async def posted(client: httpx.AsyncClient, path: str, body: Any, key: str = "alice") -> Any:
    response = await post(client, path, body, key)
    assert response.status_code == 200, response.text
    return response.json()


async def explained(client: httpx.AsyncClient, body: Any, key: str = "alice") -> Any:
    (one,) = (await posted(client, EXPLAIN, body, key))["prompts"]
    return one


def chat(time: str, salt: str | None = "s", **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": f"Session of {time}. {STORY}"},
        {"role": "user", "content": "What is asked?"},
    ]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, **fields}
    return body if salt is None else {**body, "cache_salt": salt}


def prompt(first: int, salt: str | None = "s", **fields: Any) -> dict[str, Any]:
    ids = [first, *range(20, 90)]
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0, **fields}
    return body if salt is None else {**body, "cache_salt": salt}


async def test_a_changed_time_is_shown_in_its_message_to_who_sent_it(client):
    await posted(client, CHAT, chat("14:04:37"))
    one = await explained(client, chat("14:05:11"))
    assert one["reason"] == "different_text"
    difference = one["earlier"]["difference"]
    assert (difference["message"], difference["role"]) == (0, "system")
    assert difference["text"].startswith("14:05:11")
    assert difference["earlier_text"].startswith("14:04:37")
    answer = await posted(client, CHAT, chat("14:05:11", cache_diagnostics=True))
    (sent,) = answer["cache_diagnostics"]
    assert (sent["reason"], sent["earlier"]["difference"]) == ("different_text", difference)
    stranger = await explained(client, chat("14:05:11"), "bob")
    assert (stranger["reason"], stranger["earlier"]) == ("never_seen", None)
    admin = await explained(client, chat("14:05:11"), "root")
    assert admin["reason"] == "another_salt"
    assert admin["earlier"]["request_id"].startswith("chatcmpl-")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_tells_why(client: httpx.AsyncClient, path: str, stream: bool) -> None:
    bodies = {
        COMPLETIONS: prompt(5),
        CHAT: chat("9:00"),
        RESPONSES: {"input": STORY, "cache_salt": "s", "max_output_tokens": 1},
        MESSAGES: {"messages": chat("")["messages"][1:], "system": STORY, "max_tokens": 1},
    }
    body = {**bodies[path], "cache_salt": f"{path} {stream}"}
    before = await explained(client, body)
    fields = {**body, "cache_diagnostics": True, "stream": stream}
    response = await post(client, path, fields, "alice")
    assert response.status_code == 200, response.text
    if not stream:
        shown = response.json()["cache_diagnostics"]
    else:
        lines = [one for one in response.text.split("\n") if one.startswith("data: {")]
        found = [json.loads(one.removeprefix("data: ")) for one in lines]
        parts = [one.get("message") or one.get("response") or one for one in found]
        (shown,) = [one["cache_diagnostics"] for one in parts if "cache_diagnostics" in one]
    assert shown == [before]
    assert before["reason"] == "never_seen"
    assert (await explained(client, body))["reason"] == "tail"


async def test_nothing_is_shown_across_keys_and_salts(client: httpx.AsyncClient) -> None:
    """Whatever Alice does under her salt, Bob reads the same as if she had done nothing."""
    bodies = [prompt(7), prompt(7, cache_diagnostics=True), prompt(7, salt="t")]

    async def seen(key: str) -> list[Any]:
        found = [await explained(client, one, key) for one in bodies]
        return [{name: one[name] for name in one if name != "prompt_tokens"} for one in found]

    nothing = await seen("bob")
    assert {one["reason"] for one in nothing} == {"never_seen"}
    await posted(client, COMPLETIONS, prompt(7))
    assert await seen("bob") == nothing
    await post(client, "/reset_prefix_cache", {}, "root")
    assert await seen("bob") == nothing
    await posted(client, COMPLETIONS, prompt(7))
    for first in range(100, 120):
        await posted(client, COMPLETIONS, prompt(first, salt="noise"), "alice")
    assert await seen("bob") == nothing
    assert (await explained(client, prompt(7)))["reason"] == "evicted"
    other_salt = await explained(client, prompt(7, salt="t"))
    assert (other_salt["reason"], other_salt["earlier"], other_salt["lost"]) == (
        "never_seen",
        None,
        None,
    )
    # The salt as the cache knows it belongs to one key: nobody else can spell it.
    for spelled in ("alice:s", "s:s"):
        assert (await explained(client, prompt(7, salt=spelled), "bob"))["reason"] == "never_seen"


async def test_without_a_salt_a_key_asks_nothing(client: httpx.AsyncClient) -> None:
    for path, body in (
        (EXPLAIN, prompt(7, salt=None)),
        (COMPLETIONS, prompt(7, None, cache_diagnostics=True)),
    ):
        response = await post(client, path, body, "alice")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")
        await posted(client, path, body, "root")


async def test_comparisons_by_the_names_of_both_apis(client: httpx.AsyncClient) -> None:
    def response(text: str, **options: Any) -> dict[str, Any]:
        return {"input": text, "max_output_tokens": 1, "prompt_cache_options": options or None}

    first = await posted(client, RESPONSES, response(STORY + STORY))
    compared = response("Another. " + STORY + STORY, comparison_response_id=first["id"])
    shown = (await posted(client, RESPONSES, compared))["prompt_cache_diagnostics"]
    assert (shown["type"], shown["reason"]) == ("cache_miss", "input_changed")
    assert 0 < shown["cache_missed_tokens"] <= shown["comparison_reusable_tokens"]
    again = response(STORY + STORY, comparison_response_id=first["id"])
    assert (await posted(client, RESPONSES, again))["prompt_cache_diagnostics"] == {
        "type": "cache_hit"
    }
    hidden = (await posted(client, RESPONSES, again, "bob"))["prompt_cache_diagnostics"]
    assert hidden == {"type": "comparison_response_not_found"}

    salted = {**again, "cache_salt": "another"}
    assert (await posted(client, RESPONSES, salted))["prompt_cache_diagnostics"] == hidden

    def message(system: str, previous: str | None, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": STORY}]
        body = {"messages": messages, "system": system, "max_tokens": 1, **fields}
        return {**body, "diagnostics": {"previous_message_id": previous}}

    first = await posted(client, MESSAGES, message("Be brief.", None))
    assert "diagnostics" not in first
    same = await posted(client, MESSAGES, message("Be brief.", first["id"]))
    assert same["diagnostics"] is None
    other = await posted(client, MESSAGES, message("Be long.", first["id"]))
    reason = other["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == "system_changed"
    assert reason["cache_missed_input_tokens"] > 0
    unknown = await posted(client, MESSAGES, message("Be brief.", "msg_x"))
    assert unknown["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    streamed = await post(client, MESSAGES, message("Be!", first["id"], stream=True), "alice")
    begun = json.loads(streamed.text.split("data: ")[1].split("\n")[0])
    assert begun["type"] == "message_start"
    assert begun["message"]["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, prompt(5, temperature=-1)),
        (COMPLETIONS, prompt(5, prompt=[1, 10**6])),
        (COMPLETIONS, prompt(5, prompt=[7] * 5000)),
        (COMPLETIONS, prompt(5, model="another")),
        (COMPLETIONS, prompt(5, cache_diagnostics="yes")),
        (CHAT, chat("", messages=[])),
        (RESPONSES, {"input": 7, "cache_salt": "s"}),
    ],
)
async def test_a_wrong_body_gets_the_endpoints_own_error(client, path, body):
    expected = await post(client, path, body, "alice")
    assert expected.status_code in (400, 404)
    found = await post(client, EXPLAIN, body, "alice")
    assert (found.status_code, found.json()) == (expected.status_code, expected.json())


async def test_without_text_and_without_memory(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint()
    app, engine = serve_folder(folder, diagnostics_memory=1 << 20, keeps_text=False)
    async with client_of(app) as client:
        await posted(client, CHAT, chat("14:04:37", None))
        one = await explained(client, chat("14:05:11", None))
        assert one["reason"] == "different_text"
        assert one["earlier"]["difference"]["token"] > 0
        assert one["earlier"]["difference"]["text"] is None
    async with client_of(app, "10.0.0.1") as stranger:
        one = await explained(stranger, chat("14:05:11", None))
        assert one["earlier"]["request_id"] is None
    engine.close()
    app, engine = serve_folder(folder)
    async with client_of(app) as client:
        for path, body in ((EXPLAIN, prompt(1)), (COMPLETIONS, prompt(1, cache_diagnostics=True))):
            response = await post(client, path, body, "")
            assert response.status_code == 400
            assert "--diagnostics-memory" in response.json()["error"]["message"]
    engine.close()


async def test_who_has_no_key_reads_no_text_of_others(tiny_checkpoint: Callable[..., Path]) -> None:
    """Without keys callers cannot be distinguished, so that only this machine is shown texts."""
    app, engine = serve_folder(tiny_checkpoint(), diagnostics_memory=1 << 20)
    async with client_of(app, "10.0.0.1") as client:
        await posted(client, CHAT, chat("14:04:37"))
        hidden = await explained(client, chat("14:05:11"))
        assert "14:04:37" not in json.dumps(hidden)
        assert hidden["earlier"]["difference"]["earlier_text"] is None
        assert hidden["earlier"]["difference"]["field_character"] > 0
    async with client_of(app) as client:
        shown = await explained(client, chat("14:05:11"))
        assert shown["earlier"]["difference"]["earlier_text"].startswith("14:04:37")
    engine.close()
