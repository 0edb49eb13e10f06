"""The server as its users start it, in a process of its own environment."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = os.environ.get("PREFIXCACHE_PYTHON", str(ROOT / ".venv/bin/python"))
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """Of a server that this starts, or of one that runs."""
    if "PREFIXCACHE_ADDRESS" in os.environ:
        yield os.environ["PREFIXCACHE_ADDRESS"]
        return
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = [MODEL, "--max-model-len", "4096", "--kv-cache-memory", "512MiB"]
    with started(arguments, log) as address:
        yield address


@contextmanager
def started(arguments: list[str], log: Path) -> Generator[str, None, None]:
    """A server on a free port; its address."""
    command = [SERVER, "-m", "prefixcache", "serve", *arguments, "--port", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield _address(process, log)
        assert process.poll() is None, log.read_text()
        # Hypothesis draws short strings of tests, so logged paths may hold its first word.
        assert "Traceback (most recent call last)" not in log.read_text(), log.read_text()
    finally:
        process.kill()
        process.communicate()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"curl (http://127\.0\.0\.1:\d+)", line):
            return found[1]
    raise AssertionError(log.read_text())
