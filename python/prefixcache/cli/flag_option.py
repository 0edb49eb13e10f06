"""The option of a flag, and where its value may be said besides: the environment, a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import click
from click.core import ParameterSource

from prefixcache.config.checked import adapter, check, hints, is_object, shown
from prefixcache.config.flags import HelpGroup, closest
from prefixcache.exceptions import FieldError

# Where a user said a value, and the value.
PlacedValue = tuple[str, Any]

_VARIABLES = "PREFIXCACHE_"
_METAVARS = {int: "<int>", float: "<number>", str: "<text>", Path: "<path>"}


class FlagOption(click.Option):
    """The option of one flag: a field of the dataclass `kind`."""

    name: str

    def __init__(self, kind: type[Any], field: Field[Any]) -> None:
        declared = field.metadata
        hint = hints(kind)[field.name]
        value_type = _value_type(hint)
        names = [dashed(name) for name in (field.name, *declared["aliases"])]
        if value_type is bool:
            names = [f"{name}/--no-{name.removeprefix('--')}" for name in names]
        default = declared["shown"] or _shown_default(field.default)
        super().__init__(
            [field.name, *names],
            type=bool if value_type is bool else click.UNPROCESSED,
            default=None,
            multiple=get_origin(hint) is tuple,
            metavar=declared["metavar"] or _metavar(value_type),
            help=declared["help"] + (f"  [default: {default}]" if default else ""),
        )
        self.group: HelpGroup = declared["group"]
        self.greedy: bool = declared["greedy"]
        self.is_common: bool = declared["common"]
        self._other_variable: str = declared["variable"]
        self._is_listed: bool = declared["listed"]
        self._kind = kind
        self._is_secret = not field.repr

    def said(self, ctx: click.Context, file: Mapping[str, PlacedValue]) -> PlacedValue | None:
        """Where a value is said, and the value; None where none is. Raises `FieldError`."""
        positional = ctx.params.get(f"{self.name}_argument")
        if positional is not None:
            return self.name.upper(), positional
        if ctx.get_parameter_source(self.name) is ParameterSource.COMMANDLINE:
            return self.opts[0], ctx.params[self.name]
        text = from_environment(self.name)
        if text is not None:
            several = self.multiple and not self._is_listed
            return _VARIABLES + self.name.upper(), text.split() if several else text
        if self.name in file or not self._other_variable:
            return file.get(self.name)
        text = _environment(self._other_variable)
        return None if text is None else (self._other_variable, text)

    def read(self, place: str, value: Any) -> Any:
        """The checked value: text counts as what it spells. Raises `FieldError` with the place."""
        parts = _parts(value)
        if self._is_listed:
            parts = tuple(item for part in parts for item in _items(place, part))
        return check(
            adapter(hints(self._kind)[self.name]),
            place,
            parts if self.multiple else value,
            strict=not all(isinstance(part, str) for part in parts),
            secret=self._is_secret,
        )


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(cast("Iterable[Any]", value)) if isinstance(value, (list, tuple)) else (value,)


def _items(place: str, value: Any) -> list[Any]:
    """The values that one stands for: of a JSON list, as vLLM takes it, or between commas."""
    if not isinstance(value, str):
        return [value]
    if not value.lstrip().startswith("["):
        return value.replace(",", " ").split() or [value]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise FieldError(place, f"is not a JSON list, got {shown(value)}.") from None


def read_file(path: Path, flags: Mapping[str, FlagOption]) -> dict[str, PlacedValue]:
    """What the file says, by the names of flags. Raises `FieldError`.

    Keys are names or aliases of flags, with dashes or without. An error about the file shows
    no line of it: there may be a key in it.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FieldError("--config", f"cannot read {path}: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise FieldError("--config", f"takes a YAML file; {path} is none{where}.") from None
    if content is not None and not is_object(content):
        raise FieldError("--config", f"takes flags and their values; {path} holds none.")
    names = {_plain(name): option.name for option in flags.values() for name in option.opts}
    values = dict[str, PlacedValue]()
    for key, value in (content or {}).items():
        name = _plain(key)
        if name not in names:
            problem = f"is not a flag of this command{closest(name, names) or '.'}"
            raise FieldError(f"{shown(key)} in {path}", problem)
        if value is not None:
            values[names[name]] = (f"{key} in {path}", value)
    return values


def from_environment(name: str) -> str | None:
    """A flag's value in the environment. Raises `FieldError`."""
    return _environment(_VARIABLES + name.upper())


def _environment(variable: str) -> str | None:
    """What a variable says.

    Raises `FieldError` for an empty one: it would start an open server for somebody who wanted a
    key, and tells nothing of any other flag.
    """
    text = os.environ.get(variable)
    if text is not None and not text.strip():
        raise FieldError(variable, "is set but empty. Give it a value, or unset it.")
    return text


def dashed(name: str) -> str:
    """The option's name; one or two letters get one dash, as in vLLM."""
    return ("-" if len(name) <= 2 else "--") + name.replace("_", "-")


def _plain(name: object) -> str:
    return str(name).removeprefix("--").replace("-", "_")


def _value_type(hint: Any) -> Any:
    """The type of one value, without what it is wrapped in: `Annotated`, `| None`, a tuple."""
    while get_origin(hint) is not Literal and get_args(hint):
        hint = get_args(hint)[0]
    return hint


def _metavar(value_type: Any) -> str | None:
    if get_origin(value_type) is Literal:
        return f"[{'|'.join(map(str, get_args(value_type)))}]"
    return _METAVARS.get(value_type)


def _shown_default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, ()) else str(value)
