"""Which function answers which path, and what it says of itself in `/openapi.json`.

The endpoints read bodies themselves, within their limits, so each names the models that check its
body. Answers are described by their members that are always there, each by its form: `str`, `bool`,
`int` for a count, a word for itself, a `Literal` for one of several, a list of one form, a tuple of
possible forms, a mapping of members, `dict` for an object of any, `None`, or `Raw` JSON schema.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixcache.config.checked import is_list, is_mapping

Schema = dict[str, Any]
Form = Any
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Raw:
    """A form that stands as JSON schema already."""

    schema: Schema


_SIMPLE_FORMS: Mapping[Form, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer", "minimum": 0},
    bool: {"type": "boolean"},
    dict: {"type": "object", "required": [], "properties": {}},
    None: {"type": "null"},
}


def schema_of(form: Form) -> Schema:
    """The form as JSON schema."""
    if isinstance(form, Raw):
        return form.schema
    if isinstance(form, str):
        return {"type": "string", "enum": [form]}
    if is_mapping(form):
        members = {name: schema_of(member) for name, member in form.items()}
        return {"type": "object", "required": [*members], "properties": members}
    if is_list(form):
        return {"type": "array", "items": schema_of(*form)}
    if isinstance(form, tuple):
        choices = cast("tuple[Form, ...]", form)
        return {"anyOf": [schema_of(choice) for choice in choices]}
    if get_origin(form) is Literal:
        return {"type": "string", "enum": [*get_args(form)]}
    return _SIMPLE_FORMS[form]


def parameter(name: str, form: Form = str, **more: Any) -> Schema:
    """A parameter of the query that may be left out; `more` belongs to its schema."""
    return {"name": name, "in": "query", "required": False, "schema": schema_of(form) | more}


def limit_parameter(most: int) -> Schema:
    """The parameter that says how much a page holds."""
    return parameter("limit", int, minimum=1, maximum=most, default=20)


TOKENS = [Raw({"type": "integer"})]
NUMBER = Raw({"type": "number"})
PROMPT = Raw(
    schema_of((str, TOKENS, [str], [TOKENS]))
    | {"description": "A text, token ids, or a list of either."}
)
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
EVENT = {"data": str}  # JSON, and "[DONE]" at the end
_EVENT_DATA = {"contentMediaType": "application/json", "contentSchema": schema_of({"type": str})}
NAMED_EVENT = {"event": str, "data": Raw({"type": "string", **_EVENT_DATA})}
CHOICES = {
    "id": str,
    "object": str,
    "choices": [dict],
    "usage": {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int},
}
ANTHROPIC_VERSION = parameter("anthropic-version") | {
    "in": "header",
    "description": (
        "Every request to Anthropic's API has it; with it answers have the form of that."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What an endpoint takes and gives.

    `models` check the body, `properties` are forms of members of which the first model says less.
    None as the `answer` is an empty one; `events` is the form of one event of a streamed answer.
    The options of a command may stand in the query too, and none is needed.
    """

    summary: str = ""
    answer: Form = None
    models: tuple[type[BaseModel], ...] = ()
    example: Any = None
    events: Form = None
    statuses: tuple[int, ...] = ()
    parameters: tuple[Schema, ...] = ()
    properties: Mapping[str, Form] = field(default_factory=dict[str, Form])
    is_command: bool = False


def describes(
    summary: str = "", answer: Form = None, **members: Any
) -> Callable[[Endpoint], Endpoint]:
    """Describes the endpoint below it; `members` are those of a `Description`."""
    description = Description(summary=summary, answer=answer, **members)

    def describe(endpoint: Endpoint) -> Endpoint:
        vars(endpoint)["description"] = description
        return endpoint

    return describe


def describes_command(
    model: type[BaseModel], answer: Form = None
) -> Callable[[Endpoint], Endpoint]:
    """Describes a command of administrators by its options; its docstring is the summary."""
    return describes(answer=answer, models=(model,), statuses=(202, 404), is_command=True)


def description_of(endpoint: Callable[..., Any]) -> Description:
    """What was said of the endpoint."""
    return vars(endpoint).get("description") or Description()


class Router:
    """Routes, in the order in which they are tried.

    An endpoint takes the parameters of its path by name, and the `request` if it names that. What
    it returns is the answer, or is written as JSON. One that is not async runs in a thread.
    """

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def get(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """See `route`."""
        return self.route(path, "GET", **options)

    def post(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """See `route`."""
        return self.route(path, "POST", **options)

    def delete(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """See `route`."""
        return self.route(path, "DELETE", **options)

    def route(
        self, path: str, *methods: str, summary: str = "", include_in_schema: bool = True
    ) -> Callable[[Endpoint], Endpoint]:
        """Adds the function below it, of which `summary` may be said here."""

        def add(function: Endpoint) -> Endpoint:
            answer = _answering(function)
            if summary:
                describes(summary)(answer)
            route = Route(path, answer, include_in_schema=include_in_schema)
            route.methods = {*methods}  # given to `Route`, GET would answer HEAD too
            self.routes.append(route)
            return function

        return add


def _answering(function: Callable[..., Any]) -> Callable[..., Any]:
    takes_request = "request" in inspect.signature(function).parameters
    is_async = inspect.iscoroutinefunction(function)

    @wraps(function)
    async def answer(request: Request) -> Response:
        given = dict(request.path_params)
        if takes_request:
            given["request"] = request
        if is_async:
            result = await function(**given)
        else:
            result = await run_in_threadpool(function, **given)
        if isinstance(result, Response):
            return result
        return Response(to_json(result, inf_nan_mode="null"), media_type="application/json")

    return answer
