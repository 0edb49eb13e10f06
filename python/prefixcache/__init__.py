"""A prefix KV cache whose readers never wait, and an LLM server around it.

The names below are loaded when they are first used: importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.weights.weights_push import weights_digest
    from prefixcache.llm import LLM
    from prefixcache.types.request import CacheOptions
    from prefixcache.types.retention_range import RetentionRange
    from prefixcache.types.sampling_params import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheOptions",
    "RetentionRange",
    "SamplingParams",
    "__version__",
    "weights_digest",
]

_HOMES = {
    "AsyncEngine": "prefixcache.engine.async_engine",
    "CacheOptions": "prefixcache.types.request",
    "LLM": "prefixcache.llm",
    "RetentionRange": "prefixcache.types.retention_range",
    "SamplingParams": "prefixcache.types.sampling_params",
    "weights_digest": "prefixcache.engine.weights.weights_push",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    try:
        return version("prefixcache")
    except PackageNotFoundError:
        return "0.0.0+unknown"
