"""The blocks of a pool in the host's memory, and the disk tier behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefixcache._core import BlockStaging, derive_digest
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.home import cache_home
from prefixcache.exceptions import FieldError
from prefixcache.kv.tiers.disk_store import SCOPE_BYTES, DiskStore, void
from prefixcache.kv.tiers.disk_tier import DiskTier

_QUEUE_BYTES = 256 << 20
_LEAST_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlocks:
    """Where the blocks of a pool lie."""

    addresses: Sequence[int]
    """The first byte of each tensor."""
    tensor_block_bytes: int
    """Bytes of a block in one tensor."""
    block_bytes: int
    """Bytes of a block in all tensors."""
    num_blocks: int
    """Blocks of each tensor."""
    facts: Mapping[str, object]
    """All that the bytes of a block depend on besides its hash."""
    owner: object
    """What keeps the tensors there."""
    before_load: Callable[[Sequence[int]], None]
    """To be called before another thread writes to blocks."""


def disk_folder(config: CacheConfig) -> Path:
    """Where the tier's file lies."""
    return config.disk_cache_dir or cache_home() / "disk"


def scope_of(facts: Mapping[str, object], block_bytes: int) -> bytes:
    """Stands for all that the bytes of a block depend on besides its hash."""
    about = json.dumps([dict(facts), block_bytes], sort_keys=True)
    return derive_digest("prefixcache disk tier v1", about.encode())[:SCOPE_BYTES]


def make_disk_tier(config: CacheConfig, blocks: HostBlocks) -> DiskTier | None:
    """The tier behind these blocks; None where there is to be none. Raises `FieldError`."""
    most = config.disk_cache_memory
    if most is None:
        return None
    if most < _LEAST_BLOCKS * blocks.block_bytes:
        least = _LEAST_BLOCKS * blocks.block_bytes
        raise FieldError("disk_cache_memory", f"must be at least {least} bytes, got {most}.")
    folder, scope = disk_folder(config), scope_of(blocks.facts, blocks.block_bytes)
    staging = BlockStaging(
        blocks.addresses,
        blocks.tensor_block_bytes,
        blocks.num_blocks,
        min(_QUEUE_BYTES, most // 4),
        config.disk_cache_min_uses,
        blocks.owner,
    )
    return DiskTier(
        staging,
        partial(DiskStore, folder, most, scope),
        partial(void, folder, scope),
        block_bytes=blocks.block_bytes,
        name=str(folder),
        before_load=blocks.before_load,
    )
