"""The command `prefixcache completion`: what a shell needs to complete command lines."""

from __future__ import annotations

import os
from pathlib import Path

import click

from prefixcache.cli.command_line import Given
from prefixcache.exceptions import FieldError

SHELLS = ("bash", "zsh", "fish")


def completion(given: Given) -> None:
    """Print the completion script of a shell.

    In bash and zsh, `eval "$(prefixcache completion)"` loads it, in fish
    `prefixcache completion | source`. The default is the shell in the variable SHELL.
    """
    from click.shell_completion import get_completion_class

    shell = given.values["shell"] or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise FieldError("SHELL", f"must be one of {', '.join(SHELLS)}, got {shell!r}.")
    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "prefixcache", "_PREFIXCACHE_COMPLETE").source())
