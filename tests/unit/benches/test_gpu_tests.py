"""The tests of `tests/gpu` start on a machine that has pytest and no plugin of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
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


def test_the_check_of_a_hybrid_model_runs_on_a_cpu_too(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    model = tiny_checkpoint("gemma3", sliding_window=100, max_position_embeddings=2048)
    options = {"model": str(model), "device": "cpu", "num_blocks": 900}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "gpu" / "hybrid_answers.py", json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2 * 592
