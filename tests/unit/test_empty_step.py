"""The step that shows whether a device still computes: it touches nothing that requests own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paged_models import CPU, MakeAttention, PagedServer
from prefixcache._core import Cpu
from prefixcache.attention.base import AttentionSpec
from prefixcache.attention.cpu import CpuAttention
from prefixcache.attention.torch_attention import TorchAttention
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.decoder import DecoderModel
from prefixcache.models.loader import load_model

PROMPTS = [list(range(5, 5 + length)) for length in (3, 14, 9)]


def kernel_attention(spec: AttentionSpec) -> CpuAttention:
    return CpuAttention(spec, Cpu(1), torch.float32)


@pytest.fixture(params=["smollm2", "qwen3-window"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> DecoderModel:
    folder = tiny_checkpoint(request.param)
    return load_model(ModelConfig.from_hf(folder), folder, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("attention", [TorchAttention, kernel_attention])
def test_empty_steps_change_no_answer(model: DecoderModel, attention: MakeAttention) -> None:
    expected = PagedServer(model, attention).generate(PROMPTS)
    server = PagedServer(model, attention)
    step, num_empty = server.step, 0

    def step_and_empty_step() -> None:
        nonlocal num_empty
        step()
        server.runner.run_empty_step()
        num_empty += 1

    server.step = step_and_empty_step  # type: ignore[method-assign]
    assert server.generate(PROMPTS) == expected
    assert num_empty > 5


def test_a_device_that_does_not_compute_is_noticed(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = PagedServer(model)

    def lost(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(model, "compute_logits", lost)
    with pytest.raises(RuntimeError, match="device lost"):
        server.runner.run_empty_step()
