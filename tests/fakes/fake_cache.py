"""A cache manager from one list of options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_settings import CacheSettings

_NAMES = {field.name for field in fields(CacheSettings)}


def make_cache(
    num_blocks: int, block_size: int, kind: type[CacheManager] = CacheManager, **options: Any
) -> CacheManager:
    """Options are those of `CacheSettings` and of the manager."""
    own = {name: options.pop(name) for name in _NAMES & options.keys()}
    settings = CacheSettings(num_blocks=num_blocks, block_size=block_size, **{"model": "m", **own})
    return kind(settings, **options)
