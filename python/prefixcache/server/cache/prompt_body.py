"""The body of any endpoint that takes a prompt, for endpoints that ask about prompts alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from starlette.requests import Request

from prefixcache.server.anthropic.messages import MessagesRequest, message_job, parse_message
from prefixcache.server.http.body import RequestFields, parse_fields
from prefixcache.server.http.errors import has_anthropic_header
from prefixcache.server.http.routes import ANTHROPIC_VERSION, Endpoint, Form, describes
from prefixcache.server.jobs.context import Call, new_call, read_parsed
from prefixcache.server.jobs.field_names import fields_named
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.openai.chat import chat_job, chat_names
from prefixcache.server.openai.completions import completion_job, parse_completion
from prefixcache.server.openai.protocol import ChatRequest, CompletionRequest
from prefixcache.server.openai.response_store import ResponseStore
from prefixcache.server.openai.responses import ResponsesRequest, response_before, response_job

Values = Mapping[str, Any]
_MakeJob = Callable[[JobMaker, int, Call], Awaitable[Job]]

# What a body with messages has for Anthropic's API alone.
_FIELDS = ("cache_control", "stop_sequences", "system")
_BLOCKS = ("tool_result", "tool_use")


def describes_prompt(summary: str, answer: Form) -> Callable[[Endpoint], Endpoint]:
    """Describes an endpoint that takes the body of any endpoint that takes a prompt."""
    return describes(
        summary,
        answer,
        models=(CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest),
        example={"prompt": "The capital of Japan is"},
        parameters=(ANTHROPIC_VERSION,),
    )


async def prompt_job(request: Request, maker: JobMaker, store: ResponseStore, prefix: str) -> Job:
    """The requests that the endpoint of the same body would make.

    With `input` a body is that of a response, which may go on from one in the `store`; with
    `messages` that of a chat, or of Anthropic's API where the request has the header
    `anthropic-version` or the body what that API alone has; else that of a completion.
    """
    parse = partial(_parse, store, has_anthropic_header(request.scope))
    _, make, size = await read_parsed(request, maker.workers, parse)
    return await make(maker, size, new_call(request, prefix))


def _parse(
    store: ResponseStore, anthropic: bool, values: dict[str, Any]
) -> tuple[RequestFields, _MakeJob]:
    """A body's fields, and what makes the requests that the endpoint of such bodies makes."""
    if "messages" in values and (anthropic or _is_message(values)):
        # `max_tokens`, which that API requires, says nothing of a prompt.
        fields, asked = parse_message({"max_tokens": 0, **values}, MessagesRequest)
        return fields, lambda maker, size, call: message_job(maker, asked, size, call)
    if "messages" in values:
        chat = parse_fields(values, ChatRequest)
        return chat, lambda maker, size, call: _chat_job(maker, chat, size, call)
    if values.keys() & {"input", "previous_response_id"}:
        response = parse_fields(values, ResponsesRequest)
        return response, lambda maker, size, call: response_job(
            maker, *response_before(store, response, call), size, call
        )
    completion, prompts = parse_completion(values)
    return completion, lambda maker, _, call: completion_job(maker, completion, prompts, call)


async def _chat_job(maker: JobMaker, fields: ChatRequest, size: int, call: Call) -> Job:
    with fields_named(chat_names(fields)):
        return await chat_job(maker, fields, size, call)


def _is_message(values: Values) -> bool:
    if any(name in values for name in _FIELDS):
        return True
    tools = _objects(values.get("tools"))
    if tools:
        return "input_schema" in tools[0]
    messages = _objects(values["messages"])
    return any(
        "cache_control" in block or block.get("type") in _BLOCKS
        for message in messages
        for block in _objects(message.get("content"))
    )


def _objects(value: object) -> list[Values]:
    """The objects of a list; what is none is refused by the endpoint's own checks."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("Values", item) for item in items if isinstance(item, Mapping)]
