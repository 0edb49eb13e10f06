"""How the ops run on a CUDA device, and how its matmuls are pinned down."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from prefixcache.exceptions import ConfigError

# What makes cuBLAS take the same algorithm for a row whatever the other rows are, as far as is
# known: no workspace to split the inner dimension with.
_PINNED_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
}

_HOPPER = 9
_SPLIT_K_SWITCH = "allow_bf16_reduced_precision_reduction_split_k"


def fused_kernels(x: Tensor) -> ModuleType | None:
    """The fused forms of this tensor's ops, or None: they need CUDA, and triton installed."""
    return _triton_kernels() if x.is_cuda else None


@functools.cache
def _triton_kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("prefixcache.runner.torch.ops.triton_kernels")


def is_hopper(device: torch.device) -> bool:
    """Whether it is a CUDA device of compute capability 9, which FA3 is for. Starts CUDA."""
    return torch.cuda.get_device_capability(device)[0] == _HOPPER


def pin_matmul() -> None:
    """Keeps cuBLAS from splitting sums by the shape of the batch. Call before CUDA starts.

    Raises `ConfigError` when CUDA has been started without: the libraries have read their settings
    then.
    """
    if not can_pin_matmul():
        raise ConfigError(
            "Batch-invariant mode must be chosen before CUDA is used: make the engine first, "
            "in a process of its own."
        )
    os.environ.update(_PINNED_ENVIRONMENT)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    _allow_reduced_precision(allowed=False)


def can_pin_matmul() -> bool:
    """Whether CUDA has not been started yet, or was started with pinned matmuls."""
    pinned = os.environ.items() >= _PINNED_ENVIRONMENT.items()
    return pinned or not torch.cuda.is_initialized()


def unpin_matmul() -> None:
    """Undoes `pin_matmul`. Call before the first matmul."""
    for name in _PINNED_ENVIRONMENT:
        os.environ.pop(name, None)
    torch.backends.cuda.preferred_blas_library("default")
    _allow_reduced_precision(allowed=True)


def _allow_reduced_precision(*, allowed: bool) -> None:
    """16-bit partial sums and, where torch knows the switch (2.10), split inner sums."""
    matmul = torch.backends.cuda.matmul
    value = (allowed, allowed) if hasattr(matmul, _SPLIT_K_SWITCH) else allowed
    matmul.allow_bf16_reduced_precision_reduction = value
    matmul.allow_fp16_reduced_precision_reduction = value
