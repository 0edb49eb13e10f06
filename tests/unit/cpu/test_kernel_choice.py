"""Which kernels compute on a CPU: the promise asks for ours, without it the fastest are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from prefixcache._core import Cpu
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine import runners
from prefixcache.engine.build import build
from prefixcache.engine.runners import choose_runner
from prefixcache.exceptions import ConfigError
from prefixcache.kv.specs import kv_layout
from prefixcache.runner.cpu.cpu_runner import CpuRunner
from prefixcache.runner.cpu.model import attention_kernels
from prefixcache.runner.torch.torch_runner import TorchRunner


@pytest.mark.parametrize(
    ("flags", "amx", "expected"),
    [
        ({}, True, CpuRunner),
        ({"batch_invariant": False}, False, CpuRunner),
        ({"batch_invariant": False}, True, TorchRunner),
        ({"batch_invariant": False, "attention": "cpu"}, True, CpuRunner),
        ({"batch_invariant": False, "cpu_activations": "int8"}, True, CpuRunner),
        ({"attention": "torch"}, False, TorchRunner),
    ],
)
def test_the_fastest_that_keep_what_was_promised(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], amx: bool, expected: type
) -> None:
    monkeypatch.setattr(runners, "_has_amx", lambda: amx)
    runner = choose_runner(EngineConfig.from_flags(device="cpu", **flags))
    assert type(runner) is expected


@pytest.mark.parametrize(
    ("flags", "extra"),
    [({"device": "cuda"}, "cuda"), ({"device": "cpu", "attention": "torch"}, "torch")],
)
def test_what_lacks_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], extra: str
) -> None:
    monkeypatch.setattr(runners, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install '\.\[{extra}\]'"):
        choose_runner(EngineConfig.from_flags(**flags))


def test_a_driver_without_torch_is_mentioned_and_the_cpu_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(runners, "find_spec", lambda name: None)
    assert type(choose_runner(EngineConfig())) is CpuRunner
    assert "'.[cuda]'" in caplog.text


def test_what_is_asked_for_and_not_kept_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig.from_flags(
        model=str(tiny_checkpoint()),
        num_blocks=32,
        device="cpu",
        attention="torch",
        batch_invariant=True,
    )
    with pytest.raises(ConfigError, match="batch_invariant cannot be kept on cpu by attention tor"):
        build(config)
    unsaid = dataclasses.replace(config, batch_invariant=None)
    assert not build(unsaid).batch_invariant


@pytest.mark.parametrize(("head_dim", "is_refused"), [(24, True), (512, False), (528, True)])
def test_heads_that_the_kernel_cannot_compute_are_refused_with_a_way_out(
    tiny_checkpoint: Callable[..., Path], head_dim: int, is_refused: bool
) -> None:
    config = dataclasses.replace(ModelConfig.from_hf(tiny_checkpoint()), head_dim=head_dim)
    refusal = (
        pytest.raises(ConfigError, match="--attention torch can") if is_refused else nullcontext()
    )
    with refusal:
        attention_kernels(config, kv_layout(config), Cpu(1), "float32")
