"""What tests of each engine's tier do alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def line_of_killed(script: Path, folder: Path, begin: str, **environment: str) -> str:
    """Runs `python SCRIPT FOLDER` until it prints a line that begins so, and kills it; the line."""
    process = subprocess.Popen(
        [sys.executable, script, folder],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith(begin))
        process.kill()
    return line


def check_folders(root: Path, start: Callable[[], Any]) -> None:
    """Only folders of ranks are made in `root`, and one that others may open is refused."""
    start().close()
    (folder,) = root.iterdir()
    assert (folder / "weights.json").is_file()
    folder.chmod(0o777)
    with pytest.raises(OSError, match="can be opened by other users"):
        start()


def check_numbers(start: Callable[..., Any]) -> None:
    """An option that is no number is named, and nothing keeps the folder."""
    for option in ("max_bytes", "deadline_s"):
        with pytest.raises(ValueError, match=f'"{option}" must be .*, not .9 GB'):
            start(**{option: "9 GB"})
    start()
