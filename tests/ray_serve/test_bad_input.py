"""What is wrong before replicas start is reported with its option, in time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def _error(*flags: str, **environment: str) -> str:
    command = [sys.executable, "-m", "prefixcache", "serve-ray", *flags]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, **environment},
    )
    assert ended.returncode != 0
    return ended.stderr


def test_a_cluster_that_is_not_there_is_reported(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        # Ray's own wait for one answer, which is longer.
        error = _error(
            str(model), "--port", "0", "--address", address, RAY_py_gcs_connect_timeout_s="1"
        )
    assert f"error: --address {address} is no Ray cluster" in error


def test_a_port_in_use_is_reported(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        error = _error(str(model), "--port", port)
    assert f"127.0.0.1:{port}" in error
    assert "--port takes another port" in error
    assert "Started a local Ray" not in error
