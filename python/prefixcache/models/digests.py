"""Digests of files and of parts of them, remembered until a file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from prefixcache._core import derive_digest, hash_file_ranges
from prefixcache.config.checked import is_object
from prefixcache.config.home import cache_home

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
_PART = 16 << 20
# File systems tell times this exactly at least; two writes within it may have the same one.
_CLOCK_TICK_NS = 20_000_000

FileState = list[Any]
"""What changes when a file does: its path, size, inode, and times of its content and its inode."""


def file_digest(file: Path, kind: Literal["blake3", "sha256"] = "blake3") -> str:
    """The digest of the file's content, read only if it changed since it was last asked for.

    `kind` is sha256, which one thread computes, or blake3: of the BLAKE3 of each 16 MiB, by all
    processors. What is remembered is a small file for each path under `cache_home()`; a broken one
    counts as none, and where it cannot be written nothing is remembered. Raises `OSError` when the
    file cannot be read.
    """
    state = file_state(file)
    note = _note(file, kind)
    digest = _known(note, state)
    if isinstance(digest, str):
        return digest
    _wait_for_the_clock(file)
    digest = compute_sha256(file) if kind == "sha256" else compute_blake3(file)
    _remember(note, file, state, digest)
    return digest


def range_digests(file: Path, ranges: Sequence[tuple[int, int]], threads: int = 1) -> list[str]:
    """BLAKE3 of each range of bytes, (start, end), in hexadecimal; remembered as `file_digest` is.

    Raises `OSError` when the file cannot be read, or ends within a range.
    """
    digests = remembered_digests(file, ranges)
    if digests is None:
        state = file_state(file)
        _wait_for_the_clock(file)
        digests = [digest.hex() for digest in hash_file_ranges(file, ranges, threads)]
        _remember(
            _note(file, "ranges"), file, state, dict(zip(_keys(ranges), digests, strict=True))
        )
    return digests


def remembered_digests(file: Path, ranges: Sequence[tuple[int, int]]) -> list[str] | None:
    """`range_digests` of a file that has not changed since; None where it would be read.

    Raises `OSError`.
    """
    noted = _known(_note(file, "ranges"), file_state(file))
    keys = _keys(ranges)
    if not (is_object(noted) and all(isinstance(noted.get(key), str) for key in keys)):
        return None
    return [noted[key] for key in keys]


def _keys(ranges: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{start}-{end}" for start, end in ranges]


def file_state(file: Path) -> FileState:
    """Differs if the file was changed. Raises `OSError`."""
    stat = file.stat()
    return [str(file), stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _note(file: Path, kind: str) -> Path:
    name = hashlib.sha256(os.fsencode(file)).hexdigest()[:32]
    return cache_home() / "digests" / f"{name}-{kind}.json"


def _known(note: Path, state: FileState) -> Any:
    """What the note says of a file in this state; None where it says nothing."""
    try:
        content = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return None
    is_current = is_object(content) and content.get("state") == state
    return content.get("digest") if is_current else None


def _remember(note: Path, file: Path, state: FileState, digest: Any) -> None:
    if file_state(file) == state:
        _write_note(note, {"state": state, "digest": digest})


def _write_note(note: Path, content: dict[str, Any]) -> None:
    """Replaces the note as a whole, also if several processes do so at once."""
    new = note.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(content))
        new.replace(note)
    except OSError as error:
        logger.warning("Cannot remember the digest of %s: %s", content["state"][0], error)
        with suppress(OSError):
            new.unlink()


def _wait_for_the_clock(file: Path) -> None:
    """A file changed just now might change again without another time of change."""
    stat = file.stat()
    age = time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns)
    if 0 <= age < _CLOCK_TICK_NS:
        time.sleep((_CLOCK_TICK_NS - age) / 1e9)


def compute_blake3(file: Path) -> str:
    """`file_digest` of the file, all of which it reads. Raises `OSError`."""
    size = file.stat().st_size
    parts = [(start, min(start + _PART, size)) for start in range(0, size, _PART)]
    digests = hash_file_ranges(file, parts, len(os.sched_getaffinity(0)))
    return derive_digest("prefixcache file v1", b"".join(digests)).hex()


def compute_sha256(file: Path) -> str:
    """The digest of the file's content, all of which it reads. Raises `OSError`."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
