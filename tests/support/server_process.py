"""A server in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIXCACHE = (sys.executable, "-m", "prefixcache")


@dataclass
class ServerProcess:
    """`example` is the command that the server shows to try it with, below `start_lines`."""

    process: subprocess.Popen[str]
    address: str
    example: str
    start_lines: str

    def end(self) -> int:
        return self.process.wait(timeout=240)


@contextmanager
def server_process(
    command: Sequence[str | Path], log: Path, **options: Any
) -> Generator[ServerProcess, None, None]:
    """Starts `command`, a server on a free loopback port; what it logs goes into a file.

    Here and below nothing but the standard library is imported: clients' tests have no more.
    """
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, **options
        )
    try:
        yield _ready(process, log)
        # Hypothesis draws short strings of tests, so logged paths may hold its first word.
        assert "Traceback (most recent call last)" not in log.read_text()
    finally:
        process.kill()
        process.communicate()


def _ready(process: subprocess.Popen[str], log: Path) -> ServerProcess:
    assert process.stdout is not None
    start_lines = ""
    for line in process.stdout:
        found = re.search(r"curl (http://127\.0\.0\.1:\d+)", line)
        if found:
            return ServerProcess(process, found[1], line.strip(), start_lines)
        start_lines += line
    raise AssertionError(f"the server ended before it was ready:\n{log.read_text()}")
