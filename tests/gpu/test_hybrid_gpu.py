"""A tiny Gemma 3, whose layers have windows and full attention, answers on a GPU.

FlashInfer compiles the kernels of a window first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.jit

SCRIPT = Path(__file__).with_name("hybrid_answers.py")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_neither_a_hit_nor_a_chunk_changes_a_bit_of_an_answer(
    tiny_checkpoint: Callable[..., Path],
    enforce_eager: bool,
    device: torch.device,
) -> None:
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper device")
    model = tiny_checkpoint(
        "gemma3", head_dim=128, sliding_window=100, max_position_embeddings=2048
    )
    options = {
        "model": str(model),
        "dtype": "bfloat16",
        "device": "cuda",
        "num_blocks": 900,
        "batch_invariant": True,
        "enforce_eager": enforce_eager,
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2 * 592
