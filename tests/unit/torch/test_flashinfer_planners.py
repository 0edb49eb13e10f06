"""Our plans through FlashInfer's own compiled planners, where those are: they need no GPU.

`benches/gpu/run.py --jit` packs them, FlashInfer's ahead-of-time build makes them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flashinfer")

from flashinfer.jit import env

from compiled_planners import ENDINGS, libraries

TESTS = Path(__file__).parents[2]
KERNELS = Path(os.environ.get("PREFIXCACHE_FLASHINFER_KERNELS", env.FLASHINFER_AOT_DIR))


def test_the_kernels_of_the_invariant_mode_are_those_that_were_read() -> None:
    """Equal in 0.6.14 to 0.6.18.post1. Where they differ, read what a row's tiles depend on."""
    headers = env.FLASHINFER_INCLUDE_DIR / "flashinfer/attention"
    scheduler = (headers / "scheduler.cuh").read_text()
    (planner,) = re.findall(
        r"^inline cudaError_t PrefillSM90Plan.*?^}", scheduler, re.MULTILINE | re.DOTALL
    )
    kernels = "".join(file.read_text() for file in sorted((headers / "hopper").glob("*.cuh")))
    assert hashlib.sha256(f"{planner}{kernels}".encode()).hexdigest()[:16] == "4ae64d4053413e86"


@pytest.mark.skipif(
    libraries(KERNELS).keys() != ENDINGS.keys() or shutil.which("cc") is None,
    reason="needs FlashInfer's compiled kernels, heads of 128 in bfloat16, as <uri>/<uri>.so in "
    f"{KERNELS} or in the folder PREFIXCACHE_FLASHINFER_KERNELS, and a C compiler",
)
def test_the_compiled_planners_take_our_plans_and_tile_a_row_alone_as_with_others(
    tmp_path: Path, seed: int
) -> None:
    stand_in = tmp_path / "stand_in.so"
    source = TESTS / "compiled_planners.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", stand_in, source], check=True)
    done = subprocess.run(
        [sys.executable, TESTS / "compiled_planners.py", KERNELS, str(seed)],
        env=os.environ | {"LD_PRELOAD": str(stand_in), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 1000
