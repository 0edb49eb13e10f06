"""What we answered we accept: each answer, cut anywhere, goes back as history to each API."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixcache.types.request import Request, RequestOutput
from prefixcache.types.structured_output import StructuredOutput
from support.chat_models import QUESTION, TOOLS, tokenizer
from support.repeatable import bounded
from support.serving import FakeEngine, client_of, fake_app, says

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ARGUMENTS = '{"city": "Rome", "unit": "C"}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWERS = {
    "smollm2": f"Well.{HERMES.replace('{', '[{', 1).replace('}}', '}}]')}",
    "qwen3-thinking": f"Rome?\n</think>\n\nWell.\n{HERMES}\n{HERMES}",
    "llama3": ARGUMENTS.join(('{"name": "get_weather", "parameters": ', "}")),
    "mistral-ids": f"[TOOL_CALLS]get_weather[CALL_ID]aBcDeF123[ARGS]{ARGUMENTS}",
    "ministral3": f"[THINK]Rome?[/THINK]Well.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "qwen3-coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>"
    ),
    "lfm2": "<|tool_call_start|>[get_weather(city='Rome', unit='C')]<|tool_call_end|>",
    "gemma4-own": '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,unit:<|"|>C<|"|>}<tool_call|>',
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    ),
    "described": (
        f'<hm>Rome?</hm>Well.<call>{{"f": "get_weather", "a": {ARGUMENTS}}}</call>'
        '<call>{"f": "", "a": [1]}</call>'
    ),
}


def _turns(path: str, answer: Any) -> list[tuple[str, Any]]:
    """What an answer holds in its order: ("thought" | "text", text), ("call", (id, name, text))."""
    turns: list[tuple[str, Any]] = []
    if path == CHAT:
        message = answer["choices"][0]["message"]
        turns.append(("thought", message.get("reasoning_content")))
        turns.append(("text", message["content"]))
        calls = message.get("tool_calls") or ()
        turns += [("call", (call["id"], *call["function"].values())) for call in calls]
    elif path == RESPONSES:
        for item in answer["output"]:
            if item["type"] == "function_call":
                turns.append(("call", (item["call_id"], item["name"], item["arguments"])))
            else:
                kind = "thought" if item["type"] == "reasoning" else "text"
                turns.append((kind, item["content"][0]["text"]))
    else:
        for block in answer["content"]:
            if block["type"] == "tool_use":
                call = block["id"], block["name"], json.dumps(block["input"])
                turns.append(("call", call))
            else:
                kind = "thought" if block["type"] == "thinking" else "text"
                turns.append((kind, block.get("thinking", block.get("text"))))
    return [(kind, value) for kind, value in turns if value]


def _object(arguments: str) -> Any:
    """As clients of /v1/messages read arguments that another API gave them."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _chat_body(turns: list[tuple[str, Any]], results: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": None}
    for kind, value in turns:
        if kind == "call":
            call_id, name, arguments = value
            function = {"name": name, "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        else:
            name = "content" if kind == "text" else "reasoning_content"
            said[name] = (said.get(name) or "") + value
    ids = [value[0] for kind, value in turns if kind == "call" and results]
    tool = [{"role": "tool", "tool_call_id": call_id, "content": "error"} for call_id in ids]
    return {"messages": [*QUESTION, said, *tool, {"role": "user", "content": "Go on."}]}


def _response_items(turns: list[tuple[str, Any]], results: bool) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for kind, value in turns:
        if kind == "call":
            call_id, name, arguments = value
            call = {"call_id": call_id, "name": name, "arguments": arguments}
            items.append({"type": "function_call", **call})
        elif kind == "text":
            part = {"type": "output_text", "text": value, "annotations": []}
            items.append({"type": "message", "role": "assistant", "content": [part]})
        else:
            part = {"type": "reasoning_text", "text": value}
            items.append({"type": "reasoning", "summary": [], "content": [part]})
    ids = [value[0] for kind, value in turns if kind == "call" and results]
    items += [
        {"type": "function_call_output", "call_id": call_id, "output": "error"} for call_id in ids
    ]
    return [*items, {"role": "user", "content": "Go on."}]


def _message_body(turns: list[tuple[str, Any]], results: bool) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for kind, value in turns:
        if kind == "call":
            call = {"id": value[0], "name": value[1], "input": _object(value[2])}
            blocks.append({"type": "tool_use", **call})
        elif kind == "text":
            blocks.append({"type": "text", "text": value})
        else:
            blocks.append({"type": "thinking", "thinking": value, "signature": ""})
    ids = [value[0] for kind, value in turns if kind == "call" and results]
    returned = [
        {"type": "tool_result", "tool_use_id": call_id, "content": "error"} for call_id in ids
    ]
    said = [*returned, {"type": "text", "text": "Go on."}]
    turn = [{"role": "assistant", "content": blocks}]
    return {"messages": [*QUESTION, *turn, {"role": "user", "content": said}]}


def _bodies(turns: list[tuple[str, Any]], results: bool) -> dict[str, dict[str, Any]]:
    """The conversation with this answer, as clients of each API send it."""
    return {
        CHAT: _chat_body(turns, results),
        RESPONSES: {"input": [*QUESTION, *_response_items(turns, results)]},
        MESSAGES: _message_body(turns, results),
    }


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    functions = [tool["function"] for tool in TOOLS]
    schemas = ({"properties": {}, **function.get("parameters", {})} for function in functions)
    tools = {
        CHAT: TOOLS,
        RESPONSES: [{"type": "function", **function} for function in functions],
        MESSAGES: [
            {"name": function["name"], "input_schema": schema}
            for function, schema in zip(functions, schemas, strict=True)
        ],
    }
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 8}
    response = await client.post(path, json={**body, **limit, "tools": tools[path]})
    assert response.status_code == 200, (response.text, path, body)
    return response.json()


class _Scripted(FakeEngine):
    """Says one text, whatever its grammar; `reason` ends it."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(self._said)
        self._text, self._reason = text, reason
        self.max_model_len = 4096

    async def _said(self, request: Request) -> AsyncIterator[RequestOutput]:
        async for output in says(request, self._text):
            ending = dataclasses.replace(output.ending, finish_reason=self._reason)
            yield dataclasses.replace(output, ending=ending)

    def find_grammar(self, output: StructuredOutput) -> object:
        return output


async def _sent_back(
    family: str, text: str, reason: str, path: str, other: str, *, results: bool
) -> None:
    """What `path` answers goes on at `other`; a response also by its id."""
    engine = _Scripted(text, reason)
    async with client_of(fake_app(engine, tokenizer(family))) as client:
        asked = {"input" if path == RESPONSES else "messages": QUESTION}
        answer = await _post(client, path, asked)
        turns = _turns(path, answer)
        await _post(client, other, _bodies(turns, results)[other])
        if path == other == RESPONSES:
            items = _response_items(turns, results)[len(turns) :]
            await _post(client, path, {"previous_response_id": answer["id"], "input": items})


APIS = (CHAT, RESPONSES, MESSAGES)


@pytest.mark.parametrize("results", [False, True])
@pytest.mark.parametrize("other", APIS)
@pytest.mark.parametrize("path", APIS)
async def test_a_call_that_was_cut_off_goes_back_to_every_api(path, other, results):
    text = HERMES[: HERMES.index("unit")]
    await _sent_back("qwen2", text, "length", path, other, results=results)


# What a model may write that was not taught better, in any order.
PIECES = [
    *("<tool_call>", "\n", "</tool_call>", "[", "]", "{", "}", '{"name": "', '"', "<think>"),
    *("get_weather", "other", '", "arguments": ', ARGUMENTS, "{}", "[1]", "1e999", "</think>"),
    *('{"a": 1, "a": 2}', '"\\ud800"', "é"),
]
UNTAUGHT = st.tuples(
    st.sampled_from(["smollm2", "qwen3", "qwen2", "exaone4"]),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
)
CUT = st.sampled_from(sorted(ANSWERS)).flatmap(
    lambda family: st.tuples(
        st.just(family), st.integers(0, len(ANSWERS[family])).map(lambda end: ANSWERS[family][:end])
    )
)


@settings(max_examples=bounded(60, 3000))
@given(
    answer=CUT | UNTAUGHT,
    reason=st.sampled_from(["length", "stop"]),
    apis=st.tuples(st.sampled_from(APIS), st.sampled_from(APIS)),
    results=st.booleans(),
)
@example(("described", ANSWERS["described"]), "stop", (CHAT, CHAT), False)
def test_every_answer_cut_anywhere_can_be_sent_back(answer, reason, apis, results):
    asyncio.run(_sent_back(*answer, reason, *apis, results=results))
