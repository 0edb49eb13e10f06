"""No argument of any kind crashes the core, or makes it raise what it does not say it raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "hostile_arguments.py"
CASES = 100


def test_hostile_arguments(seed: int) -> None:
    command = [sys.executable, "-X", "faulthandler", str(PROGRAM), str(seed), str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    case = done.stdout.rpartition("\n")[0].rpartition("\n")[2]
    repeat = f"python {PROGRAM} {case} 1"
    assert done.returncode == 0, f"{repeat}\n{done.stderr[-8000:]}"
    assert "panicked" not in done.stderr, f"{repeat}\n{done.stderr[-8000:]}"
