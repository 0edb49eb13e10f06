"""Request bodies: read up to a limit, and JSON without its ambiguities."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from prefixcache._core import parse_json
from prefixcache.config.checked import shortened
from prefixcache.exceptions import InvalidRequestError
from prefixcache.server.http.byte_budget import Body
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.fields import RequestFields, invalid_field
from prefixcache.server.options.limits import MAX_BODY_BYTES, MAX_NUMBERS, MAX_OTHER_VALUES

# What is read and thrown away so that a client that only listens after sending sees the answer.
_MAX_DRAINED_BYTES = 256 * 2**20

Fields = TypeVar("Fields", bound=RequestFields)


async def read_body(request: Request) -> bytes:
    """The body of a request that says it is JSON. Raises `ApiError` for one that is too large."""
    _check_content_type(request)
    return await _read(request)


def parse_fields(values: dict[str, Any], model: type[Fields]) -> Fields:
    """A JSON object as an instance of `model`."""
    model.check_lengths(values)
    try:
        fields = model.model_validate(values)
    except ValidationError as error:
        raise invalid_field(error) from None
    fields.check_other_fields()
    return fields


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


def _check_content_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Send the header 'Content-Type: application/json', not {media_type or 'none'!r}.",
        )


async def _read(request: Request) -> bytes:
    """The body. Past the limit nothing is kept, so a long body takes no memory."""
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
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body is larger than {MAX_BODY_BYTES} bytes.",
            code="body_too_large",
        )
    return body.take()


def _refused(kind: str, message: str, field: str | None = None) -> InvalidRequestError:
    if kind == "twice":
        return InvalidRequestError(f"{message}.", param=field, code="invalid_json")
    if kind == "invalid":
        return InvalidRequestError(f"The body is not valid JSON: {message}.", code="invalid_json")
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
