"""A folder of files that belong to the user alone, and which nobody else may open.

No link is followed, and what is not as it should be is not used.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
STAT_BLOCK = 512


class NotUsableError(Exception):
    """Why a folder or a file is not used."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of the folder: its bytes on the disk, and when it was last begun."""

    name: str
    num_bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class FileState:
    """What can be said of a file, and whether it or a part of it is damaged."""

    text: str
    is_damaged: bool = False


class PrivateFolder:
    """An open folder of files whose names end as `suffixes` say.

    Raises `NotUsableError` with the reason, and `OSError`.
    """

    suffixes: tuple[str, ...] = ()

    def describe(self, name: str, *, reads: bool) -> FileState:
        """What a file holds; `reads` compares all of it with its checksums.

        Raises `ValueError` for a file that says nonsense.
        """
        raise NotImplementedError

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        if create:
            for folder in (*reversed(path.parents), path):  # One above may be of use like this too.
                folder.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(path, flags)
        try:
            check_owner(os.fstat(self.descriptor), "the folder")
        except NotUsableError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the use of the folder; files stay open."""
        os.close(self.descriptor)

    def files(self) -> list[FileInfo]:
        """The files, the one that was begun last first. What else lies there is passed over."""
        infos: list[FileInfo] = []
        for name in os.listdir(self.descriptor):
            if name.endswith(self.suffixes):
                try:
                    status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                except FileNotFoundError:  # Removed meanwhile.
                    continue
                if stat.S_ISREG(status.st_mode):
                    size = status.st_blocks * STAT_BLOCK
                    infos.append(FileInfo(name, size, status.st_mtime))
        return sorted(infos, key=lambda info: -info.last_used)

    def survey(self, *, reads: bool) -> Iterator[tuple[FileInfo, FileState]]:
        """Each file and its state; `reads` as in `describe`."""
        for info in self.files():
            try:
                state = self.describe(info.name, reads=reads)
            except (NotUsableError, OSError, ValueError) as error:
                state = FileState(f"not usable: {error}", is_damaged=True)
            yield info, state

    def make_room(self, infos: list[FileInfo], room: int, most_files: int = 1 << 30) -> int:
        """Removes files beyond the first `most_files`, and those that `room` bytes are short for.

        Returns the bytes that are left, which are negative where files are in use.
        """
        for place, info in enumerate(infos):
            if (place < most_files and info.num_bytes <= room) or not self.remove(info.name):
                room -= info.num_bytes
            else:
                logger.info("%s is removed: its room is needed.", self.path / info.name)
        return room

    def open_file(self, name: str, flags: int = os.O_RDWR) -> int:
        """The descriptor of a file of the user's own."""
        descriptor = os.open(name, _OPEN | flags, 0o600, dir_fd=self.descriptor)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NotUsableError(f"{name} is no file")
            check_owner(status, name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def lock(self, name: str, *, create: bool = False) -> int | None:
        """The descriptor of a file that nobody else has; None where another process has it."""
        while True:
            descriptor = self.open_file(name, os.O_RDWR | (os.O_CREAT if create else 0))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            if os.fstat(descriptor).st_nlink == 1:
                return descriptor
            os.close(descriptor)  # Removed by its last user meanwhile.

    def remove(self, name: str) -> bool:
        """Removes a file; false where another process has it locked."""
        descriptor = self.lock(name)
        if descriptor is None:
            return False
        os.unlink(name, dir_fd=self.descriptor)
        os.close(descriptor)
        return True


def check_owner(status: os.stat_result, what: str) -> None:
    """Raises `NotUsableError` unless it is the user's own, and nobody else may open it."""
    if status.st_uid != os.geteuid():
        raise NotUsableError(f"{what} belongs to another user")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise NotUsableError(f"{what} can be opened by other users (mode {mode:04o})")
