"""The tests of `tests/gpu` start on a machine that has pytest and no plugin of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_RUN = """
import sys
for absent in ("hypothesis", "pytest_asyncio", "pytest_timeout", "xdist"):
    sys.modules[absent] = None
import pytest
status = pytest.main(["tests/gpu", "-q", "-p", "no:cacheprovider", "-m", "not jit"])
prebuilt = [
    case.values[0]
    for case in sys.modules["test_flashinfer_gpu"].CASES
    if pytest.mark.jit not in case.marks
]
assert prebuilt
assert all(s.head_dim == 128 and s.sliding_window is s.softcap is None for s in prebuilt)
sys.exit(status)
"""


def test_they_start_without_plugins_and_leave_compiled_shapes_for_last() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" in done.stdout
    assert "error" not in done.stdout
