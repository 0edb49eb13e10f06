"""Faults that are injected into a server of the soak.

A file `FOLDER/<point>.<number>` makes the next call of that point fail, once: the call takes the
file away. So whoever writes the files knows what was injected, and what has happened.
"""

from __future__ import annotations

import os
from pathlib import Path

# In the names of all of them: the log of a server has no messages of errors.
INJECTED = "Injected"
DISK = "disk"
LEAK = "leak"
POINTS = ("forward-before", "forward-after", "forward-memory", "tokenizer", "detokenizer")
# Of a disk tier: no request notices these.
STORE_POINTS = {"store-put": "put", "store-get": "get", "store-clear": "clear"}


class InjectedError(RuntimeError):
    """A failure of ours."""


class InjectedMemoryError(MemoryError):
    """No memory, says a fault of ours."""


class InjectedDiskError(OSError):
    """A disk that fails, says a fault of ours."""


class Faults:
    """The fault files of a folder, as the server sees them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def meet(self, point: str, error: type[Exception] = InjectedError) -> None:
        """Raises `error` where a file says so."""
        for name in os.listdir(self._folder):
            if name.startswith(f"{point}."):
                (self._folder / name).unlink()
                raise error(point)


def inject(folder: Path, point: str, number: int) -> Path:
    """Lets the next call of `point` fail; the file that says so until it has."""
    file = folder / f"{point}.{number}"
    file.touch()
    return file
