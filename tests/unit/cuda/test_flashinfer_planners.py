"""Our plans through FlashInfer's own compiled planners, where those are: they need no GPU.

`benches/gpu/run.py --jit` packs them, FlashInfer's ahead-of-time build makes them.
"""

from __future__ import annotations

import os
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


@pytest.mark.skipif(
    libraries(KERNELS).keys() != ENDINGS.keys() or shutil.which("cc") is None,
    reason="needs FlashInfer's compiled kernels, heads of 128 in bfloat16, as <uri>/<uri>.so in "
    f"{KERNELS} or in the folder PREFIXCACHE_FLASHINFER_KERNELS, and a C compiler",
)
def test_the_compiled_planners_take_our_plans_and_write_all_that_graphs_read(
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
