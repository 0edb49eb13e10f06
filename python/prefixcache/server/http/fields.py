"""The fields of a request's body: which are known, too long, or refused.

Types are strict, so that true is no number and "1" neither. Every field may be null, which means
that it is left out.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ValidationError

from prefixcache.config.checked import shortened
from prefixcache.exceptions import InvalidRequestError, wrong

_TYPE_TAGS = ("str", "int", "float", "bool", "none", "list[", "dict[", "function-")


class RequestFields(BaseModel, strict=True, extra="allow"):
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
        """Names of fields that nobody reads, in the caller's spelling."""
        known = self.no_effect | self.refused.keys()
        names = [name for name in self.model_extra or {} if name not in known]
        for name, part in self:
            if isinstance(part, BaseModel):
                names += [f"{name}.{other}" for other in part.model_extra or {}]
        return names


def check_length(name: str, value: object, most: int) -> None:
    """Raises `InvalidRequestError` for a string, list or object longer than `most`."""
    if not isinstance(value, (str, list, dict)):
        return
    length, what = len(value), "characters" if isinstance(value, str) else "entries"
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
    reason = first["msg"][:1].lower() + first["msg"][1:]
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
