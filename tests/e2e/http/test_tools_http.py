"""Tools and reasoning over HTTP: a random model is forced to call, and OpenAI's client reads it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseCustomToolCall, ResponseFunctionToolCall

from prefixcache.server.openai import response_tools
from prefixcache.server.openai.response_tools import InputText
from prefixcache.server.options.limits import MAX_GRAMMAR_CHARACTERS
from support.chat_models import CLOCK, QUESTION, TOOLS, assistant, with_special_tokens
from support.repeatable import bounded
from support.serving import MODEL, running, serve_folder, served_folder

CHAT = "/v1/chat/completions"
NAMED = {"type": "function", "function": {"name": "get_time"}}
# A random model writes long names of cities, and goes on calling.
SAMPLED = {"temperature": 1.0, "max_tokens": 300, "parallel_tool_calls": False}


def _address(folder: Path, family: str) -> Generator[str, None, None]:
    folder = with_special_tokens(folder, family)
    app, engine = serve_folder(folder, num_blocks=600, max_num_seqs=8)
    with running(app) as url:
        yield url
    engine.close()


@pytest.fixture(scope="module")
def smollm2(tiny_checkpoint: Callable[..., Path]) -> Generator[str, None, None]:
    yield from _address(tiny_checkpoint(max_position_embeddings=2048), "smollm2")


@pytest.fixture(scope="module")
def qwen2(tiny_checkpoint: Callable[..., Path]) -> Generator[str, None, None]:
    yield from _address(tiny_checkpoint(max_position_embeddings=1024), "qwen2")


@pytest.fixture(scope="module")
def qwen3(tiny_checkpoint: Callable[..., Path]) -> Generator[str, None, None]:
    """Every prompt ends where reasoning begins."""
    yield from _address(tiny_checkpoint(max_position_embeddings=768), "qwen3-thinking")


def _ask(address: str, **fields: Any) -> Any:
    """The answer, or the chunks of a stream."""
    fields = {"messages": QUESTION, "tools": TOOLS, **SAMPLED, **fields}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, **fields)
        return list(answer) if fields.get("stream") else answer


def _check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "get_time":
        assert given == {}
        return
    assert name == "get_weather"
    assert set(given) == {"city", "unit"}
    assert len(given["city"]) <= 12
    assert given["unit"] in ("C", "F")


def _calls(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize("family", ["smollm2", "qwen2"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_keep_to_their_schema(request, family, choice):
    address = request.getfixturevalue(family)
    for seed in range(bounded(2, 100)):
        answer = _ask(address, tool_choice=choice, seed=seed).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        ((name, arguments),) = _calls(answer.message)
        _check(name, arguments)
        assert choice == "required" or name == "get_time"


def test_a_stream_makes_the_same_message(smollm2):
    fields = {"tool_choice": "required", "seed": 4, "n": 2, "logprobs": True, "stop": ["Z"]}
    whole = _ask(smollm2, **fields)
    seen = {0: _Streamed(), 1: _Streamed()}
    for chunk in _ask(smollm2, stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage
        for choice in chunk.choices:
            seen[choice.index].add(choice)
    assert usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        streamed = seen[choice.index]
        assert list(streamed.calls.values()) == [list(call) for call in _calls(choice.message)]
        assert streamed.content == (choice.message.content or "")
        assert streamed.tokens == [one.token for one in choice.logprobs.content]
        assert streamed.finish_reason == choice.finish_reason
    assert max(streamed.num_pieces for streamed in seen.values()) > 4


class _Streamed:
    """What the chunks of one choice make."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: dict[int, list[str]] = {}
        self.tokens: list[str] = []
        self.finish_reason: str | None = None
        self.num_pieces = 0

    def add(self, choice: Any) -> None:
        self.content += choice.delta.content or ""
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.tokens += [one.token for one in (choice.logprobs and choice.logprobs.content) or ()]
        for call in choice.delta.tool_calls or ():
            if call.index not in self.calls:
                assert call.id
                self.calls[call.index] = [call.function.name, ""]
            self.calls[call.index][1] += call.function.arguments
            self.num_pieces += 1


def test_a_call_that_is_cut_off_is_reported_as_far_as_it_came(smollm2):
    fields = {"tool_choice": "required", "seed": 2}
    whole = _ask(smollm2, **fields)
    most = whole.usage.completion_tokens - 16
    answer = _ask(smollm2, **fields | {"max_tokens": most}).choices[0]
    ((name, arguments),) = _calls(whole.choices[0].message)
    assert answer.finish_reason == "length"
    ((cut_name, cut),) = _calls(answer.message)
    assert cut_name == name
    assert arguments.startswith(cut)
    assert len(cut) < len(arguments)


@pytest.mark.parametrize("family", ["smollm2", "qwen2"])
def test_a_round_trip_hits_the_calls_of_the_answer(request, family):
    address = request.getfixturevalue(family)
    first = _ask(address, tool_choice=NAMED, temperature=0)
    (call,) = first.choices[0].message.tool_calls
    said = first.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    later = _ask(address, messages=[*QUESTION, said, result], tool_choice="none")
    assert later.choices[0].message.tool_calls is None
    assert later.choices[0].finish_reason in ("stop", "length")
    cached = later.usage.prompt_tokens_details.cached_tokens
    assert cached > first.usage.prompt_tokens


GRAMMARS: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[a-z ]{4,40}"}},
    {"structured_outputs": {"choice": ["one of them", "one or the other"]}},
]
TTLS = [None, {"mode": "explicit"}, {"mode": "explicit", "ttl": "12h"}]


@settings(max_examples=bounded(8, 200), deadline=None)
@given(
    choice=st.sampled_from(["none", "auto", "required", NAMED]),
    grammar=st.sampled_from(GRAMMARS),
    marks=st.lists(st.sampled_from(TTLS), min_size=3, max_size=3),
    mode=st.sampled_from([None, {}, {"mode": "explicit"}]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_hits_change_no_bit_whatever_is_asked(
    smollm2, choice, grammar, marks, mode, temperature, seed
):
    """With grammars, tools and breakpoints: what is read changes neither tokens nor their odds."""
    parts = [{"type": "text", "text": f"Part {number}. " * 9} for number in range(3)]
    for part, mark in zip(parts, marks, strict=True):
        part |= {} if mark is None else {"prompt_cache_breakpoint": mark}
    body = {"messages": [{"role": "user", "content": parts}], "tools": TOOLS, **SAMPLED}
    body |= {"tool_choice": choice, "seed": seed, "temperature": temperature, "max_tokens": 24}
    body |= {"logprobs": True, "n": 2, "cache_salt": uuid.uuid4().hex}
    body |= grammar if choice in ("none", "auto") else {}
    body |= {} if mode is None else {"prompt_cache_options": mode}
    reported = []
    for _ in range(2):
        answer = httpx.post(f"{smollm2}{CHAT}", json=body, timeout=240).json()
        reported.append((_without_ids(answer["choices"]), answer["usage"]["prompt_tokens_details"]))
    assert reported[0][0] == reported[1][0]
    read, written = reported[1][1]["cached_tokens"], reported[0][1]["cache_write_tokens"]
    assert reported[0][1]["cached_tokens"] == 0
    assert read == written // 16 * 16
    assert bool(written) == (mode != {"mode": "explicit"} or any(marks))


def _without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
    return choices


def test_reasoning_is_separated_and_counted(qwen3):
    fields = {"tools": openai.omit, "parallel_tool_calls": openai.omit, "max_tokens": 8}
    answer = _ask(qwen3, seed=1, **fields)
    message = answer.choices[0].message
    assert message.content is None
    assert message.reasoning_content
    assert message.reasoning == message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8
    streamed = [chunk.choices[0].delta for chunk in _ask(qwen3, seed=1, stream=True, **fields)]
    assert "".join(getattr(one, "reasoning", "") for one in streamed) == message.reasoning
    fields["extra_body"] = {"include_reasoning": False}
    quiet = _ask(qwen3, seed=1, **fields)
    assert quiet.usage.completion_tokens_details == answer.usage.completion_tokens_details
    streamed = [chunk.choices[0].delta for chunk in _ask(qwen3, seed=1, stream=True, **fields)]
    for one in (quiet.choices[0].message, *streamed):
        assert not {"reasoning", "reasoning_content"} & one.model_dump().keys()


async def test_variables_of_the_template_have_defaults(tiny_checkpoint):
    folder = with_special_tokens(tiny_checkpoint(), "qwen3")
    defaults = {"template_variables": {"enable_thinking": False}}

    async def count(client: httpx.AsyncClient, **fields: Any) -> int:
        response = await client.post("/tokenize", json={"messages": QUESTION, **fields})
        return response.json()["count"]

    async with served_folder(folder) as (client, _):
        thinks = await count(client)
        silent = await count(client, chat_template_kwargs={"enable_thinking": False})
    async with served_folder(folder, served=defaults) as (client, _):
        assert await count(client) == silent > thinks
        assert await count(client, chat_template_kwargs={"enable_thinking": True}) == thinks


def test_prompts_are_described_with_their_tools(smollm2):
    body = {"messages": [*QUESTION, assistant(("c", "get_time", {}))], "tools": TOOLS}
    counted = httpx.post(f"{smollm2}/tokenize", json=body, timeout=240).json()["count"]
    answer = httpx.post(f"{smollm2}{CHAT}", json=body | {"max_tokens": 1}, timeout=240).json()
    assert answer["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("schema", "reported"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "strin"),
        ({"properties": {"a": {"$ref": "https://example.com/a"}}}, "registry"),
        ({"properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
        ({"properties": {"a": {"type": "string", "pattern": "(("}}}, "unclosed group"),
    ],
    ids=["type", "reference", "nothing", "pattern"],
)
def test_schemas_that_cannot_be_kept_are_named(smollm2, schema, reported):
    bad = {"type": "function", "function": {"name": "bad", "parameters": schema}}
    for stream in (False, True):
        body = {"messages": QUESTION, "tools": [CLOCK, bad], "stream": stream}
        response = httpx.post(f"{smollm2}{CHAT}", json=body, timeout=240)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"] == "tools[1].function.parameters"
        assert reported in error["message"]
        assert "get_time" not in error["message"]


# With what Codex' own uses: an import, an alias, an optional end.
PATCH_GRAMMAR = """start: head file+ tail
head: "*** Begin Patch" LF
tail: "*** End Patch" LF?
file: "*** Add File: " /(.+)/ LF added+
added: ("+" | " ") /(.*)/ LF -> line

%import common.LF
"""
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
PAGES = {
    "type": "namespace",
    "name": "mcp__pages",
    "description": "Pages of the team.",
    "tools": [
        {"type": "function", "name": "get_time", "parameters": {"properties": {}}},
        {"type": "custom", "name": "note", "format": {"type": "text"}},
    ],
}
SEARCH = {"type": "web_search", "external_web_access": True}
COMMAND = {"cmd": {"type": "string", "maxLength": 5}}
SHELL = {
    "type": "function",
    "name": "exec_command",
    "parameters": {"type": "object", "properties": COMMAND, "required": ["cmd"]},
}
CODEX_TOOLS = [SHELL, SEARCH, PATCH, PAGES, {"type": "image_generation"}]
ASKED = {"input": "Add a file.", "tools": CODEX_TOOLS, "temperature": 1, "max_output_tokens": 200}


def _responses(address: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{address}/v1/responses", json={**ASKED, **fields}, timeout=300)


@pytest.mark.parametrize(
    ("choice", "kind", "called"),
    [
        ({"type": "custom", "name": "apply_patch"}, "custom_tool_call", ("apply_patch", None)),
        (
            {"type": "function", "name": "get_time", "namespace": "mcp__pages"},
            "function_call",
            ("get_time", "mcp__pages"),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "note", "namespace": "mcp__pages"}],
            },
            "custom_tool_call",
            ("note", "mcp__pages"),
        ),
        ({"type": "function", "name": "exec_command"}, "function_call", ("exec_command", None)),
    ],
)
def test_codex_tools_are_called_as_it_names_them(smollm2, choice, kind, called):
    """It finds a namespace's function by both names alone: butterbase-ai/butterbase#134."""
    answer = _responses(smollm2, tool_choice=choice, seed=2)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prefixcache-warning"] == "tools left out: web_search, image_generation"
    body = answer.json()
    assert body["left_out_tools"] == ["web_search", "image_generation"]
    assert body["tools"] == CODEX_TOOLS
    (item,) = body["output"]
    assert (item["type"], item["name"], item.get("namespace")) == (kind, *called)
    parsed = Response.model_validate(body).output[0]
    assert isinstance(parsed, ResponseCustomToolCall | ResponseFunctionToolCall)
    streamed = _responses(smollm2, tool_choice=choice, seed=2, stream=True).text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.splitlines()
        if line.startswith("data: ")
    ]
    name, text = ("custom_tool_call_input", "input")
    if kind == "function_call":
        name, text = ("function_call_arguments", "arguments")
    deltas = [event["delta"] for event in events if event["type"] == f"response.{name}.delta"]
    (done,) = [event[text] for event in events if event["type"] == f"response.{name}.done"]
    assert "".join(deltas) == done == item[text]
    output = {"type": f"{kind}_output", "call_id": item["call_id"], "output": "Done."}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    search["action"] = {"type": "search", "query": "news"}
    sent = [{"role": "user", "content": "Add a file."}, search, item, output]
    for later in ({"input": sent}, {"input": [output], "previous_response_id": body["id"]}):
        again = _responses(smollm2, **later)
        assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "web_search"}],
                }
            },
            "tool_choice.tools[0].type",
        ),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [SEARCH, {"type": "nothing"}]}, "tools[1].type"),
        (
            {"tools": [SEARCH, {**PATCH, "format": {**PATCH["format"], "definition": "start: x"}}]},
            "tools[1].format.definition",
        ),
        (
            {"tools": [{**PATCH, "format": {**PATCH["format"], "syntax": "bnf"}}]},
            "tools[0].format.syntax",
        ),
        (
            {"tools": [SEARCH, {**PAGES, "tools": [{**SHELL, "parameters": {"type": "array"}}]}]},
            "tools[1].tools[0].parameters.type",
        ),
        ({"tools": [SEARCH, {**SHELL, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [PATCH] * 17}, "tools"),
        ({"tools": [{**PAGES, "name": "", "tools": [PAGES]}]}, "tools[0].tools[0].type"),
    ],
)
def test_what_is_wrong_with_such_tools_is_named_where_it_stands(smollm2, fields, param):
    answer = _responses(smollm2, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_count_of_tokens_names_wrong_tools_and_those_left_out(smollm2):
    def count(tool: dict[str, Any]) -> httpx.Response:
        body = {"input": "a", "tools": [SEARCH, tool]}
        return httpx.post(f"{smollm2}/v1/responses/input_tokens", json=body, timeout=300)

    wrong = count({**SHELL, "name": "a b"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tools[1].name")
    assert count(SHELL).headers["x-prefixcache-warning"] == "tools left out: web_search"


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_grammar_of_a_tool_has_the_limit_of_all_grammars(smollm2, syntax):
    form = {"type": "grammar", "syntax": syntax, "definition": "x" * (MAX_GRAMMAR_CHARACTERS + 1)}
    error = _responses(smollm2, tools=[SEARCH, {**PATCH, "format": form}]).json()["error"]
    assert (error["param"], error["code"]) == ("tools[1].format.definition", "too_long")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\u00e9\\ud83d\\ude00\\\\ud83d"}', 'a\n"b\u00e9\U0001f600\\ud83d'),
        ('{ "input" :"a\nb"} ', "a\nb"),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "a\\ud83d b"}', "a"),
        ('{"input": ""}', ""),
        ('{"inp', ""),
        ("{}", ""),
        ('{"other": "a"}', ""),
        ('{"input": 3}', '{"input": 3}'),
        ("a patch", "a patch"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_text_of_a_custom_call_comes_in_any_pieces(arguments, text, size):
    reader = InputText()
    pieces = [reader.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    assert "".join(pieces) + reader.end() == text


@pytest.mark.parametrize("begin", ["", '{"input": "', '{"input": "a", "', '{"input": "\\ud83d'])
def test_a_piece_of_a_custom_call_costs_its_own_length(begin, monkeypatch):
    lengths: list[int] = []

    def counted(pattern: re.Pattern[str]) -> Any:
        def match(text: str) -> re.Match[str] | None:
            lengths.append(len(text))
            return pattern.match(text)

        return mock.Mock(match=match)

    for name in ("_BEGIN", "_CERTAIN"):
        monkeypatch.setattr(response_tools, name, counted(getattr(response_tools, name)))
    reader = InputText()
    for piece in [begin, *["word "] * 2_000]:
        reader.push(piece)
    assert sum(lengths) < 20_000


def test_the_expression_of_a_custom_tool_is_kept_to(smollm2):
    form = {"type": "grammar", "syntax": "regex", "definition": r"[a-c]{3}-\d{1,9};"}
    tools = [{"type": "custom", "name": "code", "format": form}]
    body = _responses(smollm2, tools=tools, tool_choice="required").json()
    assert re.fullmatch(form["definition"], body["output"][0]["input"])
