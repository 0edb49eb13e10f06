"""Three replicas under Ray Serve as users start them, and one server to compare with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cluster import Cluster

from support.tiny_models import make_checkpoint

FLAGS = ("--served-model-name", "tiny", "--num-blocks", "160", "--dtype", "float32")
# What Ray says of a node or a proxy that had too little time, as on a busy machine.
TOO_SLOW = (
    "timed out during startup",
    "it was cancelled before it started running",
    "HTTP proxies not available",
)
# A proxy that is not ready after three such times is ended.
MORE_TIME = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "19"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    return make_checkpoint(folder, seed=1, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def one_server(model: Path) -> Generator[str, None, None]:
    with started("serve", str(model), *FLAGS) as (_, address):
        yield address


@pytest.fixture(scope="session")
def cluster(model: Path) -> Generator[Cluster, None, None]:
    flags = ("--num-replicas", "3", "--replica-cpus", "0.1", *FLAGS)
    with started("serve-ray", str(model), *flags) as (process, address):
        yield Cluster(address, process.pid)


@pytest.fixture
def scaling(model: Path) -> Generator[Cluster, None, None]:
    """One to three replicas, by the requests that run."""
    flags = ("--max-replicas", "3", "--target-ongoing-requests", "2", "--replica-cpus", "0.1")
    program = [str(Path(__file__).with_name("scaling_server.py"))]
    with started("serve-ray", str(model), *flags, *FLAGS, program=program) as (process, address):
        yield Cluster(address, process.pid)


@contextmanager
def started(
    command: str, *flags: str, program: Sequence[str] = ("-m", "prefixcache")
) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """A server on a free port of loopback, in a process group of its own, and its address."""
    # Ray's sockets have paths of at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="pc", dir="/tmp") as folder:
        log = Path(folder) / "log"
        for tries_left in reversed(range(4)):
            process = _started([sys.executable, *program, command, *flags, "--port", "0"], log)
            address = _address(process)
            is_too_slow = address is None and any(text in log.read_text() for text in TOO_SLOW)
            if not (is_too_slow and tries_left):
                break
            _end(process)
        try:
            assert address is not None, log.read_text()
            yield process, address
        finally:
            _end(process)


def _started(command: Sequence[str], log: Path) -> subprocess.Popen[str]:
    with log.open("w") as stderr:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **MORE_TIME, "RAY_TMPDIR": str(log.parent)},
            start_new_session=True,
        )


def _address(process: subprocess.Popen[str]) -> str | None:
    """Where it serves; None if it has ended before."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"is ready after .* (http://[\w.]+:\d+)", line):
            return found[1]
    return None


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
