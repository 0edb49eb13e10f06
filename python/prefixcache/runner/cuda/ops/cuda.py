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

_SPLIT_K_SWITCH = "allow_bf16_reduced_precision_reduction_split_k"


def fused_kernels(x: Tensor) -> ModuleType | None:
    """The fused forms of this tensor's ops, or None: they need CUDA, and triton installed."""
    return _triton_kernels() if x.is_cuda else None


@functools.cache
def _triton_kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("prefixcache.runner.cuda.ops.triton_kernels")


def pin_matmul() -> None:
    """Keeps cuBLAS from splitting sums by the shape of the batch. Call before CUDA starts.

    Raises `ConfigError` when CUDA has been started without: the libraries have read their settings
    then.
    """
    pinned = os.environ.items() >= _PINNED_ENVIRONMENT.items()
    if torch.cuda.is_initialized() and not pinned:
        raise ConfigError(
            "Batch-invariant mode must be chosen before CUDA is used: make the engine first, "
            "in a process of its own."
        )
    os.environ.update(_PINNED_ENVIRONMENT)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    _refuse_reduced_precision()


def _refuse_reduced_precision() -> None:
    """No 16-bit partial sums and, where torch knows the switch (2.10), no split inner sums."""
    matmul = torch.backends.cuda.matmul
    refused = (False, False) if hasattr(matmul, _SPLIT_K_SWITCH) else False
    matmul.allow_bf16_reduced_precision_reduction = refused
    matmul.allow_fp16_reduced_precision_reduction = refused
