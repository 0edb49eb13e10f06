"""Request bodies: read up to a limit, and JSON without its ambiguities."""

from __future__ import annotations

import json
import math
import re
from asyncio import to_thread
from http import HTTPStatus
from typing import Any, NoReturn, TypeVar, cast

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from prefixcache.exceptions import InvalidRequestError
from prefixcache.server.errors import ApiError
from prefixcache.server.protocol import RequestFields, invalid_field

MAX_BODY_BYTES = 32 * 2**20
# What is read and thrown away so that a client that only listens after sending sees the answer.
_MAX_DRAINED_BYTES = 256 * 2**20
_LONG_BODY = 2**18
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Fields = TypeVar("Fields", bound=RequestFields)


async def read_fields(request: Request, model: type[Fields]) -> Fields:
    """The body as an instance of `model`. Raises `InvalidRequestError` naming the wrong field."""
    return parse_fields(await read_body(request), model)


async def read_body(request: Request) -> dict[str, Any]:
    """The body's JSON object. Raises `ApiError` for a body that is too large or no JSON."""
    _check_content_type(request)
    body = await _read(request)
    return parse_object(body) if len(body) < _LONG_BODY else await to_thread(parse_object, body)


def parse_fields(values: dict[str, Any], model: type[Fields]) -> Fields:
    """A JSON object as an instance of `model`."""
    try:
        fields = model.model_validate(values)
    except ValidationError as error:
        raise invalid_field(error) from None
    fields.check_other_fields()
    return fields


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Refuses NaN, infinities, duplicate keys and text that is not Unicode."""
    try:
        value = json.loads(
            body.decode(),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_duplicates,
        )
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The body is not valid UTF-8: byte {error.start}.", code="invalid_json"
        ) from None
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise _not_json(str(error)) from None
    if not isinstance(value, dict):
        raise _not_json("it must be an object")
    fields = cast("dict[str, Any]", value)
    if _SURROGATE.search(body):
        _refuse_surrogates(fields, "")
    return fields


def _check_content_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Send the header 'Content-Type: application/json', not {media_type or 'none'!r}.",
        )


async def _read(request: Request) -> bytes:
    """The body. Past the limit nothing is kept, so a long body takes no memory."""
    kept, size = bytearray(), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= MAX_BODY_BYTES:
                kept += chunk
            elif size > _MAX_DRAINED_BYTES:
                break
            else:
                kept.clear()
    except ClientDisconnect:
        raise InvalidRequestError("The client went away before the body ended.") from None
    if size > MAX_BODY_BYTES:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body is larger than {MAX_BODY_BYTES} bytes.",
            code="body_too_large",
        )
    return bytes(kept)


def _not_json(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body is not valid JSON: {reason}.", code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _not_json(f"{name} is not a number there")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _not_json(f"{text[:40]} is out of range")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise InvalidRequestError(f"{name!r} appears twice.", param=name, code="invalid_json")
    return fields


def _refuse_surrogates(value: object, path: str) -> None:
    if isinstance(value, dict):
        for key, item in cast("dict[str, object]", value).items():
            _refuse_surrogates(key, path)
            _refuse_surrogates(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            _refuse_surrogates(item, f"{path}[{index}]")
    elif isinstance(value, str) and not _is_unicode(value):
        message = f"{path or 'A name'} holds a lone surrogate."
        raise InvalidRequestError(message, param=path or None, code="invalid_json")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
