"""From a model's configuration and folder to a loaded model."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from prefixcache._core import Cpu
from prefixcache.config.engine_config import Activations, DType
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.decoder import Builder, DecoderModel
from prefixcache.models.names import TensorNames
from prefixcache.models.weights import check_folder, load_folder, shapes_of
from prefixcache.ops.sets import make_ops

logger = logging.getLogger(__name__)

_HALF_TYPES = ("bfloat16", "float16")


def load_model(
    config: ModelConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    cpu: Cpu | None = None,
    activations: Activations = "exact",
) -> DecoderModel:
    """Builds the model on the device and fills it from the folder's weights.

    `max_positions` (the model's context length if None) bounds the rotary table. With `cpu` the
    model runs on ops whose rows do not depend on the batch, with those threads; `activations` is
    what they multiply quantized weights with. Raises
    `ModelLoadError` naming the tensor and the file when weights do not fit the configuration.
    """
    check_weights(config, folder)
    model = make_model(
        config,
        dtype=dtype,
        device=device,
        max_positions=max_positions,
        cpu=cpu,
        activations=activations,
    )
    load_folder(model.slots, folder, device, model.names)
    return model


def check_weights(config: ModelConfig, folder: Path) -> TensorNames:
    """The names of the folder's tensors, all of which have the shapes that the configuration needs.

    Raises `ModelLoadError` otherwise, from the files' headers alone: before any memory is taken.
    """
    model = make_model(config, dtype=torch.float32, device=torch.device("meta"))
    check_folder(shapes_of(model.slots), folder, model.names)
    return model.names


def make_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    cpu: Cpu | None = None,
    activations: Activations = "exact",
) -> DecoderModel:
    """The model of `load_model` with its weights undefined: for somebody who writes them all."""
    builder = Builder(make_ops(dtype, device, cpu, activations))
    return DecoderModel(config, builder, max_positions or config.max_context_length)


def choose_dtype(asked: DType, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """The type weights and activations are kept in.

    "auto" is bfloat16 where the checkpoint was saved in a 16-bit type and the processor multiplies
    bfloat16, else float32.
    """
    if asked != "auto":
        return torch.bfloat16 if asked == "bfloat16" else torch.float32
    half = checkpoint in _HALF_TYPES and _multiplies_bfloat16(device)
    chosen = torch.bfloat16 if half else torch.float32
    logger.info("dtype auto: %s (checkpoint: %s)", str(chosen).removeprefix("torch."), checkpoint)
    return chosen


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
