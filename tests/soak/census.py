"""Whom a server's memory belongs to: mappings, C's allocator, Python's, objects by type.

The server counts itself when a file `FOLDER/census.<number>` asks it to, in a thread of its own,
and answers in `FOLDER/counted.<number>`; so nothing is counted while it has something to do.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ASKED, _TRIMMED, _COUNTED = "census", "trim", "counted"
_POLL_SECONDS = 0.25
_MOST_TYPES = 40
_FIELD = re.compile(r"^(Rss|AnonHugePages):\s+(\d+) kB")
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)$")
# Mappings that are named one by one; smaller ones are summed.
_LARGE_BYTES = 16 * 2**20
# What glibc aligns the arenas of threads to.
_ARENA_BYTES = 64 * 2**20

Census = dict[str, Any]


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, summed over its arenas; bytes but for the counts."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def census_of_process(pid: int) -> Census:
    """Resident bytes by mapping, as the kernel has them."""
    resident: Counter[str] = Counter()
    huge: Counter[str] = Counter()
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := _MAPPING.match(line):
            name = _kind_of(mapping)
        elif field := _FIELD.match(line):
            (resident if field[1] == "Rss" else huge)[name] += 1024 * int(field[2])
    return {
        "resident": {name: size for name, size in resident.items() if size},
        "huge": {name: size for name, size in huge.items() if size},
    }


def _kind_of(mapping: re.Match[str]) -> str:
    """Files together; arenas of C's allocator and other large anonymous mappings by address."""
    if mapping[3].startswith("["):
        return mapping[3]
    if mapping[3]:
        return "files"
    begin, end = int(mapping[1], 16), int(mapping[2], 16)
    if begin % _ARENA_BYTES == 0:
        return f"arena {mapping[1]}"
    return f"anonymous to {mapping[2]}" if end - begin >= _LARGE_BYTES else "anonymous, small"


def ask_census(folder: Path, number: int, *, trim: bool = False) -> Path:
    """Asks a server, which may give free memory back first; the file that its answer comes in."""
    (folder / f"{_TRIMMED if trim else _ASKED}.{number}").touch()
    return folder / f"{_COUNTED}.{number}"


def serve_census(folder: Path) -> None:
    """In the server: counts whenever it is asked to, from now on."""
    threading.Thread(target=_serve, args=(folder,), name="census", daemon=True).start()


def _serve(folder: Path) -> None:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    while True:
        time.sleep(_POLL_SECONDS)
        for file in [*folder.glob(f"{_ASKED}.*"), *folder.glob(f"{_TRIMMED}.*")]:
            if file.name.startswith(_TRIMMED):
                gc.collect()
                libc.malloc_trim(0)
            answer = folder / f"{_COUNTED}{file.suffix}"
            hidden = answer.with_suffix(".new")
            hidden.write_text(json.dumps(_census(libc)))
            file.unlink()
            hidden.rename(answer)


def _census(libc: ctypes.CDLL) -> Census:
    info = libc.mallinfo2()
    objects = gc.get_objects()
    types = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in objects)
    return {
        "malloc": {name: getattr(info, name) for name, _ in _MallInfo._fields_},
        "python": {
            "blocks": sys.getallocatedblocks(),
            "objects": len(objects),
            **_pymalloc(),
        },
        "types": dict(types.most_common(_MOST_TYPES)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def _pymalloc() -> dict[str, int]:
    """What Python's allocator says of itself, which it says to stderr alone."""
    with tempfile.TemporaryFile() as file:
        with _stderr_to(file.fileno()):
            sys._debugmallocstats()
        file.seek(0)
        text = file.read().decode(errors="replace")
    found: dict[str, int] = {}
    for name, pattern in (
        ("arenas", r"# arenas allocated current\s+=\s+([\d,]+)"),
        ("bytes_in_blocks", r"# bytes in allocated blocks\s+=\s+([\d,]+)"),
        ("bytes_free", r"# bytes in available blocks\s+=\s+([\d,]+)"),
        ("pools_free", r"(\d[\d,]*) unused pools \*"),
    ):
        if match := re.search(pattern, text):
            found[name] = int(match[1].replace(",", ""))
    return found


@contextmanager
def _stderr_to(target: int) -> Iterator[None]:
    kept = os.dup(2)
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
