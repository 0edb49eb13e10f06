"""The bits that the CPU's kernels compute, which `KERNEL_REVISION` stands for."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixcache._core import Cpu
from prefixcache.config.engine_config import Activations
from prefixcache.models.hub import resolve_model
from prefixcache.models.quantized import QUANT_FORMATS
from prefixcache.runner.cpu.cpu_runner import KERNEL_REVISION
from prefixcache.runner.cpu.linear import KernelDType
from support.loaded import cpu_model
from support.paged_driver import CpuDriver
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model

# Raise KERNEL_REVISION with a change of these: caches and routers take equal names for equal bits.
REVISION = 1
BITS: dict[tuple[str, KernelDType, Activations], str] = {
    ("portable", "float32", "exact"): "0aaa66d77f4bd983",
    ("portable", "float32", "int8"): "558031e64271490f",
    ("portable", "bfloat16", "exact"): "ee06f841ad68f0b3",
    ("portable", "bfloat16", "int8"): "be2ebace6d219bf3",
    ("avx2", "float32", "exact"): "ed1af43d2fc49bbc",
    ("avx2", "float32", "int8"): "8e93c1aee7ce5933",
    ("avx2", "bfloat16", "exact"): "ee06f841ad68f0b3",
    ("avx2", "bfloat16", "int8"): "be2ebace6d219bf3",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of every format, and dense matrices, of numbers that no processor's functions made."""
    place = tmp_path_factory.mktemp("bits")
    model = make_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    for name, parameter in model.named_parameters():
        numbers = np.arange(parameter.numel(), dtype=np.uint32) + zlib.crc32(name.encode())
        numbers = (numbers * np.uint32(2654435761) >> 8).astype(np.float32) / np.float32(2**23) - 1
        numbers = torch.from_numpy(numbers).view(parameter.shape) / parameter.shape[-1] ** 0.5
        parameter.data = 1 + numbers if parameter.dim() == 1 else numbers
    file = write_gguf(place / "tiny.gguf", model, formats=("F16", *QUANT_FORMATS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFIXCACHE_HOME", str(place / "home"))
        return resolve_model(str(file))


@pytest.mark.parametrize(("form", "dtype", "activations"), BITS)
def test_the_bits_are_those_of_the_revision(
    folder: Path, form: str, dtype: KernelDType, activations: Activations
) -> None:
    if form not in Cpu.available_instructions():
        pytest.skip(f"This processor has no {form}.")
    cpu = Cpu(2, form)
    driver = CpuDriver(cpu_model(folder, dtype, cpu, activations), cpu=cpu)
    logits = driver.forward([(0, 0, [(7 * i * i + 3 * i) % 380 + 3 for i in range(50)])])
    found = hashlib.sha256(logits.numpy().tobytes() + driver.kv_of(0).numpy().tobytes())
    assert found.hexdigest()[:16] == BITS[form, dtype, activations]
    assert KERNEL_REVISION == REVISION
