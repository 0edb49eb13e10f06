"""Which runner computes: the CPU's own, or that on torch."""

from __future__ import annotations

import ctypes
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefixcache.config.engine_config import EngineConfig
from prefixcache.exceptions import FieldError, how_to_install
from prefixcache.runner.base import Runner
from prefixcache.runner.cpu.cpu_runner import CpuRunner

logger = logging.getLogger(__name__)

_CPU_FLAGS = Path("/proc/cpuinfo")


def choose_runner(config: EngineConfig) -> Runner[Any]:
    """The runner for the device and the attention that are asked for.

    Torch is imported where it computes alone. Raises `FieldError` where that lacks it.
    """
    if not needs_torch(config):
        return CpuRunner(config)
    if find_spec("torch") is None:
        extra = "torch" if config.device == "cpu" else "cuda"
        raise FieldError(
            "device",
            f"{config.device} with attention {config.attention} needs torch: "
            f"{how_to_install(extra)}.",
        )
    from prefixcache.runner.torch.torch_runner import TorchRunner

    return TorchRunner(config)


def needs_torch(config: EngineConfig) -> bool:
    """Whether torch is to compute: on a GPU, or where it was asked for or is faster."""
    if config.device == "cuda" or (config.device == "auto" and _has_cuda()):
        return True
    if config.attention == "auto":
        return _torch_is_faster(config)
    return config.attention != "cpu"


def _has_cuda() -> bool:
    """Whether there is a GPU that torch can use."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    if find_spec("torch") is None:
        logger.warning(
            "There is a CUDA driver, but no torch: computing on the CPU. For the GPU, %s.",
            how_to_install("cuda"),
        )
        return False
    import torch

    return torch.cuda.is_available()


def _torch_is_faster(config: EngineConfig) -> bool:
    """With AMX, where the batch may change an answer's bits."""
    may_differ = not config.keeps_batch_invariant and config.activations == "exact"
    may_differ = may_differ and config.cache.kv_cache_dtype != "int8"
    return may_differ and _has_amx() and find_spec("torch") is not None


def _has_amx() -> bool:
    try:
        return "amx_tile" in _CPU_FLAGS.read_text()
    except OSError:
        return False
