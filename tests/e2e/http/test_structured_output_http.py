"""Structured output as openai's own client asks for it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from annotated_types import Le, MaxLen
from pydantic import BaseModel

from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.exceptions import GrammarError
from prefixcache.text.grammar.compiler import Matcher
from support.serving import MODEL, client_of, serve_folder, until

Short = Annotated[str, MaxLen(6)]


class Person(BaseModel):
    name: Short
    age: Annotated[int, Le(120)]
    kind: Literal["friend", "colleague"]
    tags: Annotated[list[Short], MaxLen(2)]


MESSAGES = [{"role": "user", "content": "Who is it?"}]


@pytest.fixture
async def http(tiny_checkpoint: Callable[..., Path]) -> AsyncIterator[httpx.AsyncClient]:
    app, engine = serve_folder(tiny_checkpoint("qwen3"))
    async with client_of(app) as client:
        yield client
    await engine.shutdown()


async def test_a_pydantic_model_is_parsed_streamed_and_not(http: httpx.AsyncClient) -> None:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 4}
    whole = await client.chat.completions.parse(response_format=Person, **asked)
    assert isinstance(whole.choices[0].message.parsed, Person)
    async with client.chat.completions.stream(response_format=Person, **asked) as stream:
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}, "[0-9]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": {"enum": [1, 22]}}}, "1|22"),
        ({"guided_json": '{"const": "a"}'}, '"a"'),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"guided_regex": "a{2,4}"}, "a{2,4}"),
        ({"guided_choice": ["a/b\n", "ü"]}, "a/b\n|ü"),
    ],
    ids=[
        "regex",
        "choice",
        "json",
        "guided-json",
        "guided-grammar",
        "guided-regex",
        "guided-choice",
    ],
)
async def test_vllms_fields_hold_for_every_prompt_and_choice(http, fields, pattern):
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 30, "temperature": 1, **fields}
    answers = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert len(answers) == 4
    assert {answer["finish_reason"] for answer in answers} == {"stop"}
    assert all(re.fullmatch(pattern, answer["text"]) for answer in answers)


@pytest.mark.parametrize("older", [True, False])
async def test_messages_take_a_schema_by_either_name(http: httpx.AsyncClient, older: bool) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["a friend", "nobody"]}}
    field = {"output_format": form} if older else {"output_config": {"format": form}}
    body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 1, "model": MODEL, **field}
    answer = (await http.post("/v1/messages", json=body)).json()
    assert json.loads(answer["content"][0]["text"]) in form["schema"]["enum"]


async def test_others_are_served_while_a_grammar_is_compiled(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, compile_grammar = threading.Event(), threading.Event(), AsyncEngine.compile

    def held(*given: Any, **options: Any) -> Any:
        begun.set()
        assert may_end.wait(60), "nobody was served meanwhile"
        return compile_grammar(*given, **options)

    monkeypatch.setattr(AsyncEngine, "compile", held)
    slow = {"structured_outputs": {"json": {"enum": [f"v {i}" for i in range(20_000)]}}}
    compiled = asyncio.create_task(
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 20, **slow})
    )
    await until(begun.is_set)
    free = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert free.status_code == 200
    assert not compiled.done()
    may_end.set()
    assert (await compiled).json()["choices"][0]["text"].startswith('"v ')


async def test_a_limit_of_the_grammar_on_the_way_is_the_requests_error(http, monkeypatch):
    def follow(matcher: Matcher, token_id: int) -> None:
        raise GrammarError("too many items")

    monkeypatch.setattr(Matcher, "follow", follow)
    body = {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[ab]{9}"}}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "grammar_limit")
    assert error["message"].endswith("too many items")
    events = (await http.post("/v1/completions", json=body | {"stream": True})).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"] == error
