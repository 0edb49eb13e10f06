"""Loading a model: what is checked and chosen before, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from prefixcache.config.engine_config import DType
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.decoder.shape_of import decoder_shape
from prefixcache.models.names import TensorNames
from prefixcache.models.replaceable import ModelT
from prefixcache.models.weights import check_folder, load_folder

logger = logging.getLogger(__name__)

_HALF_TYPES = ("bfloat16", "float16")


def check_weights(config: ModelConfig, folder: Path) -> TensorNames:
    """The names of the folder's tensors, all of which have the shapes that the configuration needs.

    Raises `ModelLoadError` otherwise, from the files' headers alone: before any memory is taken.
    """
    names = TensorNames(config)
    check_folder(decoder_shape(config).shapes(), folder, names)
    return names


def load_model(
    make: Callable[[], ModelT],
    config: ModelConfig,
    folder: Path,
    restore: Callable[[ModelT], Collection[str]] = lambda _: (),
) -> ModelT:
    """The model that `make` makes unfilled, filled from the folder's weights.

    `restore` may fill some from elsewhere, and returns their names.
    Raises `ModelLoadError` naming the tensor and the file when they do not fit the configuration.
    """
    names = check_weights(config, folder)
    model = make()
    load_folder(model.slots, folder, names, restore(model))
    return model


def choose_dtype(asked: DType, checkpoint: str | None, *, multiplies_bfloat16: bool) -> str:
    """The type weights and activations are kept in, as "bfloat16".

    "auto" is bfloat16 where the checkpoint was saved in a 16-bit type and the processor multiplies
    bfloat16, else float32.
    """
    if asked != "auto":
        return asked
    chosen = "bfloat16" if checkpoint in _HALF_TYPES and multiplies_bfloat16 else "float32"
    logger.info("dtype auto: %s (checkpoint: %s)", chosen, checkpoint)
    return chosen
