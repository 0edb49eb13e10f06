"""Models of a folder on either runner's kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefixcache._core import Cpu
from prefixcache.config.engine_config import Activations
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.arrays import Array, given_array
from prefixcache.models.loader import load_model
from prefixcache.runner.cpu.linear import KernelDType
from prefixcache.runner.cpu.model import CpuModel
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.ops.arrays import tensor_of
from prefixcache.runner.torch.ops.sets import Ops

CPU = torch.device("cpu")


def served_config(folder: Path) -> ModelConfig:
    """That of a server which takes sequences of all lengths."""
    config = ModelConfig.from_hf(folder)
    return config.for_length(config.max_context_length)


def torch_model(
    folder: Path, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None
) -> DecoderModel:
    """On torch's own kernels: the reference."""
    config = config or served_config(folder)
    make = partial(DecoderModel, config, Ops(dtype, CPU), config.max_context_length)
    return load_model(make, config, folder)


def cpu_model(
    folder: Path,
    dtype: KernelDType = "float32",
    cpu: Cpu | None = None,
    activations: Activations = "exact",
    config: ModelConfig | None = None,
) -> CpuModel:
    """On the CPU's kernels, whose rows do not depend on the batch."""
    config = config or served_config(folder)
    context = config.max_context_length
    make = partial(CpuModel, config, cpu or Cpu(2), dtype, context, activations)
    return load_model(make, config, folder)


def to_numpy(tensor: Tensor) -> Array:
    """The same numbers, of the same type."""
    return given_array("", tensor) if tensor.is_floating_point() else tensor.numpy()


def to_torch(array: Array) -> Tensor:
    """The same numbers, of the same type, in memory of their own."""
    return tensor_of(np.array(array))
