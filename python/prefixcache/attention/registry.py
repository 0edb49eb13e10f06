"""Attention backends by name. A backend is imported when it is made, never before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prefixcache.attention.base import AttentionBackend, AttentionSpec
from prefixcache.exceptions import ConfigError


def _torch(spec: AttentionSpec) -> AttentionBackend:
    from prefixcache.attention.cpu import TorchAttention

    return TorchAttention(spec)


_FACTORIES: dict[str, Callable[[AttentionSpec], AttentionBackend]] = {"torch": _torch}


def attention_names() -> tuple[str, ...]:
    """Names that `make_attention` knows, beside "auto"."""
    return tuple(_FACTORIES)


def make_attention(
    name: str, spec: AttentionSpec, device_type: Literal["cpu", "cuda"] = "cpu"
) -> AttentionBackend:
    """Makes the backend for one group of layers; "auto" is the best one for the device.

    Raises `ConfigError` for an unknown name, listing the known ones.
    """
    chosen = _best(device_type) if name == "auto" else name
    factory = _FACTORIES.get(chosen)
    if factory is None:
        raise ConfigError(f"attention must be one of auto, {', '.join(_FACTORIES)}, got {name!r}.")
    return factory(spec)


def _best(_device_type: str) -> str:
    return "torch"
