"""What the bytes of a block depend on besides its tokens, as the first bytes of its key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import vllm
from vllm.platforms import current_platform

from prefixcache_store.weights import model_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

NAMESPACE_BYTES = 16
# What differs between processes that may share blocks, or says only where these go.
_NOT_IN_THE_KEY = ("engine_id", "extra_config", "enable_kv_cache_events")


def namespace(
    config: VllmConfig, offloading: OffloadingConfig, notes: Path, weights: str | None
) -> bytes:
    """`NAMESPACE_BYTES` that stand for weights, types, layout, ranks and versions.

    `weights` stands for the content of the weight files where these are not to be read; `notes`
    is where their digests are noted. Raises `ValueError` where nothing can stand for them, or the
    engine's keys mean something else in the next process.
    """
    refuse_keys_that_change(config)
    layout = dataclasses.asdict(offloading)
    for field in _NOT_IN_THE_KEY:
        del layout[field]
    algorithm = config.cache_config.prefix_caching_hash_algo
    parts = {
        "vllm": vllm.__version__,
        "config": config.compute_hash(),
        "layout": layout,
        "max_model_len": config.model_config.max_model_len,
        "device": _device(),
        "hash": algorithm,
        # Without "cbor" it is the hash of a pickle, which is Python's own format.
        "python": None if algorithm.endswith("cbor") else sys.version_info[:2],
        "weights": weights or [_weights(model, config, notes) for model in models(config)],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()[:NAMESPACE_BYTES]


def _device() -> str:
    """Its attention backend, which vLLM chooses by it, lays out what is in a block."""
    try:
        return current_platform.get_device_name()
    except NotImplementedError:  # No GPU.
        return current_platform.device_type


def refuse_keys_that_change(config: VllmConfig) -> None:
    """Raises `ValueError` if one key may stand for different content, or content for many keys."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        raise ValueError(
            f"With {algorithm} vLLM begins its block hashes with random bytes in each process, so "
            "that no later process would find a block: set PYTHONHASHSEED, or use the default "
            "--prefix-caching-hash-algo sha256."
        )
    if config.lora_config is not None:
        raise ValueError(
            "vLLM's block hashes have the name of a LoRA adapter, not its weights: another adapter "
            "of that name would get wrong blocks. This tier does not run with --enable-lora."
        )
    if config.weight_transfer_config is not None:
        raise ValueError(
            "Weights that a trainer sends are not those of the files that the keys stand for. "
            "This tier does not run with a weight transfer."
        )


def models(config: VllmConfig) -> list[ModelConfig]:
    """The models whose layers have blocks: the model, and a draft model with weights of its own."""
    speculative = config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    return [config.model_config] + ([] if draft is None else [draft])


def _weights(model: ModelConfig, config: VllmConfig, notes: Path) -> str:
    load = config.load_config
    return model_digest(model.model, model.revision, load.download_dir, load.load_format, notes)
