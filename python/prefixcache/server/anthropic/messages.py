"""`/v1/messages`: Anthropic's Messages API over the prompts and jobs of the chat endpoint."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from prefixcache.config.checked import is_object
from prefixcache.exceptions import wrong
from prefixcache.server.anthropic.message_blocks import (
    Conversation,
    chat_tool_choice,
    chat_tools,
    marked_tools,
)
from prefixcache.server.anthropic.message_events import MessageForm
from prefixcache.server.http.body import RequestFields, Strings, parse_fields
from prefixcache.server.http.errors import MESSAGES_PATH
from prefixcache.server.http.routes import NAMED_EVENT, QUESTION, Router, describes
from prefixcache.server.jobs.answers import answer
from prefixcache.server.jobs.caching import CachingControls, anthropic_controls
from prefixcache.server.jobs.context import Call, new_call, read_parsed
from prefixcache.server.jobs.field_names import fields_named
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.openai.chat import chat_job, count_chat
from prefixcache.server.openai.protocol import SAME_AS_CHAT, ChatRequest
from prefixcache.server.options.limits import MAX_MESSAGES
from prefixcache.text.chat.parts import one_object

_SAME = SAME_AS_CHAT - {"stop"}

# Names of this endpoint for what a chat calls otherwise.
_NAMES = {
    "messages": "messages",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "structured_output": "output_config.format",
    "stop": "stop_sequences",
    "tool_call_id": "tool_use_id",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}


# What ends up as nothing to edit: Claude Code asks that all thinking be kept.
_NO_EDITS: tuple[dict[str, Any], ...] = (
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)


class CountTokensRequest(RequestFields):
    """Body of `POST /v1/messages/count_tokens`. What a chat takes too is checked there."""

    no_effect = _SAME | {"service_tier", "speed"}
    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "container": (),
        "context_management": _NO_EDITS,
        "mcp_servers": ([],),
    }
    # Of turns: as messages of a chat they may be fewer.
    max_lengths: ClassVar[dict[str, int]] = {"messages": MAX_MESSAGES}

    cache_control: Any = None
    messages: Any = None
    metadata: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    system: Any = None
    thinking: dict[str, Any] | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None

    def chat(self, conversation: Conversation) -> dict[str, Any]:
        """The same request as the body of a chat.

        Raises `InvalidRequestError`, naming the field here, for what cannot be said there.
        """
        messages = conversation.messages
        choice, parallel = chat_tool_choice(self.tool_choice)
        extra = self.model_extra or {}
        body: dict[str, Any] = {name: value for name, value in extra.items() if name in _SAME}
        body |= {
            "messages": messages,
            "tools": chat_tools(self.tools),
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "reasoning_effort": (self.output_config or {}).get("effort"),
            "response_format": self._format(),
        }
        if self.thinking is not None:
            thinks = self.thinking.get("type") != "disabled"
            variables: dict[str, Any] = extra.get("chat_template_kwargs") or {}
            body["chat_template_kwargs"] = {"enable_thinking": thinks, **variables}
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            body["continue_final_message"] = True
        return {name: value for name, value in body.items() if value is not None}

    def _format(self) -> object:
        form = (self.output_config or {}).get("format") or self.output_format
        if not is_object(form) or form.get("type") != "json_schema":
            return form
        schema = one_object(form.get("schema"), "output_config.format.schema")
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


class _Diagnostics(BaseModel, strict=True, extra="allow"):
    """The earlier answer to compare the prompt with; null, as on a first turn, asks nothing."""

    previous_message_id: str | None = None


Asked = TypeVar("Asked", bound=CountTokensRequest)


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    diagnostics: _Diagnostics | None = None
    max_tokens: int | None = None
    stop_sequences: Strings | None = None
    stream: bool | None = None

    def chat(self, conversation: Conversation) -> dict[str, Any]:
        """As for all messages, with what limits the answer."""
        if self.max_tokens is None:
            raise wrong("max_tokens", "is required")
        return {
            **super().chat(conversation),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
        }


# The same request as a chat, and what it asks of the cache.
AskedChat = tuple[ChatRequest, CachingControls]

_MESSAGE = {
    "id": str,
    "type": "message",
    "role": "assistant",
    "content": [{"type": str}],
    "usage": {"input_tokens": int, "output_tokens": int},
}
_TEXT_BLOCK = {"type": "text", "text": str}
_BLOCKS = (
    str,
    [
        (
            _TEXT_BLOCK,
            {"type": "thinking", "thinking": str},
            {"type": "tool_use", "id": str, "name": str, "input": dict},
            {
                "type": "tool_result",
                "tool_use_id": str,
                "content": (str, [(_TEXT_BLOCK,)]),
            },
        )
    ],
)
_MESSAGES = {
    "messages": [{"role": Literal["user", "assistant"], "content": _BLOCKS}],
    "system": (str, [(_TEXT_BLOCK,)]),
}


def messages_router(maker: JobMaker) -> Router:
    """The endpoints, for one served model."""
    router = Router()

    @router.post(MESSAGES_PATH)
    @describes(
        "Answers in Anthropic's Messages API.",
        _MESSAGE,
        models=(MessagesRequest,),
        properties=_MESSAGES,
        example={"messages": QUESTION, "max_tokens": 8},
        events=NAMED_EVENT,
    )
    async def create_message(request: Request) -> Response:
        job, stream = await _asked(maker, request)
        with fields_named(_NAMES):
            form = MessageForm(request.state.request_id)
            return await answer(maker, job, form, stream=stream)

    @router.post(f"{MESSAGES_PATH}/count_tokens")
    @describes(
        "Counts the tokens that a message would be made from.",
        {"input_tokens": int},
        models=(CountTokensRequest,),
        properties=_MESSAGES,
        example={"messages": QUESTION},
    )
    async def count_tokens(request: Request) -> dict[str, int]:
        _, (chat, _), size = await read_parsed(
            request, maker.workers, lambda values: parse_message(values, CountTokensRequest)
        )
        with fields_named(_NAMES):
            return {"input_tokens": await count_chat(maker, chat, size)}

    return router


async def _asked(maker: JobMaker, request: Request) -> tuple[Job, bool]:
    """What a body asks, and whether as a stream; nothing of the body itself."""
    fields, chat, size = await read_parsed(
        request, maker.workers, lambda values: parse_message(values, MessagesRequest)
    )
    call = dataclasses.replace(new_call(request, "msg"), id=f"msg_{uuid.uuid4().hex}")
    job = await message_job(maker, chat, size, call)
    if job.diagnosis is not None and fields.diagnostics is not None:
        job.diagnosis.compared_with = fields.diagnostics.previous_message_id
    return job, bool(fields.stream)


async def message_job(maker: JobMaker, asked: AskedChat, size: int, call: Call) -> Job:
    """The requests of a message. `size` is that of the body."""
    with fields_named(_NAMES):
        chat, controls = asked
        return await chat_job(maker, chat, size, call, controls)


def parse_message(values: dict[str, Any], model: type[Asked]) -> tuple[Asked, AskedChat]:
    """The fields of a message as `model` has them, checked. Takes time that grows with it."""
    fields = parse_fields(values, model)
    conversation = Conversation(fields.system, fields.messages)
    controls = anthropic_controls(
        [*marked_tools(fields.tools), *conversation.marked],
        automatic=fields.cache_control,
        last_block=conversation.last_block,
    )
    chat = fields.chat(conversation)
    with fields_named(_NAMES):
        return fields, (parse_fields(chat, ChatRequest), controls)
