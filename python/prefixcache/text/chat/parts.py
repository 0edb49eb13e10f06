"""Objects, lists and texts of a request's body, checked as they are read; errors name the place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from prefixcache.config.checked import shown
from prefixcache.exceptions import wrong

Values = Mapping[str, Any]


def one_object(value: object, field: str) -> Values:
    """Raises `InvalidRequestError` for anything but an object."""
    if not isinstance(value, Mapping):
        raise wrong(field, f"must be an object, got {shown(value)}")
    return cast("Values", value)


def objects(value: object, field: str) -> list[Values]:
    """The objects of a list, or none where it is left out."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(field, f"must be a list, got {shown(value)}")
    items = enumerate(cast("Sequence[object]", value))
    return [one_object(item, f"{field}[{index}]") for index, item in items]


def text_of(values: Values, name: str, field: str) -> str:
    """A member that must be text."""
    value = values.get(name)
    if not isinstance(value, str):
        raise wrong(f"{field}.{name}", f"must be a string, got {shown(value)}")
    return value


def word_of(values: Values, name: str, words: Iterable[str], field: str) -> str:
    """A member that must be one of `words`."""
    value = values.get(name)
    if not isinstance(value, str) or value not in words:
        raise wrong(f"{field}.{name}", f"must be one of {', '.join(words)}, got {shown(value)}")
    return value


def text_part(values: Values, text: str) -> dict[str, Any]:
    """A part of type text in OpenAI's form of a chat, with the breakpoint behind it, if any."""
    mark = values.get("prompt_cache_breakpoint")
    marks = {} if mark is None else {"prompt_cache_breakpoint": mark}
    return {"type": "text", "text": text, **marks}


def content_of(parts: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]] | None:
    """A message's content: one text where that says the same."""
    if not parts:
        return None
    only = parts[0]
    return only["text"] if len(parts) == 1 and len(only) == 2 else [*parts]
