"""Request bodies: read up to a limit, JSON without its ambiguities, and checked fields.

Types of fields are strict, so that true is no number and "1" neither. Every field may be null,
which means that it is left out.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Mapping, Sized
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from prefixcache._core import parse_json
from prefixcache.config.checked import shortened
from prefixcache.exceptions import InvalidRequestError, wrong
from prefixcache.server.http.byte_budget import Body
from prefixcache.server.http.errors import ApiError
from prefixcache.server.options.limits import MAX_BODY_BYTES, MAX_NUMBERS, MAX_OTHER_VALUES

# What is read and thrown away so that a client that only listens after sending sees the answer.
_MAX_DRAINED_BYTES = 256 * 2**20
_MAKING = threading.Lock()

Strings = Annotated[list[str], Field(fail_fast=True)]
"""Without it each wrong entry is an error of its own: a million of them take a gigabyte."""

_TYPE_TAGS = ("str", "int", "float", "bool", "none", "list[", "dict[", "function-")


class RequestFields(BaseModel, strict=True, extra="allow", defer_build=True):
    """`no_effect` names fields that change nothing here; `refused` those that would have to.

    A refused field may be given with one of the values listed for it, which ask for nothing.
    `max_lengths` are of lists, objects and strings.
    """

    no_effect: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[dict[str, tuple[object, ...]]] = {}
    max_lengths: ClassVar[dict[str, int]] = {}

    @classmethod
    def check_lengths(cls, values: Mapping[str, Any]) -> None:
        """Raises `InvalidRequestError` for a field that is too long, before its items are read."""
        for name, most in cls.max_lengths.items():
            check_length(name, values.get(name), most)

    def check_other_fields(self) -> None:
        """Raises `InvalidRequestError` for a field that asks for what is not supported."""
        for name, value in (self.model_extra or {}).items():
            if name in self.refused:
                refuse_unless_harmless(name, value, self.refused[name])

    def unknown_fields(self) -> list[str]:
        """Names of unknown fields, in the caller's spelling."""
        accepted = self.no_effect | self.refused.keys()
        names = [name for name in self.model_extra or {} if name not in accepted]
        for name, part in self:
            if isinstance(part, BaseModel):
                names += [f"{name}.{other}" for other in part.model_extra or {}]
        return names


Fields = TypeVar("Fields", bound=RequestFields)


async def read_body(request: Request) -> bytes:
    """The body of a request that says it is JSON. Raises `ApiError` for one that is too large."""
    _check_content(request)
    return await _read(request)


def parse_fields(values: dict[str, Any], model: type[Fields]) -> Fields:
    """A JSON object as an instance of `model`."""
    model.check_lengths(values)
    try:
        fields = prepared(model).model_validate(values)
    except ValidationError as error:
        raise invalid_field(error) from None
    fields.check_other_fields()
    return fields


def prepared(model: type[Fields]) -> type[Fields]:
    """The model with what checks its fields, which is made once, and not as a server starts."""
    if not model.__pydantic_complete__:
        with _MAKING:
            model.model_rebuild()
    return model


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object within the limits.

    Refuses NaN, infinities, duplicate keys and text that is not Unicode. Other threads run
    meanwhile.
    """
    try:
        value = parse_json(body, max_numbers=MAX_NUMBERS, max_others=MAX_OTHER_VALUES)
    except ValueError as error:
        raise _refused(*error.args) from None
    if not isinstance(value, dict):
        raise _refused("invalid", "it must be an object")
    return cast("dict[str, Any]", value)


def media_type(request: Request) -> str:
    """What the request says its body is; empty where it says nothing."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_content(request: Request) -> None:
    kind = media_type(request)
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Send the header 'Content-Type: application/json', not {kind or 'none'!r}.",
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Send the body as it is: a body with 'Content-Encoding: {coding}' is not read.",
            code="unsupported_encoding",
        )


async def _read(request: Request) -> bytes:
    """The body. Past the limit nothing is kept, so a long body takes no memory."""
    # A length may have more zeros in front than `int` takes; the parser knows that it is a number.
    if float(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise _too_large()
    body, size = cast("Body", request.state.body), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= MAX_BODY_BYTES:
                body.add(chunk)
            elif size > _MAX_DRAINED_BYTES:
                break
            else:
                body.release()
    except ClientDisconnect:
        raise InvalidRequestError("The client went away before the body ended.") from None
    if size > MAX_BODY_BYTES:
        raise _too_large()
    return body.take()


def _too_large() -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body is larger than {MAX_BODY_BYTES} bytes.",
        code="body_too_large",
    )


def _refused(kind: str, message: str, field: str | None = None) -> InvalidRequestError:
    if kind == "twice":
        return InvalidRequestError(f"{message}.", param=field, code="invalid_json")
    if kind == "invalid":
        text = f"The body is not valid JSON: {message}."
        return InvalidRequestError(text, param=field, code="invalid_json")
    limit = (
        f"{MAX_NUMBERS} numbers"
        if kind == "numbers"
        else f"{MAX_OTHER_VALUES} values other than numbers (keys count too)"
    )
    place = "" if field is None else f"{shortened(field)}: "
    return InvalidRequestError(
        f"{place}a body may hold at most {limit}; send several requests.",
        param=field,
        code="too_many_values",
    )


def check_length(name: str, value: object, most: int) -> None:
    """Raises `InvalidRequestError` for a string, list or object longer than `most`."""
    if not isinstance(value, (str, list, dict)):
        return
    length = len(cast("Sized", value))
    what = "characters" if isinstance(value, str) else "entries"
    if length > most:
        raise wrong(name, f"may have at most {most} {what}, got {length}", code="too_long")


def refuse_unless_harmless(name: str, value: object, harmless: tuple[object, ...]) -> None:
    """Raises `InvalidRequestError` for a field that asks for what is not there."""
    if value is None or value in harmless:
        return
    raise wrong(name, "is not supported by this server", code="unsupported_parameter")


def invalid_field(error: ValidationError) -> InvalidRequestError:
    """The first of pydantic's complaints, naming the field in the caller's spelling."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = _path(first["loc"])
    # pydantic names the class that reads an object, which is nobody's outside.
    is_object = first["type"] in ("model_type", "dict_type")
    reason = "input should be an object" if is_object else first["msg"]
    reason = reason[:1].lower() + reason[1:]
    # `reprlib` reads no more of a long value than it shows.
    shown = shortened(reprlib.repr(first["input"]))
    got = "" if first["type"] == "missing" else f", got {shown}"
    return InvalidRequestError(f"{shortened(param)}: {reason}{got}.", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif path and part.startswith(_TYPE_TAGS):
            break
        else:
            path += f".{part}" if path else part
    return path
