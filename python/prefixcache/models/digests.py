"""The sha256 of files, remembered as long as a file keeps its size and its time of change."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefixcache.models.home import cache_home

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
# File systems tell times this exactly at least; two writes within it may have the same one.
_CLOCK_TICK_NS = 20_000_000


def file_sha256(file: Path) -> str:
    """The digest of the file's content, read only if it changed since it was last asked for.

    What is remembered is a small file for each path under `cache_home()`; a broken one counts as
    none, and where it cannot be written nothing is remembered. Raises `OSError` when the file
    cannot be read.
    """
    state = _state(file)
    note = _note(file)
    known = _read_note(note)
    if known.get("state") == state and isinstance(known.get("sha256"), str):
        return known["sha256"]
    _wait_for_the_clock(file)
    digest = compute_sha256(file)
    if _state(file) == state:
        _write_note(note, {"state": state, "sha256": digest})
    return digest


def _state(file: Path) -> list[Any]:
    stat = file.stat()
    return [str(file), stat.st_size, stat.st_mtime_ns]


def _note(file: Path) -> Path:
    name = hashlib.sha256(os.fsencode(file)).hexdigest()[:32]
    return cache_home() / "digests" / f"{name}.json"


def _read_note(note: Path) -> dict[str, Any]:
    try:
        content = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_note(note: Path, content: dict[str, Any]) -> None:
    """Replaces the note as a whole, whoever else does so at once."""
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
    age = time.time_ns() - file.stat().st_mtime_ns
    if 0 <= age < _CLOCK_TICK_NS:
        time.sleep((_CLOCK_TICK_NS - age) / 1e9)


def compute_sha256(file: Path) -> str:
    """The digest of the file's content, all of which it reads. Raises `OSError`."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
