"""The step that shows whether a device still computes: it touches nothing that requests own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prefixcache.runner.torch.attention.torch_attention import TorchAttention
from prefixcache.runner.torch.decoder_model import DecoderModel
from support.kernel_attention import KernelAttention
from support.loaded import torch_model
from support.paged_models import MakeAttention, PagedServer

PROMPTS = [list(range(5, 5 + length)) for length in (3, 14, 9)]


@pytest.fixture(params=["smollm2", "qwen3-window"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> DecoderModel:
    folder = tiny_checkpoint(request.param)
    return torch_model(folder)


@pytest.mark.parametrize("attention", [TorchAttention, KernelAttention])
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
