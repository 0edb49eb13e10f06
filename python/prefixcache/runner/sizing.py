"""How many blocks of KV fit into a device's memory, and the context length that they allow."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.machine import machine_memory
from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ConfigError, FieldError, OutOfMemoryError
from prefixcache.kv.cache_settings import fitting_tokens
from prefixcache.kv.specs import KVLayout, PoolSizes, kv_layout

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_DEFAULT_SHARE = 0.5
_LEAST_BLOCKS = 2
_DEFAULT_CPU_BYTES = 4 << 30
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@dataclass(frozen=True, slots=True)
class MemorySize:
    """Bytes of a device, container limits included: those free now, and all.

    `default` bounds a pool of which no size is said.
    """

    free: int
    total: int
    default: int = 1 << 62


def layout_of(config: EngineConfig, model: ModelConfig, itemsize: int) -> KVLayout:
    """The groups of a model in the engine, whose numbers have `itemsize` bytes.

    Raises `FieldError` for blocks too small for it.
    """
    # The last token is computed again where a grammar's mask is late, with its guesses or without.
    return kv_layout(
        model,
        config.cache.block_size,
        1 + most_guesses(config),
        itemsize,
        has_codes=config.cache.kv_cache_dtype == "int8",
    )


def check_kv_dtype(cache: CacheConfig, dtype: str) -> None:
    """Raises `FieldError` where keys and values are to be numbers of another type than `dtype`."""
    if cache.kv_cache_dtype not in ("auto", "int8", dtype):
        raise FieldError(
            "kv_cache_dtype",
            f"must be auto, int8 or {dtype}: numbers are of the type that is computed with "
            f"(dtype), got {cache.kv_cache_dtype}.",
        )


def most_guesses(config: EngineConfig) -> int:
    """The most tokens that are guessed of a sequence in a step."""
    return 0 if config.speculation.source == "off" else config.speculation.most


def choose_num_blocks(
    cache: CacheConfig, layout: KVLayout, itemsize: int, memory: MemorySize
) -> int:
    """Blocks of the pool at the start, the null block included.

    `num_blocks` and `kv_cache_memory` are taken at their word; a share is one of the memory that is
    free now. With neither, half of that is used, up to `memory.default`. Where not even one block
    next to the null block fits it raises `FieldError` if bytes were asked for, else
    `OutOfMemoryError`.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = layout.bytes_per_block(cache.block_size, itemsize)
    budget = _budget(cache.kv_cache_memory, memory)
    if budget < _LEAST_BLOCKS * block_bytes:
        if isinstance(cache.kv_cache_memory, int):
            raise FieldError(
                "kv_cache_memory",
                f"must be at least {_LEAST_BLOCKS} blocks of {block_bytes} bytes, got {budget}.",
            )
        raise OutOfMemoryError(
            f"The KV cache needs at least {_LEAST_BLOCKS} blocks of {block_bytes} bytes, "
            f"but only {budget} bytes are allowed (kv_cache_memory)."
        )
    return budget // block_bytes


def _budget(asked: int | float | None, memory: MemorySize) -> int:
    """Bytes for the pool."""
    if isinstance(asked, int):
        return asked
    share = int(memory.free * (asked or _DEFAULT_SHARE))
    return share if asked else min(share, memory.default)


def pool_sizes(cache: CacheConfig, start: int, block_bytes: int, memory: MemorySize) -> PoolSizes:
    """The range of a pool that starts with `start` blocks.

    Raises `OutOfMemoryError` for more than is free, and `FieldError` for a ceiling beyond the
    machine and for sizes that are out of order.
    """
    check_free(start, cache.block_size, start * block_bytes, memory.free)
    unbounded = PoolSizes(
        start=start,
        ceiling=start,
        floor=_LEAST_BLOCKS,
        block_bytes=block_bytes,
        free_bytes=memory.free,
    )
    most, least = cache.kv_cache_max_memory, cache.kv_cache_min_memory
    ceiling = start if most is None else unbounded.blocks_of(most)
    floor = _LEAST_BLOCKS if least is None else max(unbounded.blocks_of(least), _LEAST_BLOCKS)
    _check_ceiling(start, ceiling, block_bytes, memory.total)
    if floor > start:
        raise FieldError(
            "kv_cache_min_memory",
            f"must be at most the size at the start, {start} blocks of {block_bytes} bytes; it "
            f"asks for {floor}.",
        )
    return replace(unbounded, ceiling=ceiling, floor=floor)


def check_free(num_blocks: int, block_size: int, num_bytes: int, free: int) -> None:
    """Raises `OutOfMemoryError` where a pool takes `num_bytes` more and fewer are free."""
    if num_bytes > free:
        raise OutOfMemoryError(
            f"The KV cache of {num_blocks} blocks of {block_size} tokens needs "
            f"{num_bytes / _MIB:,.0f} MiB, but only {free / _MIB:,.0f} MiB are free. "
            "Lower --kv-cache-memory or --num-blocks."
        )


def _check_ceiling(start: int, ceiling: int, block_bytes: int, machine: int) -> None:
    if ceiling < start:
        raise FieldError(
            "kv_cache_max_memory",
            f"must be at least the size at the start, {start} blocks of {block_bytes} bytes; it "
            f"allows {ceiling}.",
        )
    if ceiling > start and ceiling * block_bytes > machine:
        raise FieldError(
            "kv_cache_max_memory",
            f"must be at most the {machine / _MIB:,.0f} MiB of memory that there are, got "
            f"{ceiling * block_bytes / _MIB:,.0f} MiB.",
        )


def host_memory() -> MemorySize:
    """The memory of this machine's processors."""
    limits = [_read_number(Path(limit)) for limit, _ in _CGROUP_FILES]
    total = min(machine_memory()[0], *(limit for limit in limits if limit), 1 << 62)
    return MemorySize(available_memory(), total, _DEFAULT_CPU_BYTES)


def available_memory() -> int:
    """Bytes that can still be allocated on this machine, container limits included."""
    return min(machine_memory()[1], *_cgroup_available())


def _cgroup_available() -> list[int]:
    bounds = [_limit_minus_usage(Path(limit), Path(usage)) for limit, usage in _CGROUP_FILES]
    return [bound for bound in bounds if bound is not None] or [1 << 62]


def _limit_minus_usage(limit: Path, usage: Path) -> int | None:
    most, used = _read_number(limit), _read_number(usage)
    return None if most is None or used is None else max(most - used, 0)


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None  # No such controller, or "max": no limit.


def fitting_model_len(
    config: EngineConfig, model: ModelConfig, layout: KVLayout, num_blocks: int
) -> int:
    """The context length, lowered to what the pool holds unless it was asked for."""
    longest = config.scheduler.context_length(model)
    kinds = layout.kinds
    room = fitting_tokens(
        num_blocks,
        config.cache.block_size,
        kinds,
        chunk=config.scheduler.limits().max_num_batched_tokens,
        most=longest,
    )
    if longest == room:
        return longest
    if config.scheduler.max_model_len is not None or not room:
        # A group with a window holds the window and the tokens that a step computes.
        has_windows = any(kind != "full" for kind in kinds)
        lower = "--max-model-len" + (" or --max-num-batched-tokens" if has_windows else "")
        raise ConfigError(
            f"The KV cache holds {room} tokens ({num_blocks - 1} blocks of "
            f"{config.cache.block_size}), less than one sequence of max_model_len {longest}. "
            f"Raise --kv-cache-memory or --num-blocks, or lower {lower}."
        )
    logger.warning("The KV cache holds %d tokens: max_model_len is lowered from %d.", room, longest)
    return room
