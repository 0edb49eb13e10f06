"""The command `prefixcache cache`: what `--kv-cache-dir` and `--weights-cache-dir` keep."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prefixcache.cli.command_line import FlagCommand, FlagGroup, Given
from prefixcache.exceptions import FieldError, PrefixCacheError

if TYPE_CHECKING:
    from prefixcache.config.private_folder import FileInfo, FileState, PrivateFolder

_MIB = 1 << 20
_FOLDER = click.Argument(
    ["folder"],
    required=False,
    help="As --kv-cache-dir or --weights-cache-dir.  [default: that of --weights-cache-dir]",
    type=click.Path(path_type=Path),
)
# So that a command that is not finished removes nothing.
_NAMED_FOLDER = click.Argument(
    ["folder"], help="As --kv-cache-dir or --weights-cache-dir.", type=click.Path(path_type=Path)
)
_NAMES = click.Argument(
    ["names"], metavar="[FILE]...", nargs=-1, help="Files as `ls` shows them; all without one."
)


def ls(given: Given) -> None:
    """List the files of a folder.

    Each line has the bytes on the disk, the age, and the content.
    """
    for info, state in _survey(given, reads=False):
        click.echo(_line(info, state))


def verify(given: Given) -> None:
    """Compare each file with its checksums.

    Exit status 1 where one is damaged. The KV of running servers is left out.
    """
    damaged = False
    for info, state in _survey(given, reads=True):
        click.echo(_line(info, state))
        damaged |= state.is_damaged
    sys.exit(int(damaged))


def rm(given: Given) -> None:
    """Remove files, except the KV of running servers."""
    names = set(given.values["names"])
    for folder in _opened(given.values["folder"]):
        for info in folder.files():
            if not given.values["names"] or info.name in names:
                names.discard(info.name)
                done = folder.remove(info.name)
                click.echo(f"{info.name}: {'removed' if done else 'in use by a server, kept'}")
    if names:
        raise PrefixCacheError(f"{min(names)} is no file of {given.values['folder']}.")


def _survey(given: Given, *, reads: bool) -> Iterator[tuple[FileInfo, FileState]]:
    for folder in _opened(given.values["folder"]):
        yield from folder.survey(reads=reads)


def _opened(path: Path | None) -> Iterator[PrivateFolder]:
    """The folder, as one of KV and as one of weights."""
    from prefixcache.config.private_folder import NotUsableError
    from prefixcache.kv.kv_folder import KVFolder
    from prefixcache.models.laid_out.weights_folder import WeightsFolder, default_folder

    if path is None:
        path = default_folder()
        if not path.exists():
            return  # nothing was kept yet
    try:
        for kind in (KVFolder, WeightsFolder):
            with closing(kind(path, create=False)) as folder:
                yield folder
    except (NotUsableError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FieldError("FOLDER", f"{path} cannot be used: {reason}.") from error


def _line(info: FileInfo, state: FileState) -> str:
    hours = (time.time() - info.last_used) / 3600
    size = f"{info.num_bytes / _MIB:,.1f} MiB"
    return f"{info.name}  {size:>14}  used {hours:,.1f} h ago  {state.text}"


def cache(_: Given) -> None:
    """See, check and remove kept KV and weights.

    They are in the folders of --kv-cache-dir and --weights-cache-dir.
    """
    click.echo(click.get_current_context().get_help())


CACHE = FlagGroup(
    cache,
    below=[
        FlagCommand(ls, arguments=[_FOLDER], examples=["prefixcache cache ls ~/.cache/kv"]),
        FlagCommand(verify, arguments=[_FOLDER], examples=["prefixcache cache verify ~/.cache/kv"]),
        FlagCommand(
            rm, arguments=[_NAMED_FOLDER, _NAMES], examples=["prefixcache cache rm ~/.cache/kv"]
        ),
    ],
    examples=["prefixcache cache"],
)
