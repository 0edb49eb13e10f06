"""Flags of vLLM as options of `serve`, and its forms of a command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import click
from click.core import ParameterSource

from prefixcache.config.vllm_flags import VllmFlag, vllm_flags


class VllmOption(click.Option):
    """A hidden option that sets nothing."""

    def __init__(self, flag: VllmFlag) -> None:
        name = flag.names[0].lstrip("-").replace("-", "_").replace(".", "_")
        takes_value = flag.takes_value
        super().__init__(
            [f"foreign_{name}", *flag.names],
            hidden=True,
            is_flag=not takes_value,
            type=click.UNPROCESSED if takes_value else bool,
        )
        self._flag = flag

    def refuse(self, ctx: click.Context) -> None:
        """Raises `FieldError` when the option was given and asks for what is not done."""
        name = self.name or ""
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            self._flag.check(self.opts[0], ctx.params[name])


def vllm_options() -> Iterator[VllmOption]:
    """All of them."""
    return map(VllmOption, vllm_flags())


def plain_options(args: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """A command line of vLLM as one of click, for a command with these `options`.

    They are the first names of options by all their names. Underscores of a name become dashes, and
    the parts of a JSON object, as `--name.a 1 --name.b.c=x`, one value. Raises `click.UsageError`
    where that is given whole too.
    """
    plain, given = list[str](), set[str]()
    objects = dict[str, dict[str, Any]]()
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        start, _, path = name.partition(".")
        option = start if start in options else start.replace("_", "-")
        if arg == "--":
            plain += [arg, *rest]
        elif not arg.startswith("-") or option not in options:
            plain.append(arg)
        elif path:
            parts = objects.setdefault(options[option], {})
            _put(parts, path, value if equals else next(rest, ""))
        else:
            given.add(options[option])
            plain.append(option + equals + value)
    for option in objects.keys() & given:
        raise click.UsageError(f"{option} is given whole and in parts: give it in one form.")
    return [part for name in objects for part in (name, json.dumps(objects[name]))] + plain


def _put(parts: dict[str, Any], path: str, text: str) -> None:
    *outer, last = path.split(".")
    for key in outer:
        inner = parts.get(key)
        parts[key] = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
        parts = parts[key]
    parts[last] = text
    with suppress(ValueError, RecursionError):
        parts[last] = json.loads(text.lower() if text in ("True", "False") else text)
