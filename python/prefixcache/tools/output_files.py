"""Files that a long run writes at its end, checked before it begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from prefixcache.exceptions import FieldError

_PICTURES = (".png", ".svg", ".pdf")


def check_picture(flag: str, file: Path) -> None:
    """Raises `FieldError` for a file whose ending is none of the pictures that can be drawn."""
    if file.suffix.lower() not in _PICTURES:
        raise FieldError(flag, f"draws {', '.join(_PICTURES)}, not {str(file)!r}.")


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
