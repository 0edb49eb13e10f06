"""Errors named as the endpoint's own body calls its fields."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from prefixcache.exceptions import InvalidRequestError
from prefixcache.text.chat.grammars import schema_problem

_FIELD = re.compile(r"[\[.]")
_INDEX = re.compile(r"\[\d+\]")


@contextmanager
def fields_named(names: Mapping[str, str]) -> Generator[None, None, None]:
    """Renames fields in errors, where an endpoint calls a field by a name of its own.

    What is wrong with a part of a field, as `messages[0].tool_call_id`, is reported for that field:
    endpoints number their parts otherwise. A name with `[]` is of a part that all number alike, and
    one with a number of that part alone.
    """
    try:
        yield
    except InvalidRequestError as error:
        param = error.param or ""
        name, renamed = _part_named(param, names) or _field_named(param, names) or (None, "")
        if name is None:
            raise
        message = str(error).replace(param, renamed, 1)
        raise type(error)(message, param=name, code=error.code) from None


def _part_named(param: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    """The field of the first name that `param` begins with, in `names` and in messages."""
    index = _INDEX.search(param)
    for pattern, name in names.items():
        begin = pattern.replace("[]", index[0], 1) if index else pattern
        if "[" in pattern and param.startswith(begin):
            renamed = name.replace("[]", index[0] if index else "", 1) + param.removeprefix(begin)
            return renamed, renamed
    return None


def _field_named(param: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    name = names.get(param) or names.get(_FIELD.split(param, maxsplit=1)[0])
    if name is None:
        return None
    _, inside, member = param.rpartition(".")
    renamed = f"{name}: {names.get(member, member)}" if inside and param not in names else name
    return name, renamed


@contextmanager
def schemas_named(grammar: str) -> Generator[None, None, None]:
    """Names the tool in errors about its part of a grammar."""
    try:
        yield
    except InvalidRequestError as error:
        problem = schema_problem(grammar, str(error))
        if problem is None:
            raise
        field, reason = problem
        raise InvalidRequestError(f"{field}: {reason}", param=field, code=error.code) from None
