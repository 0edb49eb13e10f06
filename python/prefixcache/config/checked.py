"""Frozen dataclasses whose fields pydantic checks, with errors that name the field.

pydantic is imported with the first check, so that a module may declare types for nothing.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, get_type_hints

from annotated_types import Ge, Gt, Le

from prefixcache.exceptions import FieldError, collect

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

# More than anything here is counted to, and little enough for every kind of arithmetic.
MAX_INT = 2**31 - 1

Count = Annotated[int, Ge(0), Le(MAX_INT)]
PositiveInt = Annotated[int, Ge(1), Le(MAX_INT)]
NonNegativeFloat = Annotated[float, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]

_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


@dataclass(frozen=True, slots=True)
class ReadBy:
    """Marks a field whose values a function of ours reads, raising `ValueError`."""

    parse: Callable[[object], Any]

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.parse)


class Checked:
    """Base of dataclasses that check themselves as they are made: types strictly, then ranges.

    A default is taken as it is.
    Raises `FieldError`, which never shows the value of a field without `repr`. A boolean is no
    integer, text is no number, NaN and infinity are neither.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        kind: type[Any] = type(self)

        def set_checked(field: Field[Any]) -> None:
            value, hint = getattr(self, field.name), hints(kind)[field.name]
            if value is not field.default and not is_dataclass(hint):  # parts check themselves
                value = check(adapter(hint), field.name, value, secret=not field.repr)
                object.__setattr__(self, field.name, value)

        collect(partial(set_checked, field) for field in fields(kind))
        self.check_together()

    def check_together(self) -> None:
        """What fields must fulfil together. Raises `FieldError`."""


@cache
def hints(kind: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, and what they are annotated with."""
    return get_type_hints(kind, include_extras=True)


@cache
def adapter(hint: Any) -> TypeAdapter[Any]:
    """What checks a value of a type."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


def check(
    adapter: TypeAdapter[Any],
    name: str,
    value: object,
    *,
    strict: bool = True,
    secret: bool = False,
) -> Any:
    """The value as the field takes it. Not `strict`, text is read as what it spells.

    Raises `FieldError`, which shows the value unless it is `secret`.
    """
    from pydantic import ValidationError

    try:
        return adapter.validate_python(value, strict=strict)
    except ValidationError as error:
        raise FieldError(name, problem(error, secret=secret)) from None


def problem(error: ValidationError, *, secret: bool = False) -> str:
    """What is wrong, as it goes on after the field's name."""
    first = error.errors()[0]
    text = re.sub(r"^\w+ should", "must", first["msg"].removeprefix("Value error, "))
    # pydantic goes on to say how it read the value, which is shown anyway.
    text = re.sub(r", (unable to|got a number with) .*", "", text)
    if not text.startswith("must"):
        text = f"is wrong: {text}"
    return f"{text}." if secret else f"{text}, got {shown(first['input'])}."


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether it is an integer that is not below the least; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is an object as JSON has it."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether it is an object as JSON has it, of whatever class."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a list, of anything."""
    return isinstance(value, list)


def shortened(text: str, most: int = 60) -> str:
    """At most `most` characters of `text`."""
    return text if len(text) <= most else text[: most - 3] + "..."


def shown(value: object) -> str:
    """A value in an error: a short line, whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of too many digits"
