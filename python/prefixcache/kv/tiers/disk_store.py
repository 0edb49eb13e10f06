"""Where a slower tier keeps the bytes of blocks: the interface, and SQLite as its first library.

SQLite is in Python's standard library, survives kill -9, locks its file between processes and can
be bounded. It has no checksums of its own: the values bring theirs (`BlockStaging`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixcache.config.private_folder import PrivateFolder, check_owner

FILE_NAME = "blocks.sqlite"
SCOPE_BYTES = 16

_PAGE_BYTES = 1 << 14
_EVICTED_AT_ONCE = 16
_VERSION = 3
_GENERATION_BYTES = 8
_SCHEMA = (
    "CREATE TABLE blocks (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, used INTEGER NOT NULL)",
    "CREATE INDEX by_use ON blocks (used)",
    "CREATE TABLE data (id INTEGER PRIMARY KEY, value BLOB NOT NULL)",
    f"PRAGMA user_version = {_VERSION}",
)

# What passes by itself, by SQLite's primary result codes. All else says that the file is damaged.
_READ_ONLY = 8
_PASSING = {
    5: "database is locked",
    6: "database table is locked",
    _READ_ONLY: "attempt to write a readonly database",
    10: "disk I/O error",
    13: "database or disk is full",
    14: "unable to open database file",
}
_MOST_USED = (1 << 63) - 2
_EMPTY_PAGES = 8
"""At least the pages of a file without blocks."""

Value: TypeAlias = "bytes | npt.NDArray[np.uint8]"


class BlockStore(Protocol):
    """Values by key, of bounded bytes. One thread makes all calls; each may raise `OSError`."""

    def keys(self) -> Iterator[bytes]:
        """The keys of this generation, in any order."""
        ...

    def put(self, values: Sequence[tuple[bytes, Value]]) -> list[bytes]:
        """Keeps values. Returns keys that made room: the least recently used ones."""
        ...

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """The values of the leading keys that are there. They count as used."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forgets values."""
        ...

    def clear(self) -> None:
        """Begins another generation: no later process finds what was put before."""
        ...

    def close(self) -> None:
        """Ends the use of the store."""
        ...


def void(folder: Path, scope: bytes) -> None:
    """Ends the generation of a scope: no later process finds what was put. From any thread.

    Final when it returns, after a power loss too. Raises `OSError`.
    """
    try:
        generation_file(folder, scope).unlink(missing_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def generation_file(folder: Path, scope: bytes) -> Path:
    """The random bytes that keys of the scope's generation begin with, in a file of their own.

    While it is missing, nothing that was put can be found.
    """
    return folder / f"{scope.hex()}.generation"


class DiskStore:
    """A `BlockStore` in one file of a folder that belongs to the user alone.

    The file and its journal stay below `max_bytes`, and below what the disk had room for when they
    were opened. Servers may share it; `scope`, 16 bytes, stands for all that values depend on
    besides their keys. Raises `NotUsableError` and `OSError`.
    """

    def __init__(self, folder: Path, max_bytes: int, scope: bytes) -> None:
        PrivateFolder(folder).close()
        self._folder = folder
        self._path = folder / FILE_NAME
        self._max_bytes = max_bytes
        self._scope = scope
        self._touched: list[int] = []
        try:
            self._open()
        except _DamagedFileError:
            self._open()

    def _open(self) -> None:
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        status = os.stat(self._path, follow_symlinks=False)
        check_owner(status, FILE_NAME)
        self._inode = status.st_ino
        try:
            self._db = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, timeout=1
            )
        except sqlite3.Error as error:
            raise OSError(_PASSING[14]) from error
        try:
            with self._errors():
                self._connect()
                self._read_state()
        except BaseException:
            self._db.close()
            raise

    def _connect(self) -> None:
        # What a killed process wrote the system has; a checksum refuses what a power loss tore.
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("PRAGMA journal_mode = TRUNCATE")
        self._db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._db.text_factory = bytes
        with self._transaction():  # Of several processes one makes the tables.
            for statement in _SCHEMA if self._count("user_version") == 0 else ():
                self._db.execute(statement)
        if self._count("user_version") != _VERSION:
            raise sqlite3.DatabaseError("another version")

    def _read_state(self) -> None:
        self._page_bytes = self._count("page_size")
        space, own = os.statvfs(self._folder), self._count("page_count") * self._page_bytes
        most = min(self._max_bytes, own + space.f_bavail * space.f_frsize)
        journal = max(most // 16, 64 * self._page_bytes)
        self._max_pages = max(1, (most - journal) // self._page_bytes)
        self._shrink()
        self._db.execute(f"PRAGMA max_page_count = {self._max_pages}")
        self._read_generation()
        self._next_use()  # A table that cannot be read is noticed before its blocks are listed.

    def _shrink(self) -> None:
        """Gives back what an earlier process with a larger bound has written."""
        if self._count("page_count") > self._max_pages:
            self._make_room(0)
        while self._count("page_count") > self._max_pages:
            with self._transaction():
                before = self._count("page_count")
                self._db.execute(f"PRAGMA incremental_vacuum({_EVICTED_AT_ONCE})").fetchall()
                if self._count("page_count") >= before:
                    raise sqlite3.DatabaseError("its pages cannot be given back")

    def _read_generation(self) -> None:
        path = generation_file(self._folder, self._scope)
        with self._transaction():  # Of several processes one makes the file.
            try:
                generation = path.read_bytes()
            except FileNotFoundError:
                generation = b""
            if len(generation) != _GENERATION_BYTES:
                generation = os.urandom(_GENERATION_BYTES)
                with open(path, "wb", opener=_private) as file:
                    file.write(generation)
        # What every key of the generation begins with.
        self._prefix = self._scope + generation

    def keys(self) -> Iterator[bytes]:
        """See `BlockStore`."""
        first, size = self._prefix, len(self._prefix)
        bounds = (first, first + b"\xff" * 64)
        with self._errors():
            rows = self._db.execute("SELECT key FROM blocks WHERE key BETWEEN ? AND ?", bounds)
            for (key,) in rows:
                yield key[size:]

    def put(self, values: Sequence[tuple[bytes, Value]]) -> list[bytes]:
        """See `BlockStore`."""
        with self._errors():
            self._touch()
            # Of each value the last part has a leaf of its own, or shares it.
            leaf = self._page_bytes - 4
            removed = self._make_room(sum(1 + len(value) // leaf for _, value in values))
            with self._transaction():
                use = self._next_use()
                for key, value in values:
                    self._insert(self._prefix + key, value, use)
        size = len(self._prefix)
        return [key[size:] for key in removed if key.startswith(self._prefix)]

    def _insert(self, key: bytes, value: Value, use: int) -> None:
        inserted = self._db.execute(
            "INSERT OR IGNORE INTO blocks (key, used) VALUES (?, ?)", (key, use)
        )
        if inserted.rowcount:
            row = (inserted.lastrowid, value)
            self._db.execute("INSERT OR REPLACE INTO data (id, value) VALUES (?, ?)", row)

    def _make_room(self, num_pages: int) -> list[bytes]:
        """Removes what was used longest ago, in transactions of its own: these journal little."""
        wanted = num_pages + 2 * _EVICTED_AT_ONCE
        removed: list[bytes] = []
        while self._num_free_pages() < wanted:
            oldest = "SELECT id, key FROM blocks ORDER BY used LIMIT ?"
            rows = self._db.execute(oldest, [_EVICTED_AT_ONCE]).fetchall()
            if not rows:
                self._check_empty()
                raise OSError("the bound leaves no room for a block")
            self._delete([block for block, _ in rows])
            removed += [key for _, key in rows if isinstance(key, bytes)]
        return removed

    def _check_empty(self) -> None:
        """Pages in use that belong to no block will never be free."""
        if self._count("page_count") - self._count("freelist_count") > _EMPTY_PAGES:
            raise sqlite3.DatabaseError("pages of no block")

    def _num_free_pages(self) -> int:
        return self._max_pages - self._count("page_count") + self._count("freelist_count")

    def _count(self, pragma: str) -> int:
        return self._db.execute(f"PRAGMA {pragma}").fetchone()[0]

    def _delete(self, ids: Sequence[int]) -> None:
        with self._transaction():
            for table in ("blocks", "data"):
                self._db.executemany(f"DELETE FROM {table} WHERE id = ?", [(i,) for i in ids])

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """See `BlockStore`."""
        contents: list[bytes] = []
        with self._errors():
            for key in keys:
                # Whatever type a damaged value has, its checksum is what refuses it.
                row = self._db.execute(
                    "SELECT id, CAST(value AS BLOB) FROM blocks JOIN data USING (id) WHERE key = ?",
                    [self._prefix + key],
                ).fetchone()
                if row is None:
                    break
                self._touched.append(row[0])
                contents.append(row[1] or b"")
        return contents

    def _touch(self) -> None:
        """Writes down what was used since: reads need not wait for that."""
        if self._touched:
            use = self._next_use()
            rows = [(use, block) for block in dict.fromkeys(self._touched)]
            self._touched.clear()
            with self._transaction():
                self._db.executemany("UPDATE blocks SET used = ? WHERE id = ?", rows)

    def _next_use(self) -> int:
        (last,) = self._db.execute("SELECT max(used) FROM blocks").fetchone()
        if last is None:
            return 1
        if not isinstance(last, int) or last > _MOST_USED:
            raise sqlite3.DatabaseError("a use that nobody counted")
        return last + 1

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `BlockStore`."""
        with self._errors():
            query = "SELECT id FROM blocks WHERE key = ?"
            rows = (self._db.execute(query, [self._prefix + key]).fetchone() for key in keys)
            self._delete([row[0] for row in rows if row is not None])

    def clear(self) -> None:
        """See `BlockStore`. What was put before goes as its room is needed."""
        self._touched.clear()
        void(self._folder, self._scope)
        with self._errors():
            self._read_generation()

    def close(self) -> None:
        """See `BlockStore`."""
        with self._errors():
            try:
                self._touch()
            finally:
                self._db.close()

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Generator[None, None, None]:
        """SQLite's errors as `OSError`; a damaged file is removed, so that the next one is new."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            # Its own words may quote what lies in the file, which is user data.
            if (reason := self._passing(error)) is not None:
                raise OSError(reason) from None
            self._remove_file()
            kind = getattr(error, "sqlite_errorname", type(error).__name__)
            raise _DamagedFileError(f"{FILE_NAME} is damaged ({kind}) and was removed") from None

    def _passing(self, error: Exception) -> str | None:
        """What passes by itself; None where the file is damaged."""
        code = _result_code(error)
        if code == _READ_ONLY and os.access(self._path, os.W_OK):
            return None  # Its header alone says so.
        return _PASSING.get(code)

    def _remove_file(self) -> None:
        """Closes it for good. Another process may have replaced it already."""
        self._touched.clear()
        self._db.close()
        with suppress(FileNotFoundError):
            if os.stat(self._path, follow_symlinks=False).st_ino == self._inode:
                self._path.unlink()


class _DamagedFileError(OSError):
    """The file was damaged, and is gone."""


def _result_code(error: Exception) -> int:
    """SQLite's primary result code of an error; 0 of what Python raised itself."""
    named = getattr(error, "sqlite_errorcode", None)
    if named is not None:
        return named & 0xFF
    text = str(error)  # Python 3.10 has nothing else.
    return next((code for code, begin in _PASSING.items() if text.startswith(begin)), 0)
