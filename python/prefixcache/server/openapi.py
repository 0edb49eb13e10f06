"""What `/openapi.json` says: the routes as they are described, errors, schemas of bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from prefixcache.exceptions import wrong
from prefixcache.server.anthropic.messages import CountTokensRequest, MessagesRequest
from prefixcache.server.http.errors import anthropic_error, error_body, is_anthropic
from prefixcache.server.http.routes import (
    ANTHROPIC_VERSION,
    Description,
    Form,
    Raw,
    Router,
    Schema,
    description_of,
    parameter,
    schema_of,
)
from prefixcache.server.openai.protocol import ChatRequest
from prefixcache.server.openai.responses import ResponsesRequest

_REF = "#/components/schemas/"
_JSON, _EVENTS = "application/json", "text/event-stream"
_TEXT_OR_NULL = Raw({"type": ["string", "null"]})
_ERRORS: Mapping[str, Form] = {
    "OpenAIError": {
        "error": {"message": str, "type": str, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
    },
    "AnthropicError": {
        "type": "error",
        "error": {"type": str, "message": str},
        "request_id": str,
    },
}
_EXAMPLES = {
    "OpenAIError": error_body(wrong("temperature", "must be a number in [0.0, 100.0], got -1"))[1],
    "AnthropicError": anthropic_error(wrong("max_tokens", "is required"), "5f1c2a"),
}


class DescribedApp(Starlette):
    """An application whose `/openapi.json` has what its routers' routes say of themselves."""

    def __init__(self, *, title: str, version: str) -> None:
        super().__init__()
        self.router.redirect_slashes = False
        self._about = {"title": title, "version": version}
        self._schema: Schema | None = None
        self.add_route("/openapi.json", self._show, include_in_schema=False)

    def include_router(self, router: Router) -> None:
        """Adds the routes of `router`."""
        self.router.routes += router.routes

    async def _show(self, _: Request) -> JSONResponse:
        return JSONResponse(self.openapi())

    def openapi(self) -> Schema:
        """The description, which is made once."""
        if self._schema is None:
            self._schema = self._described()
        return self._schema

    def _described(self) -> Schema:
        schemas: dict[str, Schema] = {name: schema_of(form) for name, form in _ERRORS.items()}
        paths: dict[str, Schema] = {}
        for route in self.routes:
            if isinstance(route, Route) and route.include_in_schema:
                for method in route.methods or ():
                    operation = _operation(route, method.lower(), schemas)
                    paths.setdefault(route.path_format, {})[method.lower()] = operation
        return {
            "openapi": "3.1.0",
            "info": self._about,
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": _SECURITY},
            "security": [{}, *({name: []} for name in _SECURITY)],
        }


def _operation(route: Route, method: str, schemas: dict[str, Schema]) -> Schema:
    operation: Schema = {
        "summary": route.name.replace("_", " ").title(),
        "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method}"),
    }
    if text := inspect.getdoc(route.endpoint):
        operation["description"] = text
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema_of(str)}
            for name in route.param_convertors
        ]
    _fill(operation, route.path_format, description_of(route.endpoint), schemas)
    return operation


_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _fill(operation: Schema, path: str, endpoint: Description, schemas: dict[str, Schema]) -> None:
    operation["summary"] = endpoint.summary or operation["summary"]
    if endpoint.is_command:
        first, stop, _ = operation.get("description", "").replace("`", "").partition(".")
        operation["summary"] = first + stop
        operation["parameters"] = _in_query(endpoint.models[0])
    if endpoint.parameters:
        operation["parameters"] = [*operation.get("parameters", ()), *endpoint.parameters]
    if endpoint.models:
        operation["requestBody"] = _request(endpoint, schemas)
    answers = {"200": _answer(path, endpoint)}
    statuses = {400, 401, 403, 405, 503, *endpoint.statuses}
    statuses |= {404, 413, 415} if endpoint.models else set()
    statuses |= {429, 504} if endpoint.events else set()
    forms = ["AnthropicError"] if is_anthropic(path) else ["OpenAIError"]
    if ANTHROPIC_VERSION in endpoint.parameters:
        forms.append("AnthropicError")
    if 202 in statuses:
        answers["202"] = {"description": "Begun.", "content": {_JSON: {"schema": {}}}}
    for status in sorted(statuses - {202}):
        answers[str(status)] = _error(status, *forms)
    operation["responses"] = answers


def _in_query(model: type[BaseModel]) -> list[Schema]:
    """Options of a command that may stand in the query, and need not."""
    return [
        parameter(name, Raw(option))
        for name, option in _model_schema(model).get("properties", {}).items()
        if "$ref" not in str(option)
    ]


def _request(endpoint: Description, schemas: dict[str, Schema]) -> Schema:
    refs = [_add(model, endpoint.properties, schemas) for model in endpoint.models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    content: Schema = {"schema": schema}
    if endpoint.example is not None:
        content["example"] = endpoint.example
    return {"required": endpoint.example is not None, "content": {_JSON: content}}


def _add(
    model: type[BaseModel], properties: Mapping[str, Form], schemas: dict[str, Schema]
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
        chat_schema = _model_schema(ChatRequest)
        schemas.update(chat_schema.pop("$defs", {}))
        same = chat_schema["properties"].items()
        members |= {
            name: member for name, member in same if name in passed_on and name not in members
        }
    members |= {name: schema_of(form) for name, form in properties.items()}
    schemas[model.__name__] = schema
    return {"$ref": _REF + model.__name__}


def _model_schema(model: type[BaseModel]) -> Schema:
    return model.model_json_schema(ref_template=_REF + "{model}")


def _answer(path: str, endpoint: Description) -> Schema:
    if endpoint.answer is None:
        return {"description": "Done."}
    kind = "text/plain" if path == "/metrics" else _JSON
    content: Schema = {kind: {"schema": schema_of(endpoint.answer)}}
    if endpoint.events:
        content[_EVENTS] = {"itemSchema": schema_of(endpoint.events)}
    header = {
        "description": "Names the unknown fields of the body.",
        "schema": {"type": "string"},
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
