"""What `/openapi.json` says beyond the routes: bodies, answers, errors and examples.

The endpoints read bodies themselves, within their limits, so FastAPI knows none of it. Requests are
described by the models that check them, answers by their members that are always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from prefixcache.exceptions import wrong
from prefixcache.server.anthropic.messages import CountTokensRequest, MessagesRequest
from prefixcache.server.http.body import RequestFields
from prefixcache.server.http.errors import anthropic_error, error_body, is_anthropic
from prefixcache.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from prefixcache.server.openai.responses import ResponsesRequest

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_JSON, _EVENTS = "application/json", "text/event-stream"
_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ANY: Schema = {}


def _object(**members: Schema) -> Schema:
    """An object that has these members, and may have others."""
    return {"type": "object", "required": [*members], "properties": members}


def _list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _word(*words: str) -> Schema:
    return {"type": "string", "enum": [*words]}


def _parameter(name: str, schema: Schema, place: str = "query", **more: Any) -> Schema:
    return {"name": name, "in": place, "required": False, "schema": schema, **more}


def _limit(most: int) -> Schema:
    return _parameter("limit", {"type": "integer", "minimum": 1, "maximum": most, "default": 20})


_CARD = _object(id=_STRING, object=_word("model"), created=_COUNT, max_model_len=_COUNT)
_ANTHROPIC_CARD = _object(type=_word("model"), id=_STRING, display_name=_STRING, created_at=_STRING)
_ANTHROPIC_CARDS = _object(data=_list_of(_ANTHROPIC_CARD), has_more={"type": "boolean"})
_VERSION = _parameter(
    "anthropic-version",
    _STRING,
    "header",
    description="Every request to Anthropic's API has it; with it answers have the form of that.",
)
_EVENT = _object(data=_STRING)  # JSON, and "[DONE]" at the end
_NAMED_EVENT = _object(
    event=_STRING,
    data=_STRING | {"contentMediaType": "application/json", "contentSchema": _object(type=_STRING)},
)
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_CHOICES = _object(id=_STRING, object=_STRING, choices=_list_of(_object()), usage=_USAGE)
_CACHED = _object(prompt_tokens=_COUNT, cached_tokens=_COUNT)
_EXPLANATION = _object(
    prompt_tokens=_COUNT, cached_tokens=_COUNT, reason=_STRING, description=_STRING
)
_PREFIX_HASH = _object(
    format=_STRING,
    block_size=_COUNT,
    root_hash=_STRING,
    weights_name=_STRING,
    arithmetic=_STRING,
)
_RESPONSE = _object(
    id=_STRING,
    object=_word("response"),
    status=_word("completed", "incomplete", "cancelled", "failed"),
    output=_list_of(_object(type=_STRING, id=_STRING)),
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
)
_MESSAGE = _object(
    id=_STRING,
    type=_word("message"),
    role=_word("assistant"),
    content=_list_of(_object(type=_STRING)),
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
)
_TOKENS = _list_of({"type": "integer"})
_PROMPT: Schema = {
    "anyOf": [_STRING, _TOKENS, _list_of(_STRING), _list_of(_TOKENS)],
    "description": "A text, token ids, or a list of either.",
}


def _typed(kind: str, **members: Schema) -> Schema:
    return _object(type=_word(kind), **members)


def _text_or(*parts: Schema) -> Schema:
    return {"anyOf": [_STRING, _list_of({"anyOf": [*parts]})]}


_INPUT_TEXT = _text_or(_typed("input_text", text=_STRING), _typed("output_text", text=_STRING))
_INPUT: Schema = _text_or(
    _object(role=_word("user", "assistant", "system", "developer"), content=_INPUT_TEXT),
    _typed("reasoning", content=_list_of(_typed("reasoning_text", text=_STRING))),
    _typed("function_call", call_id=_STRING, name=_STRING, namespace=_STRING, arguments=_STRING),
    _typed("function_call_output", call_id=_STRING, output=_INPUT_TEXT),
    _typed("custom_tool_call", call_id=_STRING, name=_STRING, namespace=_STRING, input=_STRING),
    _typed("custom_tool_call_output", call_id=_STRING, output=_INPUT_TEXT),
    _typed("web_search_call"),
)
_TEXT_BLOCK = _typed("text", text=_STRING)
_BLOCKS = _text_or(
    _TEXT_BLOCK,
    _typed("thinking", thinking=_STRING),
    _typed("tool_use", id=_STRING, name=_STRING, input=_object()),
    _typed("tool_result", tool_use_id=_STRING, content=_text_or(_TEXT_BLOCK)),
)
_MESSAGES: Mapping[str, Schema] = {
    "messages": _list_of(_object(role=_word("user", "assistant"), content=_BLOCKS)),
    "system": _text_or(_TEXT_BLOCK),
}
_QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
_ERRORS = {
    "OpenAIError": _object(
        error=_object(
            message=_STRING,
            type=_STRING,
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        )
    ),
    "AnthropicError": _object(
        type=_word("error"), error=_object(type=_STRING, message=_STRING), request_id=_STRING
    ),
}
_EXAMPLES = {
    "OpenAIError": error_body(wrong("temperature", "must be a number in [0.0, 100.0], got -1"))[1],
    "AnthropicError": anthropic_error(wrong("max_tokens", "is required"), "5f1c2a"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """What one method of a path takes and gives; `events` describes one of a streamed answer."""

    summary: str
    answer: Schema | None = None
    models: tuple[type[BaseModel], ...] = ()
    example: Any = None
    events: Schema | None = None
    statuses: tuple[int, ...] = ()
    parameters: tuple[Schema, ...] = ()
    properties: Mapping[str, Schema] = field(default_factory=dict[str, Schema])


def _about_prompt(summary: str, answer: Schema) -> _Endpoint:
    """What takes the body of any endpoint that takes a prompt."""
    return _Endpoint(
        summary=summary,
        answer=answer,
        models=(CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest),
        example={"prompt": "The capital of Japan is"},
        parameters=(_VERSION,),
    )


_ENDPOINTS: dict[tuple[str, str], _Endpoint] = {
    ("post", "/v1/completions"): _Endpoint(
        summary="Goes on with texts.",
        models=(CompletionRequest,),
        properties={"prompt": _PROMPT},
        example={"prompt": "The capital of Japan is", "max_tokens": 8, "temperature": 0},
        answer=_CHOICES,
        events=_EVENT,
    ),
    ("post", "/v1/chat/completions"): _Endpoint(
        summary="Answers a chat.",
        models=(ChatRequest,),
        example={"messages": _QUESTION, "max_tokens": 8, "temperature": 0},
        answer=_CHOICES,
        events=_EVENT,
    ),
    ("post", "/v1/responses"): _Endpoint(
        summary="Answers in OpenAI's Responses API.",
        models=(ResponsesRequest,),
        properties={"input": _INPUT},
        example={"input": "What is the capital of Japan?", "max_output_tokens": 8},
        answer=_RESPONSE,
        events=_NAMED_EVENT,
        statuses=(404,),
    ),
    ("post", "/v1/responses/input_tokens"): _Endpoint(
        summary="Counts the tokens that a response would be made from.",
        models=(ResponsesRequest,),
        properties={"input": _INPUT},
        example={"input": "What is the capital of Japan?"},
        answer=_object(object=_STRING, input_tokens=_COUNT),
    ),
    ("get", "/v1/responses/{response_id}"): _Endpoint(
        summary="A response that was kept.", answer=_RESPONSE, statuses=(404,)
    ),
    ("delete", "/v1/responses/{response_id}"): _Endpoint(
        summary="Forgets a response.",
        answer=_object(id=_STRING, deleted={"type": "boolean"}),
        statuses=(404,),
    ),
    ("get", "/v1/responses/{response_id}/input_items"): _Endpoint(
        summary="What a response that was kept was asked.",
        answer=_object(object=_word("list"), data=_list_of(_object(id=_STRING))),
        statuses=(404,),
        parameters=(
            _limit(100),
            _parameter("order", _word("asc", "desc") | {"default": "desc"}),
            _parameter("after", _STRING),
            _parameter("before", _STRING),
        ),
    ),
    ("post", "/v1/messages"): _Endpoint(
        summary="Answers in Anthropic's Messages API.",
        models=(MessagesRequest,),
        properties=_MESSAGES,
        example={"messages": _QUESTION, "max_tokens": 8},
        answer=_MESSAGE,
        events=_NAMED_EVENT,
    ),
    ("post", "/v1/messages/count_tokens"): _Endpoint(
        summary="Counts the tokens that a message would be made from.",
        models=(CountTokensRequest,),
        properties=_MESSAGES,
        example={"messages": _QUESTION},
        answer=_object(input_tokens=_COUNT),
    ),
    ("post", "/v1/embeddings"): _Endpoint(summary="Is not served.", statuses=(404,)),
    ("get", "/v1/models"): _Endpoint(
        summary="The served model, under each of its names.",
        answer={"anyOf": [_object(object=_word("list"), data=_list_of(_CARD)), _ANTHROPIC_CARDS]},
        parameters=(
            _VERSION,
            _limit(1000),
            _parameter("after_id", _STRING),
            _parameter("before_id", _STRING),
        ),
    ),
    ("get", "/v1/models/{name}"): _Endpoint(
        summary="The served model.",
        answer={"anyOf": [_CARD, _ANTHROPIC_CARD]},
        statuses=(404,),
        parameters=(_VERSION,),
    ),
    ("post", "/tokenize"): _Endpoint(
        summary="Token ids of a text or of a chat.",
        models=(TokenizeRequest, TokenizeChatRequest),
        example={"prompt": "Hello"},
        answer=_object(count=_COUNT, max_model_len=_COUNT, tokens=_TOKENS),
    ),
    ("post", "/detokenize"): _Endpoint(
        summary="The text of token ids.",
        models=(DetokenizeRequest,),
        example={"tokens": [1, 2, 3]},
        answer=_object(prompt=_STRING),
    ),
    ("post", "/prefix_cache/probe"): _about_prompt(
        "How many tokens of a request's prompt are cached now.", _CACHED
    ),
    ("post", "/prefix_cache/explain"): _about_prompt(
        "How many tokens of a request's prompt are cached now, and why no more.",
        _object(prompt_tokens=_COUNT, cached_tokens=_COUNT, prompts=_list_of(_EXPLANATION)),
    ),
    ("post", "/prefix_cache/warm"): _about_prompt(
        "Computes a request's prompt and keeps it.", _CACHED
    ),
    ("get", "/health"): _Endpoint(summary="200 while answers can be computed."),
    ("get", "/ping"): _Endpoint(summary="As /health, for probes that ask there."),
    ("get", "/ready"): _Endpoint(summary="200 while requests are computed: not asleep or paused."),
    ("get", "/load"): _Endpoint(
        summary="How many requests the engine has.",
        answer=_object(server_load=_COUNT, running=_COUNT, waiting=_COUNT),
    ),
    ("get", "/server_info"): _Endpoint(
        summary="What the server was started with, and what block hashes are made of.",
        answer=_object(version=_STRING, prefix_hash=_PREFIX_HASH, flags=_object()),
    ),
    ("get", "/version"): _Endpoint(
        summary="The version, what is computed with, and what block hashes are made of.",
        answer=_object(version=_STRING, prefix_hash={"anyOf": [_PREFIX_HASH, {"type": "null"}]}),
    ),
    ("get", "/metrics"): _Endpoint(summary="Prometheus' text.", answer=_STRING),
    ("get", "/weights/status"): _Endpoint(
        summary="Whether an update of the weights is open, and what has come of it.",
        answer=_object(is_open={"type": "boolean"}, staged_bytes=_COUNT),
    ),
    ("get", "/is_paused"): _Endpoint(
        summary="Whether requests wait.", answer=_object(is_paused={"type": "boolean"})
    ),
    ("get", "/is_sleeping"): _Endpoint(
        summary="Whether memory was given back.", answer=_object(is_sleeping={"type": "boolean"})
    ),
    ("get", "/prefix_cache/misses"): _Endpoint(
        summary="Which prompts were computed again, why, and what to do about it.",
        answer=_object(
            num_requests=_COUNT,
            prompt_tokens=_COUNT,
            cached_tokens=_COUNT,
            tokens_recomputed=_COUNT,
            num_findings=_COUNT,
            findings=_list_of(
                _object(reason=_STRING, tokens_recomputed=_COUNT, description=_STRING)
            ),
        ),
        parameters=(_limit(1000),),
    ),
    ("get", "/prefix_cache/snapshot"): _Endpoint(
        summary="All that is cached, as a stream of msgpack objects, for readers of KV events.",
        answer=_STRING,
    ),
    ("get", "/prefix_cache/resize"): _Endpoint(
        summary="How far a change of the cache's size is.", answer=_object()
    ),
    ("get", "/prefix_cache/stats"): _Endpoint(summary="The cache in numbers.", answer=_object()),
}


# Of commands, whose options are described by what reads them.
_COMMAND_ANSWERS = {
    "/update_weights_from_disk": _object(
        success={"type": "boolean"},
        message=_STRING,
        weight_version={"type": ["integer", "string"]},
        weights_name=_STRING,
        root_hash=_STRING,
    ),
    "/weights/begin": _object(update_id=_STRING, max_chunk_bytes=_COUNT),
    "/weights/chunk": _object(num_tensors=_COUNT, staged_bytes=_COUNT),
    "/weights/end": _object(
        weight_version={"type": ["integer", "string"]}, weights_name=_STRING, root_hash=_STRING
    ),
}


def describe(app: FastAPI, options: Mapping[str, type[RequestFields]]) -> None:
    """Lets the application describe itself; `options` are those of commands, by their paths."""

    def described() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app, options)
        return app.openapi_schema

    app.openapi = described


def _described(app: FastAPI, options: Mapping[str, type[RequestFields]]) -> Schema:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Schema] = {**_ERRORS}
    schema["components"] = {"schemas": schemas, "securitySchemes": _SECURITY}
    schema["security"] = [{}, *({name: []} for name in _SECURITY)]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            endpoint = _ENDPOINTS.get((method, path))
            if endpoint is None and method == "post" and path in options:
                endpoint = _command(path, operation, options[path])
            _fill(operation, path, endpoint or _Endpoint(summary="", answer=_ANY), schemas)
    return schema


_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _command(path: str, operation: Schema, model: type[RequestFields]) -> _Endpoint:
    """What administrators call: its options may stand in the query too, and none is needed."""
    described = _model_schema(model)
    operation["parameters"] = [
        {"name": name, "in": "query", "required": False, "schema": {**one}}
        for name, one in described.get("properties", {}).items()
        if "$ref" not in str(one)
    ]
    summary = operation.get("description", "").partition(".")[0]
    answer = _COMMAND_ANSWERS.get(path)
    return _Endpoint(summary=summary, models=(model,), answer=answer, statuses=(202, 404))


def _fill(operation: Schema, path: str, endpoint: _Endpoint, schemas: dict[str, Schema]) -> None:
    operation["summary"] = endpoint.summary or operation.get("summary", "")
    if endpoint.parameters:
        operation["parameters"] = [*operation.get("parameters", ()), *endpoint.parameters]
    if endpoint.models:
        operation["requestBody"] = _request(endpoint, schemas)
    answers = {} if path == "/v1/embeddings" else {"200": _answer(path, endpoint)}
    statuses = {400, 401, 403, 405, 503, *endpoint.statuses}
    statuses |= {404, 413, 415} if endpoint.models else set()
    statuses |= {429, 504} if endpoint.events else set()
    forms = ["AnthropicError"] if is_anthropic(path) else ["OpenAIError"]
    if _VERSION in endpoint.parameters:
        forms.append("AnthropicError")
    if 202 in statuses:
        answers["202"] = {"description": "Begun.", "content": {_JSON: {"schema": _ANY}}}
    for status in sorted(statuses - {202}):
        answers[str(status)] = _error(status, *forms)
    operation["responses"] = answers


def _request(endpoint: _Endpoint, schemas: dict[str, Schema]) -> Schema:
    refs = [_add(model, endpoint.properties, schemas) for model in endpoint.models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    content: Schema = {"schema": schema}
    if endpoint.example is not None:
        content["example"] = endpoint.example
    return {"required": endpoint.example is not None, "content": {_JSON: content}}


def _add(
    model: type[BaseModel], properties: Mapping[str, Schema], schemas: dict[str, Schema]
) -> Schema:
    """A reference to the model's schema, which stands among `schemas` with its parts.

    What its own endpoint, the first of those that take it, says of its properties counts.
    """
    if model.__name__ in schemas:
        return {"$ref": _REF + model.__name__}
    schema = _model_schema(model)
    schemas.update(schema.pop("$defs", {}))
    members = schema.setdefault("properties", {})
    passed_on = getattr(model, "no_effect", frozenset[str]())
    if model in (ResponsesRequest, MessagesRequest, CountTokensRequest):
        known = _model_schema(ChatRequest)
        schemas.update(known.pop("$defs", {}))
        same = known["properties"].items()
        members |= {name: one for name, one in same if name in passed_on and name not in members}
    members |= properties
    schemas[model.__name__] = schema
    return {"$ref": _REF + model.__name__}


def _model_schema(model: type[BaseModel]) -> Schema:
    return model.model_json_schema(ref_template=_REF + "{model}")


def _answer(path: str, endpoint: _Endpoint) -> Schema:
    if endpoint.answer is None:
        return {"description": "Done."}
    kind = "text/plain" if path == "/metrics" else _JSON
    content: Schema = {kind: {"schema": endpoint.answer}}
    if endpoint.events:
        content[_EVENTS] = {"itemSchema": endpoint.events}
    header = {
        "description": "Names the unknown fields of the body.",
        "schema": _STRING,
        "required": False,
    }
    return {
        "description": "The answer; with `stream` as server-sent events."
        if endpoint.events
        else "The answer.",
        "content": content,
        **({"headers": {"X-Prefixcache-Warning": header}} if endpoint.models else {}),
    }


_MEANINGS = {
    400: "Something in the request is wrong; the message names it.",
    401: "A key is needed.",
    403: "Not for this caller.",
    404: "There is no such model or response.",
    405: "Another method is needed.",
    413: "The body is too large.",
    415: "The body must be JSON.",
    429: "Too many requests of this API key wait.",
    503: "Busy, asleep or ending: send it again later.",
    504: "The answer took longer than --request-timeout.",
}


def _error(status: int, *forms: str) -> Schema:
    refs: list[Schema] = [{"$ref": _REF + form} for form in forms]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    content = {_JSON: {"schema": schema, "example": _EXAMPLES[forms[0]]}}
    return {"description": _MEANINGS[status], "content": content}
