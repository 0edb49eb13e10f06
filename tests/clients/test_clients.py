"""Clients that people use, as they install them, against a server with the default model.

The model is small: what it answers is checked where a grammar or the API makes it certain.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, Literal

import anthropic
import instructor
import litellm
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MODEL = "smollm2-135m-instruct"
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris? Ask the tool."}]
GREEDY = {"model": MODEL, "temperature": 0}


class Weather(BaseModel):
    """What the weather is like somewhere."""

    city: Literal["Paris", "London", "Rome"]
    degrees: int = Field(ge=-50, le=50)
    sky: str = Field(max_length=12)


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "London", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": PARAMETERS,
        },
    }
]
CITIES = ("Paris", "London", "Rome")


@pytest.fixture
def client(address: str) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(address: str) -> Generator[anthropic.Anthropic, None, None]:
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        yield client


def test_openai_streams_what_it_answers(client):
    asked = {**GREEDY, "messages": QUESTION, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def _ask_asynchronously(address: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            **GREEDY, messages=QUESTION, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_openai_asynchronously(address, client):
    import asyncio

    whole = client.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=24)
    assert asyncio.run(_ask_asynchronously(address)) == whole.choices[0].message.content


def test_openai_parses_a_pydantic_model(client):
    asked = {**GREEDY, "messages": QUESTION, "max_tokens": 120}
    parsed = client.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**asked, response_format=Weather) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed.choices[0].message.parsed


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tool_round_trip(client, stream):
    asked = {**GREEDY, "tools": TOOLS, "max_tokens": 120}
    if stream:
        with client.chat.completions.stream(
            **asked, messages=QUESTION, tool_choice="required"
        ) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = (
            client.chat.completions.create(**asked, messages=QUESTION, tool_choice="required")
            .choices[0]
            .message
        )
    call = message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in CITIES
    history = [
        *QUESTION,
        {
            "role": "assistant",
            "content": message.content,
            "tool_calls": [
                {"id": one.id, "type": "function", "function": one.function.model_dump()}
                for one in message.tool_calls
            ],
        },
        *(
            {"role": "tool", "tool_call_id": one.id, "content": "18 degrees, clear"}
            for one in message.tool_calls
        ),
    ]
    for one in history[1]["tool_calls"]:
        one["function"] = {name: one["function"][name] for name in ("name", "arguments")}
    answer = client.chat.completions.create(**asked, messages=history, tool_choice="none")
    assert answer.choices[0].message.content


def test_openai_responses(client):
    asked = {**GREEDY, "input": "What is the capital of Japan?", "max_output_tokens": 60}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = [*stream] and stream.get_final_response()
    assert streamed.output_text == whole.output_text
    follow = client.responses.create(
        **GREEDY, input="And of Spain?", previous_response_id=whole.id, max_output_tokens=16
    )
    assert follow.usage.input_tokens > whole.usage.input_tokens
    assert client.responses.retrieve(follow.id).output_text == follow.output_text
    client.responses.delete(follow.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(follow.id)
    parsed = client.responses.parse(
        **GREEDY, input="The weather in Paris?", text_format=Weather, max_output_tokens=120
    )
    assert isinstance(parsed.output_parsed, Weather)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses_tool_round_trip(client, stream):
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}]
    asked = {**GREEDY, "tools": tools, "max_output_tokens": 120}
    first = {"input": QUESTION[0]["content"], "tool_choice": "required", **asked}
    if stream:
        with client.responses.stream(**first) as events:
            response = [*events] and events.get_final_response()
    else:
        response = client.responses.create(**first)
    calls = [item for item in response.output if item.type == "function_call"]
    assert json.loads(calls[0].arguments)["city"] in CITIES
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
        for call in calls
    ]
    answer = client.responses.create(
        **asked, input=results, previous_response_id=response.id, tool_choice="none"
    )
    assert answer.output_text


def test_anthropic_streams_what_it_answers(claude):
    asked: Any = {"model": MODEL, "messages": QUESTION, "system": "Be short.", "max_tokens": 24}
    whole = claude.messages.create(**asked)
    assert whole._request_id
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(
        model=MODEL, messages=QUESTION, system="Be short."
    ).input_tokens
    used = whole.usage
    read, written = used.cache_read_input_tokens, used.cache_creation_input_tokens
    assert counted == used.input_tokens + read + written
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**asked, extra_body={"temperature": 300})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**asked, "model": "other"})


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_round_trip(claude, stream):
    tools: Any = [{"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}]
    asked: Any = {"model": MODEL, "tools": tools, "max_tokens": 120}
    first: Any = {**asked, "messages": QUESTION, "tool_choice": {"type": "any"}}
    if stream:
        with claude.messages.stream(**first) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**first)
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls[0].input["city"] in CITIES
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"} for call in calls
    ]
    history = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": results},
    ]
    answer = claude.messages.create(**asked, messages=history, tool_choice={"type": "none"})
    assert answer.content[0].text


def test_openai_pages_through_input_items(client):
    items = [{"role": "user", "content": f"Number {number}."} for number in range(5)]
    answer = client.responses.create(model=MODEL, input=items, max_output_tokens=2)
    listed = client.responses.input_items.list(answer.id, limit=2, order="asc")
    assert [item.content for item in listed] == [item["content"] for item in items]


def test_anthropic_lists_models(claude):
    (card,) = claude.models.list()
    assert claude.models.retrieve(MODEL) == card
    assert (card.id, card.max_input_tokens) == (MODEL, 4096)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.models.retrieve("another")


def test_both_clients_warm_what_they_ask(client, claude):
    asked: Any = {
        "model": MODEL,
        "max_tokens": 2,
        "messages": QUESTION,
        "system": "Be brief. " * 30,
    }
    warmed: Any = claude.post("/prefix_cache/warm", body=asked, cast_to=object)
    usage = claude.messages.create(**asked).usage
    assert usage.cache_read_input_tokens >= warmed["cache_write_tokens"] - 16 > 0
    asked = {"model": MODEL, "input": "Tell of the weather. " * 20, "max_output_tokens": 2}
    url = f"{client.base_url.copy_with(path='/prefix_cache/warm')}"
    warmed = client.post(url, body=asked, cast_to=object)
    details = client.responses.create(**asked).usage.input_tokens_details
    assert details.cached_tokens >= warmed["cache_write_tokens"] - 16 > 0


def test_anthropic_caching(claude):
    block = {
        "type": "text",
        "text": "A long text about the weather of many cities. " * 20,
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    }
    asked: Any = {"model": MODEL, "max_tokens": 4, "messages": QUESTION, "system": [block]}
    first = claude.messages.create(**asked).usage
    assert first.cache_creation.ephemeral_1h_input_tokens > 100
    second = claude.messages.create(**asked).usage
    assert second.cache_read_input_tokens == first.cache_creation_input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(address, stream):
    asked: Any = {"messages": QUESTION, "max_tokens": 60, "temperature": 0, "api_key": "none"}
    openais = {**asked, "model": f"openai/{MODEL}", "api_base": f"{address}/v1"}
    anthropics = {**asked, "model": f"anthropic/{MODEL}", "api_base": address}
    texts = []
    for one in (openais, anthropics):
        answer = litellm.completion(**one, stream=stream)
        if stream:
            texts.append("".join(c.choices[0].delta.content or "" for c in answer))
        else:
            texts.append(answer.choices[0].message.content)
    assert texts[0] == texts[1] != ""
    called = litellm.completion(**openais, tools=TOOLS, tool_choice="required")
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"


@tool
def get_weather(city: Literal["Paris", "London", "Rome"]) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def test_langchain(address):
    model = ChatOpenAI(
        model=MODEL, base_url=f"{address}/v1", api_key="none", temperature=0, max_tokens=120
    )
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Weather, method=method).invoke("Weather in Paris?")
        assert isinstance(found, Weather), method
    asked: list[Any] = [HumanMessage(QUESTION[0]["content"])]
    message = model.bind_tools([get_weather], tool_choice="required").invoke(asked)
    call = message.tool_calls[0]
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call["args"])
    said = model.invoke([*asked, message, ToolMessage(result, tool_call_id=call["id"])])
    assert said.content
    claude = ChatAnthropic(
        model=MODEL, base_url=address, api_key="none", temperature=0, max_tokens=24
    )
    assert claude.invoke(asked).content
    assert claude.bind_tools([get_weather], tool_choice="any").invoke(asked) is not None


def test_clients_see_that_a_prompt_is_too_long(address):
    """They look for words in the message, and shorten the chat or take another model."""
    text, options = "a b " * 9000, {"model": MODEL, "api_key": "none"}
    for chat in (
        ChatOpenAI(**options, base_url=f"{address}/v1"),
        ChatAnthropic(**options, base_url=address),
    ):
        with pytest.raises(ContextOverflowError):
            chat.invoke(text)
    messages = [{"role": "user", "content": text}]
    for form, base in (("openai", f"{address}/v1"), ("anthropic", address)):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(
                f"{form}/{MODEL}", messages, api_base=base, api_key="none", max_tokens=1
            )


class Anything(BaseModel):
    """JSON mode makes an object for certain, and its members as the model likes."""

    city: Any = None


@pytest.mark.parametrize(
    ("mode", "made"),
    [
        (instructor.Mode.JSON, Anything),
        (instructor.Mode.JSON_SCHEMA, Weather),
        (instructor.Mode.TOOLS, Weather),
    ],
)
def test_instructor(client, mode, made):
    patched = instructor.from_openai(client, mode=mode)
    found = patched.chat.completions.create(
        **GREEDY,
        messages=[{"role": "user", "content": "Weather in Paris: 18 degrees, clear."}],
        response_model=made,
        max_tokens=200,
        max_retries=0,
    )
    assert isinstance(found, made)
