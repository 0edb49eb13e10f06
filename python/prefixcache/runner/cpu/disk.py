"""The disk tier of a CPU's pool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from prefixcache._core import BlockStaging, derive_digest
from prefixcache.config.engine_config import CacheConfig
from prefixcache.config.home import cache_home
from prefixcache.exceptions import FieldError
from prefixcache.kv.tiers.disk_store import SCOPE_BYTES, DiskStore, void
from prefixcache.kv.tiers.disk_tier import DiskTier
from prefixcache.runner.cpu.kv_memory import KVMemory

_QUEUE_BYTES = 256 << 20
_LEAST_BLOCKS = 64


def disk_folder(cache: CacheConfig) -> Path:
    """Where the tier's file lies."""
    return cache.disk_cache_dir or cache_home() / "disk"


def scope_of(facts: Mapping[str, object], bytes_per_block: int) -> bytes:
    """Stands for all that the bytes of a block depend on besides its hash."""
    about = json.dumps([dict(facts), bytes_per_block], sort_keys=True)
    return derive_digest("prefixcache disk tier v1", about.encode())[:SCOPE_BYTES]


def make_disk_tier(
    cache: CacheConfig, kv: KVMemory, facts: Mapping[str, object]
) -> DiskTier | None:
    """The tier of a pool whose blocks depend on these facts; None where there is to be none."""
    most = cache.disk_cache_memory
    if most is None or not facts:
        return None
    if most < _LEAST_BLOCKS * kv.bytes_per_block:
        least = _LEAST_BLOCKS * kv.bytes_per_block
        raise FieldError("disk_cache_memory", f"must be at least {least} bytes, got {most}.")
    folder, scope = disk_folder(cache), scope_of(facts, kv.bytes_per_block)
    staging = BlockStaging(
        kv.addresses,
        kv.bytes_per_tensor_block,
        kv.most_blocks,
        min(_QUEUE_BYTES, most // 4),
        cache.disk_cache_min_uses,
        kv,
    )
    return DiskTier(
        staging,
        partial(DiskStore, folder, most, scope),
        partial(void, folder, scope),
        block_bytes=kv.bytes_per_block,
        name=str(folder),
    )
