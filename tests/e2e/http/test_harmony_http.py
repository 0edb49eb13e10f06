"""gpt-oss's channels through every API: streamed and whole, with what the cache makes of turns."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from prefixcache.types.structured_output import StructuredOutput
from support.chat_models import QUESTION, TOOLS, assistant, tokenizer, with_special_tokens
from support.serving import MODEL, FakeEngine, client_of, fake_app, says, served_folder

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
THOUGHT, SAID, ARGUMENTS = "It asks about Rome.", "Let me see.", '{"city": "Rome", "unit": "C"}'
ANSWER = (
    f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    f"<|channel|>commentary<|message|>{SAID}<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
)
WEATHER = TOOLS[0]["function"]
ASKED = {
    CHAT: {"messages": QUESTION, "tools": TOOLS},
    RESPONSES: {"input": QUESTION, "tools": [{"type": "function", **WEATHER}]},
    MESSAGES: {
        "messages": QUESTION,
        "max_tokens": 99,
        "tools": [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}],
    },
}


class Scripted(FakeEngine):
    """A model that says `ANSWER`, a character a token, whatever its grammar."""

    def __init__(self) -> None:
        super().__init__(lambda request: says(request, *ANSWER))
        self.max_model_len = 4096

    def find_grammar(self, output: StructuredOutput) -> object:
        assert output.kind == "grammar"
        return object()


@pytest.fixture
async def scripted() -> AsyncGenerator[httpx.AsyncClient, None]:
    async with client_of(fake_app(Scripted(), tokenizer("gpt-oss"))) as client:
        yield client


def _of_chat(message: dict[str, Any]) -> tuple[str, str, str, str]:
    ((call),) = message["tool_calls"]
    function = call["function"]
    return message["reasoning"], message["content"], function["name"], function["arguments"]


def _of_response(response: dict[str, Any]) -> tuple[str, str, str, str]:
    reasoning, message, call = response["output"]
    assert (reasoning["type"], message["type"]) == ("reasoning", "message")
    texts = (reasoning["content"][0]["text"], message["content"][0]["text"])
    return *texts, call["name"], call["arguments"]


def _of_message(message: dict[str, Any]) -> tuple[str, str, str, str]:
    thinking, text, use = message["content"]
    return thinking["thinking"], text["text"], use["name"], json.dumps(use["input"])


def _streamed_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    deltas = [one["choices"][0]["delta"] for one in chunks]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = "".join(one["arguments"] for one in calls)
    return {
        "reasoning": "".join(delta.get("reasoning", "") for delta in deltas),
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "tool_calls": [{"function": {"name": calls[0]["name"], "arguments": arguments}}],
    }


def _streamed_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            name = {"input_json": "partial_json"}.get(kind, kind)
            kept = "json" if kind == "input_json" else kind
            blocks[-1][kept] += delta[name]
    blocks[-1]["input"] = json.loads(blocks[-1]["json"])
    return {"content": blocks}


@pytest.mark.parametrize("path", ASKED)
async def test_every_api_tells_reasoning_content_and_calls(scripted, path):
    whole = await scripted.post(path, json=ASKED[path])
    streamed = await scripted.post(path, json={**ASKED[path], "stream": True})
    for answer in (whole, streamed):
        assert answer.status_code == 200, answer.text
        assert not any(one in answer.text for one in ("<|", "commentary", "functions."))
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    read = {CHAT: _of_chat, RESPONSES: _of_response, MESSAGES: _of_message}[path]
    body = whole.json()
    both = {
        CHAT: lambda: (body["choices"][0]["message"], _streamed_chat(events)),
        RESPONSES: lambda: (body, events[-1]["response"]),
        MESSAGES: lambda: (body, _streamed_message(events)),
    }[path]()
    for one in both:
        assert read(one) == (THOUGHT, SAID, "get_weather", ARGUMENTS)
    assert body.get("stop_reason", "tool_use") == "tool_use"


@pytest.mark.parametrize(
    ("path", "field", "value", "effort"),
    [
        (CHAT, "reasoning_effort", "high", "high"),
        (CHAT, "reasoning_effort", "minimal", "low"),
        (CHAT, "chat_template_kwargs", {"reasoning_effort": "low"}, "low"),
        (RESPONSES, "reasoning", {"effort": "low"}, "low"),
        (MESSAGES, "output_config", {"effort": "max"}, "high"),
        (CHAT, "reasoning_effort", None, "medium"),
    ],
)
async def test_the_effort_reaches_the_prompt(path, field, value, effort):
    engine, known = Scripted(), tokenizer("gpt-oss")
    async with client_of(fake_app(engine, known)) as client:
        assert (await client.post(path, json={**ASKED[path], field: value})).status_code == 200
    assert f"Reasoning: {effort}\n" in known.decode(engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
async def test_an_effort_that_nobody_knows_is_refused(scripted, path, asked, param):
    answer = await scripted.post(path, json={**ASKED[path], **asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_later_turn_reads_the_blocks_of_the_one_before(tiny_checkpoint):
    """But none behind an analysis that the template leaves out later: explain says where."""
    folder = tiny_checkpoint("gpt-oss", max_position_embeddings=2048, vocab_size=416)
    folder = with_special_tokens(folder, "gpt-oss")
    call = assistant(("c", "get_time", {}), reasoning="It asks for the time of day there.")
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    said = [{"role": "assistant", "content": "Noon."}, {"role": "user", "content": "And now?"}]
    turns = [[], [call, result], [call, result, *said]]
    async with served_folder(folder, diagnostics_memory=1 << 20, num_blocks=400) as (http, _):
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http
        )
        usages: list[Any] = []
        for turn in turns:
            asked = {"messages": [*QUESTION, *turn], "tools": TOOLS}
            explained = (await http.post("/prefix_cache/explain", json=asked)).json()
            answer = await client.chat.completions.create(model=MODEL, max_tokens=1, **asked)
            usages.append(answer.usage)
    cached = [one.prompt_tokens_details.cached_tokens for one in usages]
    assert cached == [0, *[usages[0].prompt_tokens // 16 * 16] * 2]
    (one,) = explained["prompts"]
    assert (one["reason"], one["cached_tokens"]) == ("different_text", cached[-1])
    found = one["earlier"]["difference"]
    assert (found["message"], found["field"]) == (1, "reasoning_content")
    assert "<|channel|>analysis" in found["earlier_text"]
