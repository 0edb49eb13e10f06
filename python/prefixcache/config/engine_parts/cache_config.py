"""The flags of the cache: its size, what it keeps, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from prefixcache.config.checked import (
    Checked,
    Count,
    Fraction,
    PositiveFloat,
    PositiveInt,
)
from prefixcache.config.engine_parts.flag_values import (
    ByteSize,
    FilePath,
    FolderPath,
    MemorySize,
    RetentionInterval,
)
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError, collect

KVCacheDType = Literal["auto", "bfloat16", "float32", "int8"]
EvictionPolicy = Literal["lru", "reuse-queue"]
Staleness = Annotated[int, Ge(-1), Le(64)]

MAX_BLOCK_SIZE = 256
LEAST_CODE_BLOCK = 16
"""Tokens whose codes lie together where keys and values are kept in eight bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Checked):
    """The paged KV cache. `num_blocks` counts the null block, as vLLM's override does.

    With neither `num_blocks` nor `kv_cache_memory`, a CPU's pool takes a share of the free memory,
    and a GPU's what `gpu_memory_utilization` of its memory leaves next to the weights and the
    largest step.

    With `merge_duplicate_blocks` a block whose content another one holds is given up for that one,
    where equal content means equal bytes: in batch-invariant mode.

    Where layers have a sliding window, `prefix_cache_retention_interval` and what is pinned say
    which of the blocks behind it later requests find; see `kv/retention.py`. Other models have no
    such blocks, and these fields change nothing.
    """

    block_size: Annotated[PositiveInt, Le(MAX_BLOCK_SIZE)] = flag(
        16, "Tokens of a cache block: a power of two.", "Cache"
    )
    state_block_size: Annotated[PositiveInt, Le(MAX_BLOCK_SIZE)] = flag(
        64,
        "Least tokens of a cache block in models with states, such as Qwen3.5, which store a "
        "snapshot at the end of a block.",
        "Cache",
    )
    kv_cache_dtype: KVCacheDType = flag(
        "auto",
        "What keys and values are kept as. auto: numbers of the type that is computed with; int8, "
        "on a CPU: eight bits, and a scale for each token and head, a quarter to a half of the "
        "memory; see docs/guides/memory.md.",
        "Cache",
    )
    num_blocks: Annotated[PositiveInt, Ge(2)] | None = flag(
        None,
        "Blocks of the cache, one of which is never used.",
        "Cache",
        aliases=("num_gpu_blocks_override",),
        shown="as many as fit",
    )
    kv_cache_memory: MemorySize | None = flag(
        None,
        "Memory of the cache instead of --num-blocks: bytes, a size such as 2GiB, or a share "
        "such as 0.5 of what is free before the model loads (on a CPU of the memory left to "
        "the system and the container, on CUDA of the GPU's).",
        "Cache",
        aliases=("kv_cache_memory_bytes",),
        shown="0.5 and at most 4GiB on a CPU, by --gpu-memory-utilization on CUDA",
        metavar="<bytes, size or share>",
        common=True,
    )
    kv_cache_max_memory: MemorySize | None = flag(
        None,
        "Memory that the cache may grow to while it serves; a size or share as with "
        "--kv-cache-memory.",
        "Cache",
        shown="the size at the start",
        metavar="<bytes, size or share>",
    )
    kv_cache_min_memory: MemorySize | None = flag(
        None,
        "Memory below which the cache never shrinks; a size or share as with --kv-cache-memory.",
        "Cache",
        shown="one block",
        metavar="<bytes, size or share>",
    )
    prefix_cache_max_blocks: Count | None = flag(
        None,
        "Most cached blocks that no request uses; 0 keeps none.",
        "Cache",
        shown="all of the cache",
    )
    gpu_memory_utilization: Annotated[PositiveFloat, Le(1)] = flag(
        0.9, "Share of a GPU's memory to use.", "Model"
    )
    enable_prefix_caching: bool = flag(
        True, "Reuse the keys and values of shared prefixes.", "Cache"
    )
    eviction_policy: EvictionPolicy = flag(
        "lru",
        "Which cached block is evicted first. lru: the least recently used; reuse-queue: the "
        "one with the fewest expected hits per unit of time.",
        "Cache",
        common=True,
    )
    kv_cache_metrics: bool = flag(
        False,
        "Report in /metrics how long blocks stay cached, how long they are idle before "
        "eviction, and how much time passes between two uses.",
        "Cache",
    )
    record_trace: FilePath | None = flag(
        None,
        "File to record the cache's requests in, without text, for replays at other sizes; "
        "see docs/reference/recording.md.",
        "Cache",
        shown="nothing is recorded",
        metavar="<file>",
    )
    record_trace_max_size: ByteSize = flag(
        2**30,
        "Size at which a recording continues in another file.",
        "Cache",
        shown="1GiB",
        metavar="<bytes or size>",
    )
    kv_cache_dir: FolderPath | None = flag(
        None,
        "Folder to keep the cache in, on a CPU, so that it survives restarts and kill -9; see "
        "docs/guides/disk.md.",
        "Cache",
        shown="the cache is kept in memory alone",
        metavar="<folder>",
    )
    kv_cache_dir_size: ByteSize | None = flag(
        None,
        "Most bytes in --kv-cache-dir; the oldest files of other models or versions are "
        "removed first.",
        "Cache",
        shown="the cache's own and one older file",
        metavar="<bytes or size>",
    )
    disk_cache_memory: ByteSize | None = flag(
        None,
        "Most bytes on a disk for blocks that do not fit into memory, on a CPU; see "
        "docs/guides/disk.md.",
        "Cache",
        shown="the cache is kept in memory alone",
        metavar="<bytes or size>",
    )
    disk_cache_dir: FolderPath | None = flag(
        None,
        "Folder of --disk-cache-memory.",
        "Cache",
        shown="disk in PREFIXCACHE_HOME or ~/.cache/prefixcache",
        metavar="<folder>",
    )
    disk_cache_min_uses: PositiveInt = flag(
        1,
        "Uses from which a block is written to the disk, its computation included; blocks "
        "that a retention hint raises are always written. 2 writes less if most prompts never "
        "return.",
        "Cache",
    )
    merge_duplicate_blocks: bool = flag(
        True, "Keep one of several blocks with the same content.", "Cache"
    )
    prefix_cache_retention_interval: RetentionInterval | None = flag(
        None,
        "With sliding windows: also keep a window at every multiple of this number of tokens. "
        "0 keeps only those where requests are likely to resume (the end of a prompt, of an "
        "answer, of a shared prefix), none keeps every block of every window.",
        "Cache",
        shown="0, or none where all layers have a window; --max-num-batched-tokens with "
        "--pin-swa-tokens",
        metavar="<none or tokens>",
    )
    pin_swa_tokens: bool = flag(
        False, "With sliding windows: evict the kept windows last.", "Cache"
    )
    pin_max_share: Fraction = flag(
        0.2, "Largest share of the cache that is pinned; beyond it the oldest pins end.", "Cache"
    )
    pin_min_drop_size: Count = flag(
        16,
        "Least distance in blocks between a pinned window and the pinned one before it; for that "
        "of a prompt's end, from the prompt's start.",
        "Cache",
    )
    pin_prefix_blocks: bool = flag(
        True,
        "Also pin the blocks of full attention before a pinned window, without which it is "
        "useless.",
        "Cache",
    )
    max_weight_staleness: Staleness = flag(
        0,
        "Most weight updates since the KV that a request hits was computed; requests may ask "
        "for fewer. 0: only KV of the newest weights, -1: no limit. See docs/tutorials/rl.md.",
        "Cache",
    )
    retention_budget: Fraction = flag(
        0.2,
        "Largest share of the cache that the retention hints of one salt or API key raise; "
        "beyond it the oldest hints end.",
        "Cache",
    )

    def check_together(self) -> None:
        """Raises `FieldError`."""
        collect([self._check_sizes, self._check_range, self._check_folders, self._check_pins])

    def _check_sizes(self) -> None:
        for name in ("block_size", "state_block_size"):
            size = getattr(self, name)
            if size & (size - 1):
                raise FieldError(
                    name, f"must be a power of two from 1 to {MAX_BLOCK_SIZE}, got {size}."
                )
        if self.kv_cache_dtype == "int8" and self.block_size < LEAST_CODE_BLOCK:
            raise FieldError(
                "block_size",
                f"must be at least {LEAST_CODE_BLOCK} with kv_cache_dtype int8, got "
                f"{self.block_size}.",
            )

    def _check_pins(self) -> None:
        if self.pin_swa_tokens and self.prefix_cache_retention_interval == "none":
            raise FieldError(
                "prefix_cache_retention_interval",
                "must be a number of tokens where pin_swa_tokens is on: pins protect chosen "
                "windows, and none keeps all, which would push the pinned ones out.",
            )

    def _check_folders(self) -> None:
        """What excludes each other is not given together, and nothing alone that needs another."""
        names = ("max_weight_staleness", "record_trace", "disk_cache_memory", "kv_cache_dir")
        given = [name for name in names if getattr(self, name)]
        if given[1:] and given[0] in names[:2]:
            raise FieldError(given[0], f"excludes {given[1]}.")
        for name, needed in (
            ("kv_cache_dir_size", "kv_cache_dir"),
            ("disk_cache_dir", "disk_cache_memory"),
        ):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise FieldError(name, f"needs {needed}.")
        if self.disk_cache_min_uses > 1 and self.disk_cache_memory is None:
            raise FieldError("disk_cache_min_uses", "needs disk_cache_memory.")

    def _check_range(self) -> None:
        """The floor, the start and the ceiling ascend, as far as they can be compared yet."""
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise FieldError("kv_cache_memory", "excludes num_blocks: give one, not both.")
        names = ("kv_cache_min_memory", "kv_cache_memory", "kv_cache_max_memory")
        given = [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]
        for index, (low, least) in enumerate(given):
            for high, most in given[index + 1 :]:
                if type(least) is type(most) and least > most:
                    raise FieldError(low, f"must be at most {high} ({most}), got {least}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig(Checked):
    """When the cache gives memory back and takes it again without being asked."""

    kv_cache_idle_release: PositiveFloat | None = flag(
        None,
        "Seconds without work after which the cache shrinks step by step to its least memory; "
        "it grows again on demand.",
        "Cache",
        shown="never",
        metavar="<seconds>",
    )
    min_free_memory: ByteSize | None = flag(
        None,
        "Memory to leave free for other programs: if less is available the cache shrinks, and "
        "it grows again when there is room.",
        "Cache",
        shown="off",
        metavar="<bytes or size>",
    )
    available_memory_file: FilePath | None = flag(
        None,
        "File with the available bytes for --min-free-memory, instead of asking the system.",
        "Cache",
        shown="the system and the container's limit",
    )

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.available_memory_file is not None and self.min_free_memory is None:
            raise FieldError("available_memory_file", "needs min_free_memory.")

    @property
    def is_on(self) -> bool:
        """Whether the cache changes its size by itself."""
        return self.kv_cache_idle_release is not None or self.min_free_memory is not None
