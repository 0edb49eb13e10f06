"""Which kernels compute on a CPU: the promise asks for ours, without it the fastest are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixcache._core import Cpu
from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.build import build
from prefixcache.exceptions import ConfigError
from prefixcache.runner.cuda.attention.base import AttentionGroup, AttentionSpec
from prefixcache.runner.cuda.attention.registry import AttentionOptions, make_attention


@pytest.mark.parametrize(
    ("flags", "amx", "expected"),
    [
        ({}, True, ("cpu", True)),
        ({"batch_invariant": False}, False, ("cpu", False)),
        ({"batch_invariant": False}, True, ("torch", False)),
        ({"batch_invariant": False, "attention": "torch"}, False, ("torch", False)),
    ],
)
def test_the_fastest_that_keep_what_was_promised(
    tiny_checkpoint, monkeypatch, flags, amx, expected
):
    monkeypatch.setattr("prefixcache.runner.cuda.torch_runner.torch_is_faster", lambda: amx)
    config = EngineConfig.from_flags(
        model=str(tiny_checkpoint()), num_blocks=32, device="cpu", **flags
    )
    built = build(config)
    assert (built.engine._runner.steps._attention.name, built.batch_invariant) == expected
    ours = built.engine._runner.steps._model.loaded._stack is not None
    assert ours == (expected[0] == "cpu")


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


@pytest.mark.parametrize(("head_dim", "expected"), [(24, "torch"), (512, "cpu"), (528, "torch")])
def test_heads_that_our_kernel_cannot_compute_go_to_torch_where_nothing_is_promised(
    head_dim: int, expected: str
) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=head_dim, scale=1.0)
    options = AttentionOptions(cpu=Cpu(1), batch_invariant=False)
    assert make_attention("auto", [AttentionGroup(spec, (0,))], options).name == expected
