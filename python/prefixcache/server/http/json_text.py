"""Answers as JSON text, without holding up the interpreter's other threads for long."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, cast

from pydantic_core import to_json
from starlette.responses import Response

# Items or characters that are written in one go, which nothing can interrupt.
_SLICE = 2**16
# Stands for what is written already. Nobody can know it beforehand.
_MARK = secrets.token_hex(16)
_QUOTED_MARK = to_json(_MARK)


class Written:
    """A value whose JSON text is written now, in pieces, to be a part of texts later.

    Bytes are such a text already.
    """

    __slots__ = ("pieces",)

    def __init__(self, value: object) -> None:
        self.pieces = [value] if isinstance(value, bytes) else [*_pieces(value)]


def json_response(text: bytes) -> Response:
    """An answer whose body is written already."""
    return Response(text, media_type="application/json")


def json_text(value: object) -> bytes:
    """A JSON text, written in one go but for the parts that are `Written`."""
    return b"".join(json_pieces(value))


def json_pieces(value: object) -> list[bytes]:
    """The pieces of `json_text`: many bytes are copied once, by who joins them."""
    parts: list[Written] = []

    def mark(part: object) -> str:
        if not isinstance(part, Written):
            raise TypeError(f"{type(part).__name__} cannot be written as JSON")
        parts.append(part)
        return _MARK

    first, *others = to_json(value, fallback=mark).split(_QUOTED_MARK)
    pieces = [first]
    for part, text in zip(parts, others, strict=True):
        pieces += [*part.pieces, text]
    return pieces


def object_json(value: object) -> bytes:
    """A JSON text, written item by item: other threads get their turn, and it takes longer.

    Iterators are written as arrays, without that all of their items, or the pieces of their text,
    are there at once.
    """
    text = BytesIO()
    text.writelines(_pieces(value))
    return text.getvalue()


def list_json(items: Sequence[Any]) -> bytes:
    """A JSON array, written in slices."""
    return b"[" + b",".join(_slices(items)) + b"]"


def text_json(text: str) -> bytes:
    """A JSON string, written in slices."""
    return b"".join((b'"', *_slices(text), b'"'))


def _slices(items: Sequence[Any]) -> list[bytes]:
    starts = range(0, len(items), _SLICE)
    return [to_json(items[start : start + _SLICE])[1:-1] for start in starts]


def _pieces(value: object) -> Iterator[bytes]:
    if isinstance(value, str) and len(value) > _SLICE:
        yield from (b'"', *_slices(value), b'"')
    elif isinstance(value, Written):
        yield from value.pieces
    elif isinstance(value, Mapping):
        yield from _object(cast("Mapping[str, object]", value))
    elif isinstance(value, (list, tuple, Iterator)):
        yield from _array(cast("Iterable[object]", value))
    else:
        yield to_json(value)


def _object(members: Mapping[str, object]) -> Iterator[bytes]:
    before = b"{"
    for name, value in members.items():
        yield b"%b%b:" % (before, to_json(name))
        yield from _pieces(value)
        before = b","
    yield b"}" if members else b"{}"


def _array(items: Iterable[object]) -> Iterator[bytes]:
    before = b"["
    for item in items:
        yield before
        yield from _pieces(item)
        before = b","
    yield b"]" if before == b"," else b"[]"
