"""Where a slower tier keeps the bytes of blocks: the interface, and SQLite as its first library.

SQLite is in Python's standard library, survives kill -9, locks its file between processes and can
be bounded. It has no checksums of its own: the values bring theirs (`BlockStaging`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
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
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE blocks (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, used INTEGER NOT NULL);
CREATE INDEX by_use ON blocks (used);
CREATE TABLE data (id INTEGER PRIMARY KEY, value BLOB NOT NULL);
PRAGMA user_version = {_VERSION};
COMMIT;
"""

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
        _generation_file(folder, scope).unlink(missing_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _generation_file(folder: Path, scope: bytes) -> Path:
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
        self._db = self._open()
        with self._errors():
            self._read_state()

    def _open(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        except FileExistsError:
            check_owner(os.stat(self._path, follow_symlinks=False), FILE_NAME)
        try:
            return self._connect()
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error
        except sqlite3.DatabaseError:  # It is none, or damaged.
            self._path.unlink()
            return self._open()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=1)
        try:
            # What a killed process wrote the system has; a checksum refuses what a power loss tore.
            db.execute("PRAGMA synchronous = OFF")
            db.execute("PRAGMA journal_mode = TRUNCATE")
            db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                db.executescript(_SCHEMA)
            elif version != _VERSION:
                raise sqlite3.DatabaseError(f"version {version}")
        except BaseException:
            db.close()
            raise
        return db

    def _read_state(self) -> None:
        (self._page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        space, own = os.statvfs(self._folder), self._count("page_count") * self._page_bytes
        most = min(self._max_bytes, own + space.f_bavail * space.f_frsize)
        journal = max(most // 16, 64 * self._page_bytes)
        self._max_pages = max(1, (most - journal) // self._page_bytes)
        self._shrink()
        self._db.execute(f"PRAGMA max_page_count = {self._max_pages}")
        self._read_generation()

    def _shrink(self) -> None:
        """Gives back what an earlier process with a larger bound has written."""
        if self._count("page_count") > self._max_pages:
            self._make_room(0)
        while self._count("page_count") > self._max_pages:
            self._db.execute(f"PRAGMA incremental_vacuum({_EVICTED_AT_ONCE})").fetchall()

    def _read_generation(self) -> None:
        path = _generation_file(self._folder, self._scope)
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
                raise OSError("the bound leaves no room for a block")
            self._delete([block for block, _ in rows])
            removed += [key for _, key in rows]
        return removed

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
        found: list[bytes] = []
        with self._errors():
            for key in keys:
                row = self._db.execute(
                    "SELECT id, value FROM blocks JOIN data USING (id) WHERE key = ?",
                    [self._prefix + key],
                ).fetchone()
                if row is None:
                    break
                self._touched.append(row[0])
                found.append(row[1])
        return found

    def _touch(self) -> None:
        """Writes down what was used since: reads need not wait for that."""
        if self._touched:
            rows = [(self._next_use(), block) for block in dict.fromkeys(self._touched)]
            self._touched.clear()
            with self._transaction():
                self._db.executemany("UPDATE blocks SET used = ? WHERE id = ?", rows)

    def _next_use(self) -> int:
        (last,) = self._db.execute("SELECT max(used) FROM blocks").fetchone()
        return (last or 0) + 1

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
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error
        except sqlite3.Error as error:
            if not isinstance(error, sqlite3.ProgrammingError):
                self._db.close()
                self._path.unlink(missing_ok=True)
            raise OSError(str(error)) from error
