"""`prefixcache serve` on a GPU, with `prefixcache verify` as its client: all of a request's way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from support.server_process import PREFIXCACHE, server_process

SERVE = ("serve", "--device", "cuda", "--dtype", "bfloat16", "--port", "0", "--num-blocks", "4000")
FLAGS = {
    "default": (),
    "eager": ("--enforce-eager",),
    "guesses": ("--speculate", "prompt"),
    "fastest": ("--no-batch-invariant",),
}
CHAT = {"messages": [{"role": "user", "content": "Which river flows through Paris? " * 20}]}


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Heads of 128, whose kernels are prebuilt; room for what `verify` asks."""
    return tiny_checkpoint("qwen3", head_dim=128, max_position_embeddings=8192)


@pytest.mark.parametrize("flags", FLAGS)
def test_the_server_answers_and_its_cache_changes_nothing(
    model: Path, flags: str, device: torch.device, tmp_path: Path
) -> None:
    promised = flags != "fastest" and torch.cuda.get_device_capability(device)[0] == 9
    command = [*PREFIXCACHE, *SERVE, "--model", model, *FLAGS[flags]]
    with server_process(command, tmp_path / "log") as server:
        with httpx.Client(base_url=server.address, timeout=240) as client:
            first, second = (_chat(client) for _ in range(2))
            assert first["choices"][0]["message"]["content"]
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
        report = tmp_path / "report.json"
        asked = ["--num-questions", "4", "--prompt-words", "200", "--output", report]
        verify = [*PREFIXCACHE, "verify", server.address, *asked]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        # 1: an answer changed; 2: nothing hit.
        assert done.returncode in ((0,) if promised else (0, 1)), done.stdout + done.stderr
        rounds = json.loads(report.read_text())["rounds"]
        assert sum(answer["hit"] for one in rounds for answer in one["answers"]) >= 4


def _chat(client: httpx.Client) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 24, "temperature": 0})
    assert answer.status_code == 200, answer.text
    return answer.json()
