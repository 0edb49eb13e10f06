"""Flags: fields of checked dataclasses, each declared once, by its type, default, help and group.

The command line, the environment and the file of `--config` are made of the same declarations
(`command_line.py`), and so are the keyword arguments of `LLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, TypeVar

from prefixcache.exceptions import ConfigError, collect

T = TypeVar("T")

# The groups of `--help`, in their order.
HelpGroup = Literal[
    "Answer",
    "Conversion",
    "Benchmark",
    "Replay",
    "Verification",
    "Ray",
    "Model",
    "Server",
    "Access",
    "TLS",
    "Scheduling",
    "Cache",
]


def flag(
    default: Any,
    help: str,  # noqa: A002
    group: HelpGroup,
    *,
    aliases: tuple[str, ...] = (),
    shown: str = "",
    metavar: str = "",
    secret: bool = False,
    greedy: bool = False,
    listed: bool = False,
    common: bool = False,
    variable: str = "",
) -> Any:
    """A dataclass field that users may set. The value of a `secret` one is never shown.

    `aliases` are further names, spelled as fields. `shown` tells in words what is used where
    nothing is given, and `metavar` what a value is, where the field's own default and type do not.
    The option of a `greedy` one takes all values up to the next option, a value of a `listed` one
    may be several: a JSON list, or text with commas between them. A `common` one is shown by
    `--help` alone, which leaves out most flags of a server and an engine. `variable` is one of
    another program, which gives the value where nothing else does.
    """
    metadata: dict[str, Any] = {"help": help, "group": group, "shown": shown, "metavar": metavar}
    metadata |= {"aliases": aliases, "greedy": greedy, "listed": listed, "common": common}
    metadata |= {"variable": variable}
    return field(default=default, repr=not secret, metadata=metadata)


def leaves(kind: type[Any]) -> dict[str, tuple[type[Any], Field[Any]]]:
    """All fields of a dataclass and of the dataclasses it is made of, each with its owner.

    Of fields with one name the first counts.
    """
    fields_by_name: dict[str, tuple[type[Any], Field[Any]]] = {}
    for member in fields(kind):
        part = member.default_factory
        if isinstance(part, type) and is_dataclass(part):
            fields_by_name |= {
                name: leaf for name, leaf in leaves(part).items() if name not in fields_by_name
            }
        else:
            fields_by_name.setdefault(member.name, (kind, member))
    return fields_by_name


def build(kind: type[T], given: Mapping[str, Any]) -> T:
    """The dataclass and its parts from flat values; names that are no field are passed over.

    Raises `FieldError` for a wrong value.
    """
    values, parts = dict[str, Any](), dict[str, type[Any]]()
    for member in fields(kind):  # pyright: ignore[reportArgumentType]
        part = member.default_factory
        if member.name in given:
            values[member.name] = given[member.name]
        elif isinstance(part, type) and is_dataclass(part):
            parts[member.name] = part
    built = collect(partial(build, part, given) for part in parts.values())
    return kind(**values, **dict(zip(parts, built, strict=True)))


def shown_values(options: Any) -> dict[str, Any]:
    """The values of a dataclass and of its parts; of secret ones whether there are any."""
    shown: dict[str, Any] = {}
    for member in fields(options):
        value = getattr(options, member.name)
        if is_dataclass(value):
            shown |= shown_values(value)
        else:
            shown[member.name] = value if member.repr else bool(value)
    return shown


def named(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, by the fields' own names instead of aliases; None counts as not given.

    Raises `ConfigError` for an unknown name, with the closest known one.
    """
    names = dict[str, str]()
    for name, (_, member) in leaves(kind).items():
        names |= dict.fromkeys((name, *member.metadata.get("aliases", ())), name)
    for name in given:
        if name not in names:
            raise ConfigError(f"Unknown flag {name}{closest(name, names) or '.'}")
    return {names[name]: value for name, value in given.items() if value is not None}


def closest(name: str, names: Mapping[str, Any]) -> str:
    """The end of an error about an unknown name: what may have been meant."""
    matches = get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
