"""Answers as JSON text, without holding up the interpreter's other threads for long."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

# Items or characters that are written in one go, which nothing can interrupt.
_SLICE = 2**16
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_response(text: bytes) -> Response:
    """An answer whose body is written already."""
    return Response(text, media_type="application/json")


def object_json(value: object) -> bytes:
    """A JSON text, written item by item: other threads get their turn, and it takes longer."""
    return "".join(_ENCODER.iterencode(value)).encode()


def list_json(items: Sequence[Any]) -> bytes:
    """A JSON array, written in slices."""
    return b"[" + b",".join(_slices(items)) + b"]"


def text_json(text: str) -> bytes:
    """A JSON string, written in slices."""
    return b'"' + b"".join(_slices(text)) + b'"'


def _slices(items: Sequence[Any]) -> list[bytes]:
    starts = range(0, len(items), _SLICE)
    return [to_json(items[start : start + _SLICE])[1:-1] for start in starts]
