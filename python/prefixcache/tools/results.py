"""What the tools write when they are done: checked before they begin, and how it was made."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefixcache.exceptions import FieldError, PrefixCacheError

_SECRET = "--api-key"


def check_can_write(files: Mapping[str, Path | None]) -> None:
    """Raises `FieldError` for the first file, by its flag, that could not be written.

    None is left out. Makes the folders that are not there yet, and writes nothing.
    """
    for flag, file in files.items():
        if file is None:
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FieldError(flag, f"cannot write {file}: {error.strerror}.") from error
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise FieldError(flag, f"cannot write {file}.")


def check_can_read(flag: str, *files: Path) -> None:
    """Raises `FieldError` by the flag for the first of the files that cannot be read."""
    for file in files:
        if not file.exists():
            raise FieldError(flag, f"cannot read {file}: there is no such file.")
        if file.is_dir() or not os.access(file, os.R_OK):
            raise FieldError(flag, f"cannot read {file}.")


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Writes a report, its parents made where needed. Raises `PrefixCacheError` if it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise PrefixCacheError(f"Cannot write {path}: {error.strerror}.") from error


def command_line() -> str:
    """The command that runs, as a report shows it: without keys."""
    shown = list[str]()
    for before, argument in zip(sys.argv, sys.argv[1:], strict=False):
        option, equals, _ = argument.partition("=")
        hidden = f"{option}=..." if equals and option == _SECRET else argument
        shown.append("..." if before == _SECRET else hidden)
    return shlex.join(["prefixcache", *shown])
