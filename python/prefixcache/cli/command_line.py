"""Commands whose options are made of flags, and what users say with them.

A flag is looked for on the command line, then in the environment, then in the file of `--config`.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from prefixcache.cli.flag_option import FlagOption, dashed, from_environment, read_file
from prefixcache.cli.vllm_options import VllmOption, plain_options
from prefixcache.config.checked import shown
from prefixcache.config.flags import HelpGroup, build, closest, leaves
from prefixcache.exceptions import (
    FieldError,
    InvalidRequestError,
    PrefixCacheError,
    collect,
    joined,
)

T = TypeVar("T")

_SOURCES = (
    "Options can also be set in the environment (--some-name as PREFIXCACHE_SOME_NAME, several "
    "values with spaces between them) or in the YAML file of --config (as some_name). Precedence: "
    "command line, environment, file."
)
# Groups that several commands share, of which a long help shows the common flags alone.
_SHARED = ("Model", "Server", "Access", "TLS", "Scheduling", "Cache")
_FEW = 20
_UNKNOWN = "prefixcache.unknown"  # options that do not exist, in a context
_HELP = "prefixcache.help"  # what was asked of --help, in a context


@dataclass(frozen=True, slots=True)
class Given:
    """What a user said to a command: values by the names of flags, and where each was said."""

    values: Mapping[str, Any]
    places: Mapping[str, str]

    def make(self, kind: type[T], **others: Any) -> T:
        """The dataclass of what was said, and of `others` where nothing was.

        Raises `FieldError` with the name of the option, the variable, or the place in the file.
        """
        try:
            return build(kind, {**others, **self.values})
        except FieldError as error:
            raise self.placed(error, leaves(kind)) from None

    def check(self, *kinds: type[Any]) -> None:
        """Raises `FieldError` with all that is wrong in these dataclasses."""
        collect(partial(self.make, kind) for kind in kinds)

    def placed(self, error: FieldError, flags: Collection[str]) -> FieldError:
        """The error, which names those `flags` that are in it as they were said."""

        def said(match: re.Match[str]) -> str:
            return self._place(match[0]) if match[0] in flags else match[0]

        def put(error: FieldError) -> FieldError:
            field = self._place(error.field) if error.field in flags else error.field
            return FieldError(field, re.sub(r"[a-z]+_\w+", said, error.problem))

        return joined([put(part) for part in error.errors])

    def _place(self, name: str) -> str:
        return self.places.get(name, dashed(name))

    def of(self, kind: type[Any]) -> dict[str, Any]:
        """Those values that belong to the dataclass or its parts."""
        return {name: value for name, value in self.values.items() if name in leaves(kind)}


class App(click.Group):
    """The command itself: wrong usage is one line and status 2, as a wrong flag is."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command line; see click."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            sys.exit(super().main(*args, standalone_mode=False, **extra))
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(0)
        except click.ClickException as error:
            more = _where_help_is(error)
            click.echo(f"error: {error.format_message()}{more}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(1)


def _where_help_is(error: click.ClickException) -> str:
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return "" if ctx is None else f" See {ctx.command_path} --help."


class FlagCommand(click.Command):
    """A command with an option for each flag of `kinds`, but for those `without`.

    Of flags with one name the first counts. A positional argument is given as it is;
    `some_flag_argument` is another way to say `--some-flag`. `foreign` options are checked alone.
    Of many flags `--help` shows the common ones, `--help all` all, and `--help cache` those of that
    group. Its `examples` are command lines.
    """

    def __init__(
        self,
        run: Callable[[Given], None],
        *kinds: type[Any],
        arguments: Sequence[click.Argument] = (),
        without: Collection[str] = (),
        foreign: Callable[[], Iterable[VllmOption]] = lambda: (),
        examples: Sequence[str] = (),
    ) -> None:
        self._run = run
        self._kinds, self._without = kinds, without
        self._arguments, self._foreign = arguments, foreign
        self.examples = examples
        name = run.__name__.replace("_", "-")
        super().__init__(name, help=run.__doc__, epilog=_SOURCES if kinds else None)
        del self.params  # `params` below makes those of the command that runs, and no others

    @cached_property
    def params(self) -> list[click.Parameter]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the command takes."""
        config = click.Option(["--config"], metavar="<path>", help="YAML file with flags.")
        return [*self._arguments, *self._flags.values(), config, *self._foreign()]

    @cached_property
    def _flags(self) -> dict[str, FlagOption]:
        options = dict[str, FlagOption]()
        for kind in self._kinds:
            for name, (owner, field) in leaves(kind).items():
                if field.metadata and name not in self._without:
                    options.setdefault(name, FlagOption(owner, field))
        return options

    @property
    def _is_long(self) -> bool:
        return len(self._flags) > _FEW

    def invoke(self, ctx: click.Context) -> None:
        """Runs the command.

        Errors that are raised on purpose become one line: status 2 for a wrong flag, else 1.
        """
        try:
            with suppress(BrokenPipeError):
                self._run_placed(self._given(ctx))
        except PrefixCacheError as error:
            for line in error.errors if isinstance(error, FieldError) else [error]:
                click.echo(f"error: {line}", err=True)
            sys.exit(2 if isinstance(error, (FieldError, InvalidRequestError)) else 1)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, once the values behind a greedy option have it before each of them.

        Options may have the forms of vLLM, see `plain_options`.
        """
        greedy = {name for option in self._flags.values() if option.greedy for name in option.opts}
        options = {
            name: names[0]
            for param in self.params
            for names in (param.opts, param.secondary_opts)
            for name in names
        }
        return self._parsed(ctx, _spread(plain_options(args, options), greedy))

    def _parsed(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leaves out options that do not exist, of which `_given` makes errors."""
        unknown: list[str] = ctx.meta.setdefault(_UNKNOWN, [])
        try:
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            if isinstance(self, click.Group):
                raise
            unknown.append(error.option_name)
            return self._parsed(ctx, _without(args, error.option_name))
        except click.MissingParameter as error:
            if unknown:  # its value may be what is missing
                raise click.NoSuchOption(unknown[0], ctx=ctx) from None
            raise error from None

    def _run_placed(self, given: Given) -> None:
        """Flags that turn out wrong once the model is known are named as the user said them."""
        try:
            self._run(given)
        except FieldError as error:
            raise given.placed(error, self._flags) from None

    def _given(self, ctx: click.Context) -> Given:
        path = ctx.params["config"] or from_environment("config")
        file = read_file(Path(path), self._flags) if path else {}
        values = {name: ctx.params[name] for name in ctx.params if name not in self._flags}
        places = dict[str, str]()

        def read(name: str, option: FlagOption) -> None:
            said = option.said(ctx, file)
            if said is not None:
                places[name], value = said
                values[name] = option.read(places[name], value)

        refused = [param for param in self.params if isinstance(param, VllmOption)]
        collect(
            [
                *(partial(self._refuse, name) for name in ctx.meta[_UNKNOWN]),
                *(partial(option.refuse, ctx) for option in refused),
                *(partial(read, *item) for item in self._flags.items()),
            ]
        )
        return Given(values, places)

    def _refuse(self, unknown: str) -> None:
        names = {name: param for param in self.params for name in param.opts}
        problem = f"is not a flag of this command{closest(unknown, names) or '.'}"
        raise FieldError(unknown, problem)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """`--help`, which takes a group where there are many flags."""
        if not self._is_long:
            return super().get_help_option(ctx)
        if self._help_option is None:
            self._help_option = click.Option(
                self.get_help_option_names(ctx),
                is_flag=False,
                flag_value="",
                is_eager=True,
                expose_value=False,
                metavar="[group]",
                callback=self._show_help,
                help="Show the common options, those of a group, or all.",
            )
        return self._help_option

    def _show_help(self, ctx: click.Context, _option: click.Parameter, asked: str | None) -> None:
        if asked is None or ctx.resilient_parsing:
            return
        topics = ["all", *map(str.lower, self._groups())]
        if asked and asked.lower() not in topics:
            ctx.fail(f"--help takes {', '.join(topics)}, got {shown(asked)}.")
        ctx.meta[_HELP] = asked.lower()
        click.echo(ctx.get_help())
        ctx.exit()

    def _groups(self) -> list[str]:
        there = {option.group for option in self._flags.values()}
        return [name for name in get_args(HelpGroup) if name in there]

    def _is_shown(self, option: click.Option, asked: str) -> bool:
        if not isinstance(option, FlagOption) or not self._is_long or asked == "all":
            return True
        if asked:
            return option.group.lower() == asked
        return option.is_common or option.group not in _SHARED

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the groups of options; no name is cut to fit the terminal."""
        groups: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        asked = ctx.meta.get(_HELP, "")
        for option in self.get_params(ctx):
            if not isinstance(option, click.Option) or not self._is_shown(option, asked):
                continue
            if (record := option.get_help_record(ctx)) is not None:
                groups[getattr(option, "group", "Options")].append(record)
        for name in (*get_args(HelpGroup), "Options"):
            if name in groups:
                with formatter.section(name):
                    formatter.write_dl(groups[name])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples, where else flags may stand, and how more of them are shown."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        super().format_epilog(ctx, formatter)
        if self._is_long:
            topics = ", ".join(map(str.lower, self._groups()))
            formatter.write_paragraph()
            formatter.write_text(
                f"All {len(self._flags)} options: --help all. Those of a group, as --help cache: "
                f"{topics}."
            )


class FlagGroup(FlagCommand, click.Group):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A command with flags, and commands `below` it, of which one that is named runs instead."""

    def __init__(
        self,
        run: Callable[[Given], None],
        *kinds: type[Any],
        below: Sequence[click.Command],
        examples: Sequence[str] = (),
    ) -> None:
        super().__init__(run, *kinds, examples=examples)
        self.invoke_without_command, self.no_args_is_help = True, False
        self.callback = self._run_alone
        for command in below:
            self.add_command(command)

    def invoke(self, ctx: click.Context) -> None:
        """Runs the command below that was named, or this one."""
        click.Group.invoke(self, ctx)

    def _run_alone(self, **_params: object) -> None:
        """What click calls before a command below too."""
        ctx = click.get_current_context()
        if ctx.invoked_subcommand is None:
            FlagCommand.invoke(self, ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the groups, then the commands below."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def _spread(args: Sequence[str], greedy: Collection[str]) -> list[str]:
    """`--name a b` as `--name a --name b`, for the greedy options."""
    spread, option, count = list[str](), "", 0
    for arg in args:
        if arg.startswith("-"):
            option, count = (arg if arg in greedy else ""), 0
        elif option:
            count += 1
            if count > 1:
                spread.append(option)
        spread.append(arg)
    return spread


def _without(args: Sequence[str], unknown: str) -> list[str]:
    """The command line without an option, and without what may be its value."""
    place = next(i for i, arg in enumerate(args) if arg.partition("=")[0] == unknown)
    has_value = "=" not in args[place] and not "".join(args[place + 1 : place + 2]).startswith("-")
    return [*args[:place], *args[place + 1 + has_value :]]
