"""Options of other programs that a command takes where they ask for nothing that it does not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from prefixcache.config.checked import shown
from prefixcache.exceptions import FieldError


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """An option of another program, under its names there.

    A switch is refused with `why`; without it, it means nothing here or what is done anyway. An
    option that `takes_value` is refused for values other than `harmless`; None takes any.
    """

    names: tuple[str, ...]
    takes_value: bool = False
    harmless: tuple[str, ...] | None = None
    why: str = ""


class ForeignOption(click.Option):
    """A hidden option that sets nothing."""

    def __init__(self, foreign: ForeignFlag) -> None:
        name = foreign.names[0].lstrip("-").replace("-", "_").replace(".", "_")
        super().__init__(
            [f"foreign_{name}", *foreign.names],
            hidden=True,
            default=None,
            is_flag=not foreign.takes_value,
            type=click.UNPROCESSED if foreign.takes_value else bool,
        )
        self._foreign = foreign

    def refuse(self, ctx: click.Context) -> None:
        """Raises `FieldError` when the option was given and asks for what is not done."""
        if ctx.get_parameter_source(self.name or "") is not ParameterSource.COMMANDLINE:
            return
        value, foreign = ctx.params[self.name or ""], self._foreign
        if not _asks_for_more(foreign, value):
            return
        got = f", got {shown(value)}" if foreign.takes_value else ""
        only_these = f"; taken is {', '.join(foreign.harmless)}" if foreign.harmless else ""
        raise FieldError(foreign.names[0], f"{foreign.why}{only_these}{got}.")


def _asks_for_more(foreign: ForeignFlag, value: Any) -> bool:
    if not foreign.takes_value:
        return bool(foreign.why)
    return foreign.harmless is not None and str(value).lower() not in foreign.harmless


def ignored(*names: str) -> list[ForeignFlag]:
    """Switches that mean nothing here, or what is done anyway; each may also be switched off."""
    return [ForeignFlag((name,)) for name in names]


def refused(why: str, *names: str) -> list[ForeignFlag]:
    """Switches that ask for what is not done."""
    return [ForeignFlag((name,), why=why) for name in names]


def any_value(*names: str) -> list[ForeignFlag]:
    """Options whose values mean nothing here."""
    return [ForeignFlag((name,), takes_value=True) for name in names]


def only(harmless: Sequence[str], why: str, *names: str) -> list[ForeignFlag]:
    """Options that are taken with some values alone; names that begin with one dash are aliases."""
    found: list[ForeignFlag] = []
    for name in names:
        if name.startswith("--"):
            found.append(ForeignFlag((name,), True, tuple(harmless), why))
        else:
            last = found.pop()
            found.append(ForeignFlag((*last.names, name), True, last.harmless, why))
    return found
