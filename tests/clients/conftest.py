"""The server as its users start it, in a process of its own environment."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.server_process import server_process

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
    with server_process(command, log) as server:
        yield server.address
        assert server.process.poll() is None, log.read_text()
