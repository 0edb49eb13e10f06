"""The command `prefixcache cache`: what lies in a folder of `--kv-cache-dir`."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prefixcache.cli.command_line import FlagCommand, FlagGroup, Given
from prefixcache.exceptions import PrefixCacheError

if TYPE_CHECKING:
    from prefixcache.kv.kv_folder import FileInfo, FileState, KVFolder

_MIB = 1 << 20
_FOLDER = click.Argument(["folder"], help="As --kv-cache-dir.", type=click.Path(path_type=Path))
_NAMES = click.Argument(
    ["names"], metavar="[FILE]...", nargs=-1, help="Files as `ls` shows them; all otherwise."
)


def ls(given: Given) -> None:
    """List the files of a folder: bytes on the disk, age, blocks, and what they are of."""
    from prefixcache.kv.kv_folder import survey

    with _opened(given.values["folder"]) as folder:
        for info, state in survey(folder, reads=False):
            click.echo(_line(info, state))


def verify(given: Given) -> None:
    """Compare the blocks of each file with their checksums.

    Exit status 1 where a block or a file is damaged. Files of running servers are left out.
    """
    from prefixcache.kv.kv_folder import survey

    damaged = False
    with _opened(given.values["folder"]) as folder:
        for info, state in survey(folder, reads=True):
            click.echo(_line(info, state))
            damaged |= state.is_damaged
    sys.exit(int(damaged))


def rm(given: Given) -> None:
    """Remove files, those that no server uses."""
    with _opened(given.values["folder"]) as folder:
        there = [info.name for info in folder.files()]
        for name in given.values["names"] or there:
            if name not in there:
                raise PrefixCacheError(f"{name} is no file of {folder.path}.")
            done = folder.remove(name)
            click.echo(f"{name}: {'removed' if done else 'in use by a server, kept'}")


@contextmanager
def _opened(path: Path) -> Generator[KVFolder, None, None]:
    from prefixcache.kv.kv_folder import KVFolder, NotUsableError

    try:
        folder = KVFolder(path, create=False)
        try:
            yield folder
        finally:
            folder.close()
    except (NotUsableError, OSError) as error:
        raise PrefixCacheError(f"{path} cannot be used: {error}") from error


def _line(info: FileInfo, state: FileState) -> str:
    hours = (time.time() - info.last_used) / 3600
    size = f"{info.num_bytes / _MIB:,.1f} MiB"
    return f"{info.name}  {size:>14}  begun {hours:,.1f} h ago  {state.text}"


def cache(_: Given) -> None:
    """See, check and remove what --kv-cache-dir keeps."""
    click.echo(click.get_current_context().get_help())


CACHE = FlagGroup(
    cache,
    below=[
        FlagCommand(ls, arguments=[_FOLDER], examples=["prefixcache cache ls ~/.cache/kv"]),
        FlagCommand(verify, arguments=[_FOLDER], examples=["prefixcache cache verify ~/.cache/kv"]),
        FlagCommand(rm, arguments=[_FOLDER, _NAMES], examples=["prefixcache cache rm ~/.cache/kv"]),
    ],
    examples=["prefixcache cache"],
)
