"""`/v1/responses`: OpenAI's Responses API over the prompts and jobs of the chat endpoint."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from http import HTTPStatus
from typing import Any, ClassVar, Literal, cast

from pydantic import PrivateAttr
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from prefixcache._core import parse_json
from prefixcache.exceptions import wrong
from prefixcache.server.http.access import Caller
from prefixcache.server.http.body import RequestFields, Strings, parse_fields
from prefixcache.server.http.errors import RESPONSES_PATH, ApiError
from prefixcache.server.http.json_text import Written, json_response, json_text, object_json
from prefixcache.server.http.paging import page
from prefixcache.server.http.routes import (
    NAMED_EVENT,
    Router,
    describes,
    limit_parameter,
    parameter,
)
from prefixcache.server.jobs.answers import answer
from prefixcache.server.jobs.caching import CachingControls
from prefixcache.server.jobs.context import Call, new_call, read_fields
from prefixcache.server.jobs.field_names import fields_named
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.jobs.sampling_fields import (
    ResponseCacheOptions,
    RetentionFields,
    SamplingFields,
    StreamOptions,
)
from prefixcache.server.openai.chat import chat_controls, chat_job, count_chat
from prefixcache.server.openai.protocol import SAME_AS_CHAT, ChatRequest
from prefixcache.server.openai.response_events import ResponseForm
from prefixcache.server.openai.response_items import (
    INPUT,
    answer_messages,
    chat_format,
    items_of,
    messages_of,
)
from prefixcache.server.openai.response_store import ResponseStore, StoredResponse
from prefixcache.server.openai.response_tools import ResponseTools, chat_tool_choice, read_tools
from prefixcache.server.options.limits import MAX_MESSAGES, MAX_NUMBERS, MAX_OTHER_VALUES
from prefixcache.types.retention_range import RetentionRange

_SAME = SAME_AS_CHAT | SamplingFields.no_effect

# Names of this endpoint for what a chat calls otherwise.
_NAMES = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structured_output": "text.format",
    "tool_call_id": "call_id",
    "tools[].function": "tools[]",
}


# Choices about the cache that hold for a conversation.
_CHOICES = ("cache_salt", "cache_read", "cache_write")
_TOGETHER = frozenset({"retention", "prompt_cache_options", "prompt_cache_retention"})


class ResponsesRequest(RequestFields):
    """Body of `POST /v1/responses`. What a chat takes under the same name is checked there."""

    no_effect = _SAME | {"max_tool_calls"}
    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "n": (1,),
        "prompt": (),
    }

    input: Any = None
    instructions: str | None = None
    include: Strings | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: dict[str, Any] | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    _earlier_hints: list[dict[str, Any]] | None = PrivateAttr(default=None)

    @cached_property
    def read_tools(self) -> ResponseTools:
        """The tools as functions of a chat. Raises `InvalidRequestError`."""
        return read_tools(self.tools)

    @property
    def is_prewarm(self) -> bool:
        """Whether the prompt is to be computed and kept, and nothing said."""
        return bool(self.prompt_cache_options and self.prompt_cache_options.prewarm)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens for each of the answer's; None means no log probabilities."""
        asked = "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if asked or self.top_logprobs else None

    def choices(self) -> dict[str, Any]:
        """What a request that goes on from this one starts from where it does not choose."""
        extra = self.model_extra or {}
        given = {name: extra.get(name) for name in (*_CHOICES, "prompt_cache_retention")}
        given["retention"] = extra.get("retention", self._earlier_hints)
        if (options := self.prompt_cache_options) is not None:
            given["prompt_cache_options"] = options.model_dump(include={"mode", "ttl"})
        return {name: value for name, value in given.items() if value is not None}

    def going_on_from(self, earlier: Mapping[str, Any]) -> ResponsesRequest:
        """The same request with those of the `earlier` choices that it does not make itself.

        Null is a choice. Those that say how long something is kept are made together.
        """
        given, options = self.model_fields_set, self.prompt_cache_options
        kept = {name: value for name, value in earlier.items() if name not in given}
        old = ResponseCacheOptions(**earlier.get("prompt_cache_options", {}))
        if options is not None:
            new = {"mode": options.mode or old.mode, "ttl": options.ttl or old.ttl}
            kept["prompt_cache_options"] = options.model_copy(update=new)
        elif "prompt_cache_options" in kept:
            kept["prompt_cache_options"] = old
        if given & _TOGETHER:
            kept = {name: kept[name] for name in kept.keys() - (_TOGETHER - given)}
        hints = kept.pop("retention", None)
        request = self.model_copy(update=kept)
        request._earlier_hints = hints  # noqa: SLF001 - its own
        return request

    @property
    def earlier_hints(self) -> tuple[RetentionRange, ...]:
        """The retention hints of the request that this one goes on from, unless it chose."""
        return tuple(RetentionFields(**hint).range() for hint in self._earlier_hints or ())

    def chat(self, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The same request as the body of a chat that goes on from the messages `before`.

        Raises `InvalidRequestError`, naming the field here, for what cannot be said there.
        """
        said = messages_of(self.input)
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        extra = self.model_extra or {}
        body = {name: value for name, value in extra.items() if name in _SAME}
        body |= {
            "messages": [*system, *before, *said],
            "max_completion_tokens": 0 if self.is_prewarm else self.max_output_tokens,
            "tools": self.read_tools.functions,
            "tool_choice": chat_tool_choice(self.tool_choice),
            "response_format": chat_format((self.text or {}).get("format")),
            "logprobs": self.num_logprobs is not None,
            "top_logprobs": self.num_logprobs,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        if self.truncation == "auto":
            body.setdefault("truncate_prompt_tokens", -1)
        return {name: value for name, value in body.items() if value is not None}

    def _shown_options(self) -> dict[str, str] | None:
        options = self.prompt_cache_options
        if options is None:
            return None
        compared = options.comparison_response_id
        return {
            "mode": options.mode or "implicit",
            "ttl": options.ttl or "30m",
            **({} if compared is None else {"comparison_response_id": compared}),
        }

    def settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The members of an answer that tell what was asked; `params` are those of sampling."""
        extra, text = self.model_extra or {}, self.text or {}
        reasoning = {"effort": None, "summary": None, **(self.reasoning or {})}
        repeated = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
            "prompt_cache_options": self._shown_options(),
            "previous_response_id": self.previous_response_id,
            "reasoning": reasoning,
            "service_tier": "default",
            "store": self.store is not False,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            **({"left_out_tools": [*self.read_tools.left_out]} if self.read_tools.left_out else {}),
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
            **params,
            **{name: extra.get(name) for name in repeated},
        }


_RESPONSE = {
    "id": str,
    "object": "response",
    "status": Literal["completed", "incomplete", "cancelled", "failed"],
    "output": [{"type": str, "id": str}],
    "usage": {"input_tokens": int, "output_tokens": int, "total_tokens": int},
}


def responses_router(maker: JobMaker, store: ResponseStore) -> Router:
    """The endpoints, for one served model."""
    router = Router()

    @router.post(RESPONSES_PATH)
    @describes(
        "Answers in OpenAI's Responses API.",
        _RESPONSE,
        models=(ResponsesRequest,),
        properties={"input": INPUT},
        example={"input": "What is the capital of Japan?", "max_output_tokens": 8},
        events=NAMED_EVENT,
        statuses=(404,),
    )
    async def create_response(request: Request) -> Response:
        fields, size = await read_fields(request, maker.workers, ResponsesRequest)
        call = dataclasses.replace(new_call(request, "resp"), id=f"resp_{uuid.uuid4().hex}")
        fields, before = response_before(store, fields, call)
        # What was asked is remembered with the answer, so the body counts until that has come.
        call = dataclasses.replace(call, body=None)
        job = await response_job(maker, fields, before, size, call)
        asked = await maker.workers.run(size, partial(_asked, fields))
        settings = await maker.workers.run(size, partial(_written_settings, fields, job))
        if job.diagnosis is not None and fields.prompt_cache_options is not None:
            job.diagnosis.compared_with = fields.prompt_cache_options.comparison_response_id
        keep = partial(_keep, store, asked, before, call)
        tools = fields.read_tools.by_function
        form = ResponseForm(maker.served.tokenizer, settings, fields.num_logprobs, keep, tools)
        with fields_named(_NAMES):
            return await answer(maker, job, form, stream=bool(fields.stream), size=size)

    @router.post(f"{RESPONSES_PATH}/input_tokens")
    @describes(
        "Counts the tokens that a response would be made from.",
        {"object": str, "input_tokens": int},
        models=(ResponsesRequest,),
        properties={"input": INPUT},
        example={"input": "What is the capital of Japan?"},
    )
    async def count_input_tokens(request: Request) -> dict[str, Any]:
        fields, size = await read_fields(request, maker.workers, ResponsesRequest)
        call = new_call(request, "count")
        fields, before = response_before(store, fields, call)
        size += before.size
        chat = await maker.workers.run(size, lambda: _chat_fields(fields, before))
        _tell_left_out(fields, call)
        with fields_named(_names(fields)):
            count = await count_chat(maker, chat, size)
        return {"object": "response.input_tokens", "input_tokens": count}

    @router.get(f"{RESPONSES_PATH}/{{response_id}}")
    @describes("A response that was kept.", _RESPONSE, statuses=(404,))
    async def retrieve_response(response_id: str, request: Request) -> Response:
        return json_response(_stored(store, request, response_id).body)

    @router.delete(f"{RESPONSES_PATH}/{{response_id}}")
    @describes("Forgets a response.", {"id": str, "deleted": bool}, statuses=(404,))
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        _stored(store, request, response_id)
        store.delete(request.state.caller.namespace, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get(f"{RESPONSES_PATH}/{{response_id}}/input_items")
    @describes(
        "What a response that was kept was asked.",
        {"object": "list", "data": [{"id": str}]},
        statuses=(404,),
        parameters=(
            limit_parameter(_MOST_ITEMS),
            parameter("order", Literal["asc", "desc"], default="desc"),
            parameter("after"),
            parameter("before"),
        ),
    )
    async def list_input_items(response_id: str, request: Request) -> Response:
        items = _stored(store, request, response_id).items
        write = partial(_page_of_items, items, response_id, request.query_params)
        return json_response(await maker.workers.run(len(items), write))

    return router


# OpenAI's own limit of a page.
_MOST_ITEMS = 100
_NOTHING = StoredResponse(b"", b"", (), b"")


async def response_job(
    maker: JobMaker, fields: ResponsesRequest, before: StoredResponse, size: int, call: Call
) -> Job:
    """The requests of a response that goes on from `before`, checked. `size` is the body's."""
    size += before.size

    def read() -> tuple[ChatRequest, CachingControls]:
        chat = _chat_fields(fields, before)
        with fields_named(_names(fields)):
            controls = chat_controls(chat, fields.prompt_cache_options)
        return chat, dataclasses.replace(controls, earlier=fields.earlier_hints)

    chat, controls = await maker.workers.run(size, read)
    _tell_left_out(fields, call)
    for place, grammar in fields.read_tools.grammars.items():
        await maker.grammar(grammar, place, call)
    with fields_named(_names(fields)):
        return await chat_job(maker, chat, size, call, controls)


def _tell_left_out(fields: ResponsesRequest, call: Call) -> None:
    """Lets the answer's head name the tools that nobody runs here."""
    if left_out := fields.read_tools.left_out:
        call.outcome.warn(f"tools left out: {', '.join(left_out)}")


def _names(fields: ResponsesRequest) -> dict[str, str]:
    """Names in errors: those of tools before those of all requests."""
    return {**fields.read_tools.fields, **_NAMES}


def _chat_fields(fields: ResponsesRequest, before: StoredResponse) -> ChatRequest:
    if fields.truncation not in (None, "auto", "disabled"):
        raise wrong("truncation", "must be 'auto' or 'disabled'")
    body = fields.chat(_conversation(before))
    with fields_named(_names(fields)):
        chat = parse_fields(body, ChatRequest)
    if len(chat.messages) > MAX_MESSAGES:
        raise wrong("input", f"makes more than {MAX_MESSAGES} messages")
    return chat


def _conversation(before: StoredResponse) -> list[Mapping[str, Any]]:
    """The messages of all turns. Together they may hold what one body may: turns add up."""
    try:
        turns = _read(b"[%b]" % b",".join(before.messages), MAX_NUMBERS, MAX_OTHER_VALUES)
    except ValueError:
        problem = f"goes on from a conversation of more than {MAX_OTHER_VALUES} values"
        raise wrong("previous_response_id", problem, code="too_many_values") from None
    return [message for turn in turns for message in turn]


def response_before(
    store: ResponseStore, fields: ResponsesRequest, call: Call
) -> tuple[ResponsesRequest, StoredResponse]:
    """The response that a request goes on from, and the request with what it takes over from it.

    The response counts as a part of the body.
    Raises `ApiError`: 404 where it is not kept, 503 where there is no room for it.
    """
    name = fields.previous_response_id
    if name is None:
        return fields, _NOTHING
    stored = _found(store, call.caller, name, "previous_response_id")
    if call.body is not None:
        call.body.add_read(sum(map(len, stored.messages)))
    return fields.going_on_from(from_json(stored.choices)), stored


def _written_settings(fields: ResponsesRequest, job: Job) -> dict[str, Any]:
    """Those settings that may be long are written once, for all events that have them."""
    params = {"temperature": job.params.temperature, "top_p": job.params.top_p}
    return {
        name: Written(cast("Any", value)) if isinstance(value, (str, list, dict)) else value
        for name, value in fields.settings(params).items()
    }


def _asked(fields: ResponsesRequest) -> StoredResponse | None:
    """What is remembered of a request before its answer; None where the client says no."""
    if fields.store is False or fields.is_prewarm:
        return None
    items, messages = items_of(fields.input), messages_of(fields.input)
    return StoredResponse(
        body=b"",
        items=object_json(items),
        messages=(object_json(messages),),
        choices=to_json(fields.choices()),
    )


def _keep(
    store: ResponseStore,
    asked: StoredResponse | None,
    before: StoredResponse,
    call: Call,
    body: Mapping[str, Any],
) -> None:
    """Remembers a complete answer."""
    if asked is None:
        return
    answered = to_json(answer_messages(body["output"]))
    messages = (*before.messages, *asked.messages, answered)
    kept = dataclasses.replace(asked, body=json_text(body), messages=messages)
    store.put(call.caller.namespace, call.id, kept)


def _stored(store: ResponseStore, request: Request, name: str) -> StoredResponse:
    return _found(store, request.state.caller, name, "response_id")


def _found(store: ResponseStore, caller: Caller, name: str, param: str) -> StoredResponse:
    """The caller's response of this name. Raises `ApiError` (404) where it is not kept."""
    stored = store.get(caller.namespace, name)
    if stored is None:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"There is no stored response {name[:80]!r}. The last ones of each key are kept, but "
            "none of a request with store false, and none that is too large.",
            param=param,
            code="response_not_found",
        )
    return stored


def _page_of_items(items: bytes, response_id: str, query: Mapping[str, str]) -> bytes:
    """The page of items that the query asks for, the last one first unless it says `order=asc`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong("order", "must be 'asc' or 'desc'")
    listed = [
        {**item, "id": item.get("id") or f"item_{index}_{response_id}"}
        for index, item in enumerate(_read(items))
    ]
    if order == "desc":
        listed.reverse()
    ids = [str(item["id"]) for item in listed]
    places, more = page(query, ids, most=_MOST_ITEMS, after="after", before="before")
    ends = {"first_id": ids[places[0]], "last_id": ids[places[-1]]} if places else {}
    data = [listed[place] for place in places]
    return object_json({"object": "list", "data": data, "has_more": more, **ends})


def _read(
    stored: bytes, max_numbers: int = sys.maxsize, max_others: int = sys.maxsize
) -> list[Any]:
    """What is remembered as JSON, read while other threads run: it is as long as a body may be."""
    return parse_json(stored, max_numbers=max_numbers, max_others=max_others)
