"""The fused kernels compile for a Hopper device, on any machine: triton's compiler needs no GPU.

The interpreter of `test_triton_kernels` runs a kernel's Python as it stands; the compiler takes
less of the language. Another release of triton is tried with

    pip install --target FOLDER triton==3.6.0
    PYTHONPATH=FOLDER pytest tests/unit/torch/test_triton_compile.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from prefixcache.runner.torch.ops import triton_kernels as fused  # noqa: E402

_HOPPER = GPUTarget("cuda", 90, 32)


class _NoDevice:
    """What triton asks its driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _HOPPER


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _heads() -> Tensor:
    """Queries and keys in the fused projection of a model with 28 and 4 heads of 128."""
    return _bf16(3, 36, 128)[:, :32]


def _angles() -> tuple[Tensor, Tensor]:
    return torch.empty(3, 1, 64), torch.empty(3, 1, 64)


CALLS: dict[str, Callable[[], Any]] = {
    "norm": lambda: fused.rms_norm(_bf16(3, 3584), _bf16(3584), 1e-6),
    "norm of heads": lambda: fused.rms_norm(_heads(), _bf16(32, 128), 1e-6),
    "norm with an offset": lambda: fused.rms_norm(_bf16(3, 2560), _bf16(2560), 1e-6, offset=1.0),
    "gate": lambda: fused.silu_and_mul(_bf16(3, 2 * 18944)),
    "gate with GELU": lambda: fused.gelu_tanh_and_mul(_bf16(3, 2 * 10240)),
    "race": lambda: fused.race(
        torch.empty(2, 152064),
        torch.empty(2),
        torch.empty(2, dtype=torch.int64),
        torch.empty(2, dtype=torch.int64),
    ),
    "rotation": lambda: fused.apply_rope(_heads(), *_angles()),
    "rotation and append of heads of 256": lambda: fused.rotate_and_append(
        _bf16(3, 16, 256)[:, :12],
        _bf16(3, 16, 256)[:, 12:],
        (torch.empty(3, 1, 128), torch.empty(3, 1, 128)),
        torch.empty(3, dtype=torch.int32),
        _bf16(5, 2, 16, 4, 256),
    ),
    "rotation and append": lambda: fused.rotate_and_append(
        _heads(),
        _bf16(3, 36, 128)[:, 32:],
        _angles(),
        torch.empty(3, dtype=torch.int32),
        _bf16(5, 2, 16, 4, 128),
    ),
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Kernels that were launched: compiled as for a launch, and not run."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, warmup=True, **kwargs))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", _NoDevice())
    return kernels


def test_every_kernel_compiles_and_adds_as_the_plain_ops_do(compiled: list[Any]) -> None:
    """Fused multiplications and additions would round once where the plain forms round twice."""
    for call in CALLS.values():
        call()
    assert len(compiled) == len(CALLS)
    for kernel in compiled:
        assert kernel.asm["cubin"]
        assert "fma.rn.f32" not in kernel.asm["ptx"]
    kernels = {
        name
        for name, value in vars(fused).items()
        if isinstance(value, JITFunction) and value.fn.__annotations__["return"] == "None"
    } - {"_wait_for_inputs"}
    assert {kernel.name for kernel in compiled} == kernels


@pytest.mark.slow
def test_kernels_that_are_launched_early_wait_for_the_one_before(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_has_pdl", lambda _device: True)
    for call in CALLS.values():
        call()
    assert compiled
    for kernel in compiled:
        assert kernel.metadata.launch_pdl
        begun, loads = kernel.asm["ptx"].split("griddepcontrol.wait", maxsplit=1)
        assert "ld.global" not in begun
        assert "ld.global" in loads


@pytest.mark.parametrize(("major", "early"), [(8, False), (9, True), (10, True)])
def test_kernels_are_launched_early_from_hopper_on(
    major: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))
    assert fused._has_pdl.__wrapped__(torch.device("cuda")) is early
