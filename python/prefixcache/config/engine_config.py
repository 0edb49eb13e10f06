"""What an engine is started with: its flags, frozen and checked.

Every wrong value raises `ConfigError` naming the field and what is allowed. Nothing here imports
torch.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from annotated_types import Ge, Le, MinLen

from prefixcache.config.checked import (
    MAX_INT,
    Checked,
    Count,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ReadBy,
    is_count,
)
from prefixcache.config.flags import build, flag, named
from prefixcache.exceptions import FieldError, collect

if TYPE_CHECKING:
    from prefixcache.config.model_config import ModelConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

DType = Literal["auto", "bfloat16", "float32"]
KVCacheDType = Literal["auto", "bfloat16", "float32", "int8"]
Device = Literal["auto", "cpu", "cuda"]
Activations = Literal["exact", "int8"]
ActivationChoice = Literal["exact", "int8", "auto"]
EvictionPolicy = Literal["lru", "reuse-queue"]
SchedulingPolicy = Literal["fcfs", "priority", "cache-aware"]
HitTiers = Literal["memory", "memory,disk"]
Speculation = Literal["off", "prompt", "cache"]
Attention = Literal["auto", "torch", "cpu", "flashinfer"]

MAX_BLOCK_SIZE = 256
LEAST_CODE_BLOCK = 16
"""Tokens whose codes lie together where keys and values are kept in eight bits."""
MAX_DRAFTS = 31
_MOST_BYTES = 2**62
_DIGITS = re.compile(r"[0-9]{1,10}")
_TOKENS = re.compile(r"(\d{1,10}|\d{0,9}\.\d{1,9})([kmg]?)", re.IGNORECASE)
_SIZE = re.compile(r"(\d{0,30}\.?\d{1,30})\s*(([KMGT])(i?)B?|B)?", re.IGNORECASE)


def parse_memory(value: object) -> int | float:
    """Bytes of 1000000, "1000000", "2GiB" or "1.5 GB"; "2G" counts as "2GiB".

    A number with a point and no unit, as 0.5, is a share of what is free, more than 0 and at most
    1, and is returned as a float. Raises `ValueError` for anything else.
    """
    number = _read_size(value.strip()) if isinstance(value, str) else value
    most = 1 if isinstance(number, float) else _MOST_BYTES
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= most:
        raise ValueError("must be bytes, a size as 2GiB or 500MB, or a share as 0.5")
    return number


def _read_size(text: str) -> int | float | None:
    """None for text that is not a size.

    pydantic's `ByteSize` would read "2GiB too much" as 2 GiB, "5bit" as 0 bytes, and "2G" as 2 GB.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, unit, prefix, binary = match.groups()
    if unit is None:
        return float(number) if "." in number else int(number)
    decimal = prefix and not binary and unit.upper().endswith("B")
    power = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1000 if decimal else 1024) ** power)


def parse_bytes(value: object) -> int:
    """`parse_memory` without shares. Raises `ValueError`."""
    try:
        number = parse_memory(value)
    except ValueError:
        number = 0.0
    if isinstance(number, float):
        raise ValueError("must be bytes, or a size as 2GiB or 500MB")
    return number


def parse_path(value: object) -> Path:
    """A path, or the text of one. Raises `ValueError`."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError("must be a path")
    return Path(value)


def parse_folder(value: object) -> Path:
    """A path at which no file is in the way of a folder. Raises `ValueError`."""
    path = parse_path(value)
    if any(os.path.isfile(part) for part in (path, *path.parents)):
        raise ValueError("must be a folder or a new path, not a file")
    return path


def parse_folder_or_none(value: object) -> Path | Literal["none"]:
    """A folder as in `parse_folder`, or "none". Raises `ValueError`."""
    return "none" if value == "none" else parse_folder(value)


def parse_interval(value: object) -> int | Literal["none"]:
    """Tokens between two positions, of 64 or "64", or "none". Raises `ValueError`."""
    if value == "none":
        return "none"
    tokens = int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value
    if not (is_count(tokens) and tokens <= MAX_INT):
        raise ValueError("must be 'none', 0, or a number of tokens")
    return tokens


# vLLM's methods of speculative decoding that need no second model, by what they are here.
_SPECULATIVE_METHODS: dict[object, Speculation] = {"ngram": "prompt", "suffix": "cache"}
_SPECULATIVE_KEYS = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}


def parse_speculative_config(value: object) -> tuple[Speculation, int | None]:
    """Where guesses come from and how many at most, of vLLM's JSON or the same as a mapping.

    What was read before, a tuple, is returned as it is. The lengths that its n-gram lookup compares
    are passed over: here the longest match counts, and how often such matches were right. Raises
    `ValueError`.
    """
    if isinstance(value, tuple):
        return cast("tuple[Speculation, int | None]", value)
    try:
        given = json.loads(value) if isinstance(value, str) else value
        method = _SPECULATIVE_METHODS[given["method"]]  # type: ignore[index]
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ValueError("must be JSON with method ngram or suffix") from None
    options = cast("dict[str, object]", given)
    unknown = [key for key in options if key not in _SPECULATIVE_KEYS]
    if unknown:
        raise ValueError(f"has {unknown[0]}, which is not supported")
    count = options.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or not 1 <= count <= MAX_DRAFTS):
        raise ValueError(f"must have num_speculative_tokens from 1 to {MAX_DRAFTS}")
    return method, count


def parse_tokens(value: object) -> int:
    """Tokens of 8192, "8192", "8k" (8,000) or "8K" (8,192), as in vLLM. Raises `ValueError`."""
    tokens = value
    if isinstance(value, str) and (match := _TOKENS.fullmatch(value.strip())):
        number, unit = match.groups()
        base = 1000 if unit.islower() else 1024
        if unit or number.isdigit():
            tokens = int(float(number) * base ** " kmg".index(unit.lower() or " "))
    if not (is_count(tokens, 1) and tokens <= MAX_INT):
        raise ValueError("must be a number of tokens, as 8192, 8k (8,000) or 8K (8,192)")
    return tokens


# Bytes as an integer, or a share of the free memory as a float.
MemorySize = Annotated[int | float, ReadBy(parse_memory)]
ByteSize = Annotated[int, ReadBy(parse_bytes)]
TokenCount = Annotated[int, ReadBy(parse_tokens)]
Staleness = Annotated[int, Ge(-1), Le(64)]
FilePath = Annotated[Path, ReadBy(parse_path)]
FolderPath = Annotated[Path, ReadBy(parse_folder)]
CacheFolder = Annotated[Path | Literal["none"], ReadBy(parse_folder_or_none)]
SpeculativeConfig = Annotated[tuple[Speculation, int | None], ReadBy(parse_speculative_config)]
RetentionInterval = Annotated[int | Literal["none"], ReadBy(parse_interval)]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Of a step; `max_step_ms` 0 sets no limit."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_ms: float


# A step keeps a snapshot of all states for each block that it fills.
_STATE_STEP_TOKENS = 512
_CPU_LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_step_ms=250)
# Those of vLLM: smaller steps leave a GPU idle.
_CUDA_LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_step_ms=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Checked):
    """Order of starts and limits of a step. `max_model_len` None takes the model's context length.

    `scheduling_policy` is the order within the turns of API keys: "fcfs" is that of arrival,
    "priority" the same below the priorities that requests bring, which a server refuses otherwise,
    and "cache-aware" starts long hits first, but none before a request ahead of it that has waited
    for `max_queue_delay` seconds.

    A request whose share of cached tokens is below `global_cache_hit_threshold` ends where it
    would start, unless it brings a threshold of its own; tokens in `cache_hit_threshold_tiers`
    count as cached. With `share_in_flight` a request waits, at most `max_wait_steps` steps, for
    blocks that another one is computing.

    While answers are in flight, chunks of prompts are so short that a step takes `max_step_ms` at
    most, as far as earlier steps tell. The limits of a step that are None go by the device.
    """

    scheduling_policy: SchedulingPolicy = flag(
        "fcfs",
        "fcfs serves in order of arrival, API keys in turns; priority lets clients choose who "
        "is first; cache-aware serves the longest hits first.",
        "Scheduling",
    )
    max_queue_delay: NonNegativeFloat = flag(
        30.0,
        "Longest time in seconds that a request may be overtaken under cache-aware scheduling.",
        "Scheduling",
    )
    max_num_seqs: PositiveInt | None = flag(
        None,
        "Most sequences of a step.",
        "Scheduling",
        shown="64 on a CPU, 256 on CUDA",
        common=True,
    )
    max_num_batched_tokens: TokenCount | None = flag(
        None,
        "Most tokens of a step.",
        "Scheduling",
        shown="2048 on a CPU, 8192 on CUDA, 512 where layers have states",
        metavar="<tokens>",
    )
    max_step_ms: NonNegativeFloat | None = flag(
        None,
        "Most milliseconds of a step while answers are in flight; 0 sets no limit.",
        "Scheduling",
        shown="250 on a CPU, 0 on CUDA",
    )
    max_running_per_key: PositiveInt | None = flag(
        None,
        "Most sequences of one API key in a step; others of the key wait.",
        "Scheduling",
        shown="no limit",
    )
    max_model_len: TokenCount | None = flag(
        None,
        "Most tokens of a sequence, as 8192, 8k (8,000) or 8K (8,192).",
        "Model",
        shown="the model's context length",
        metavar="<tokens>",
        common=True,
    )
    global_cache_hit_threshold: Fraction = flag(
        0.0,
        "Requests with a smaller share of cached tokens end where they would start; 0 ends none.",
        "Cache",
    )
    cache_hit_threshold_tiers: HitTiers = flag(
        "memory", "Tiers whose tokens count as cached for a hit threshold.", "Cache"
    )
    share_in_flight: bool = flag(
        True, "Wait for blocks that another request is computing.", "Cache"
    )
    max_wait_steps: PositiveInt = 4096

    def check_together(self) -> None:
        """Raises `FieldError`."""
        limits = self.limits()
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise FieldError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({limits.max_num_seqs}), "
                f"got {limits.max_num_batched_tokens}.",
            )

    def limits(self, device: str = "cpu") -> StepLimits:
        """What is given, and otherwise what is usual with it on a device as "cpu" or "cuda:0"."""
        usual = _CUDA_LIMITS if device.startswith("cuda") else _CPU_LIMITS
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        return StepLimits(
            max_num_seqs=seqs or min(usual.max_num_seqs, tokens or usual.max_num_seqs),
            max_num_batched_tokens=tokens or max(usual.max_num_batched_tokens, seqs or 0),
            max_step_ms=usual.max_step_ms if self.max_step_ms is None else self.max_step_ms,
        )

    def on(self, device: str) -> SchedulerConfig:
        """The same with the limits of that device."""
        return replace(self, **asdict(self.limits(device)))

    def context_length(self, model: ModelConfig) -> int:
        """Most tokens of a sequence. Raises `FieldError` when more is asked than the model has."""
        longest = model.max_context_length
        if self.max_model_len is None:
            return longest
        if self.max_model_len > longest:
            raise FieldError(
                "max_model_len",
                f"must be at most the model's context length of {longest} tokens, "
                f"got {self.max_model_len}.",
            )
        return self.max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(Checked):
    """Several tokens a step: guesses that the model checks together with the next token.

    `speculative_config` is vLLM's way to say it, and excludes the others.
    """

    speculate: Speculation = flag(
        "off",
        "Source of guesses at an answer's next tokens. prompt: its own prompt and text; "
        "cache: also other requests under the same salt and API key. Answers do not change.",
        "Scheduling",
        common=True,
    )
    speculate_tokens: Annotated[PositiveInt, Le(MAX_DRAFTS)] = flag(
        7, "Most tokens guessed in a step for one answer.", "Scheduling"
    )
    speculate_history: Annotated[int, Ge(64), Le(2**24)] = flag(
        2**20,
        "Tokens of recent requests to take guesses from, about 17 bytes each.",
        "Scheduling",
    )
    speculative_config: SpeculativeConfig | None = flag(
        None,
        "vLLM's form of --speculate: method ngram is prompt, suffix is cache.",
        "Scheduling",
        aliases=("sc",),
        shown="off",
        metavar="<JSON>",
    )

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.speculative_config is not None and self.speculate != "off":
            raise FieldError("speculative_config", "excludes speculate: give one, not both.")

    @property
    def source(self) -> Speculation:
        """Where guesses come from."""
        return self.speculate if self.speculative_config is None else self.speculative_config[0]

    @property
    def most(self) -> int:
        """Most tokens of an answer that are guessed in a step."""
        given = None if self.speculative_config is None else self.speculative_config[1]
        return self.speculate_tokens if given is None else given


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Checked):
    """Everything an engine is started with.

    `attention` is "cpu", the CPU's kernels, or a backend of `runner/torch/attention/registry.py`;
    "auto" takes the best one for the device. `batch_invariant` None is on where it
    can be kept; off, the fastest kernels are taken, whether they keep it or not. True is refused
    where it cannot be kept: by attention "torch", and on CUDA without FA3, which is for Hopper
    devices.
    """

    model: Annotated[str, MinLen(1)] = flag(
        DEFAULT_MODEL,
        "Alias, folder, GGUF file or hub id.",
        "Model",
        common=True,
    )
    revision: str | None = flag(None, "Branch, tag or commit of a hub id.", "Model")
    chat_template: Annotated[str, MinLen(1)] | None = flag(
        None,
        "File with a Jinja chat template, or its text, instead of the model's.",
        "Model",
        aliases=("chat_template_file",),
        shown="the model's",
        metavar="<file or text>",
    )
    dtype: DType = flag(
        "auto",
        "Type of the computation, of unquantized weights and of the cache. auto: bfloat16 for "
        "checkpoints of 16 bits where the device is fast at it, else float32.",
        "Model",
        common=True,
    )
    load_format: Literal["auto", "hf", "safetensors", "gguf"] = flag(
        "auto",
        "Required format of the weights: safetensors (hf is the same), or gguf for quantized "
        "ones, of a GGUF file or of prefixcache convert.",
        "Model",
    )
    quantization: Literal["auto", "none", "gguf"] = flag(
        "auto",
        "Require quantized weights (gguf) or unquantized ones (none); weights are served as "
        "they are.",
        "Model",
        aliases=("q",),
    )
    requantize: bool = flag(
        False,
        "On a weight update, quantize unquantized tensors to the format of those that they "
        "replace: q8_0, q4_0, q4_1, q5_0, q5_1 or mxfp4.",
        "Model",
    )
    weights_cache_dir: CacheFolder | None = flag(
        None,
        "Folder for weights in the layout of the CPU's kernels, which the next start maps; "
        "none keeps none. See docs/guides/weights.md.",
        "Model",
        shown="~/.cache/prefixcache/weights, for weights of 32MiB and more",
        metavar="<none or folder>",
    )
    weights_cache_size: ByteSize = flag(
        32 << 30,
        "Most bytes in --weights-cache-dir; the least recently used weights are removed first.",
        "Model",
        shown="32GiB",
        metavar="<bytes or size>",
    )
    device: Device = flag("auto", "Where to compute.", "Model", common=True)
    cpu_activations: ActivationChoice = flag(
        "auto",
        "Activation precision for quantized weights on a CPU: int8 as in llama.cpp, or exact, "
        "which is slower; auto is int8 for most formats. See docs/guides/weights.md.",
        "Model",
        common=True,
    )
    cpu_threads: Annotated[PositiveInt, Le(1024)] | None = flag(
        None,
        "Threads of a step on a CPU.",
        "Model",
        shown="the cores that the process may use",
        common=True,
    )
    cpu_instructions: str | None = flag(
        None,
        "Instruction set of the CPU's kernels instead of the best one: portable, avx2, avx512 "
        "or avx512_bf16, if the CPU has it.",
        "Model",
    )
    seed: Annotated[int, Ge(0), Le(2**64 - 1)] = flag(
        0,
        "Start of the series from which requests without a seed get theirs, in order of arrival.",
        "Model",
    )
    record_requests: FilePath | None = flag(
        None,
        "File to record requests and answers in, token by token, for `prefixcache rerun`. It "
        "holds users' text.",
        "Model",
        shown="nothing is recorded",
        metavar="<file>",
    )
    attention: Attention = flag("auto", "Attention backend.", "Model")
    batch_invariant: bool | None = flag(
        None,
        "Compute answers whose bits do not depend on the batch; fail if that is not possible.",
        "Model",
        shown="on for a CPU and for Hopper GPUs",
    )
    enforce_eager: bool = flag(False, "Run without CUDA graphs.", "Model")
    cache: CacheConfig = field(default_factory=CacheConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    @classmethod
    def from_flags(cls, **flags: Any) -> EngineConfig:
        """An `EngineConfig` from flat flags, named as its fields and those of its parts.

        A flag that is None keeps its default. Raises `ConfigError` for an unknown or wrong flag.
        """
        return build(cls, named(cls, flags))

    @property
    def gets_new_weights(self) -> bool:
        """Whether a trainer is to send weights, which compares log probabilities with its own."""
        return self.requantize or self.cache.max_weight_staleness != 0

    @property
    def activations(self) -> Activations:
        """What a CPU multiplies weights with; where "auto" was not settled, exact ones."""
        return "exact" if self.cpu_activations == "auto" else self.cpu_activations

    def on(self, device: str) -> EngineConfig:
        """The same with what is usual on that device where nothing is said."""
        return replace(self, scheduler=self.scheduler.on(device))

    def for_model(self, model: ModelConfig) -> EngineConfig:
        """The same with what is usual for this model: larger blocks and shorter steps with states.

        A snapshot stands where a step ends, so shorter steps let more prompts that part hit.
        """
        if model.states is None:
            return self
        size = max(self.cache.block_size, self.cache.state_block_size)
        seqs, tokens = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        most = tokens or max(_STATE_STEP_TOKENS, seqs or 0)
        return replace(
            self,
            cache=replace(self.cache, block_size=size),
            scheduler=replace(self.scheduler, max_num_batched_tokens=most),
        )

    def retention_interval(self, *, has_full_attention: bool) -> int | None:
        """`cache.prefix_cache_retention_interval` or its default; None keeps every block.

        Full attention's hits show later where prompts part, and its blocks want the room.
        """
        interval = self.cache.prefix_cache_retention_interval
        if interval is not None:
            return None if interval == "none" else interval
        if self.cache.pin_swa_tokens:
            return self.scheduler.limits().max_num_batched_tokens
        return 0 if has_full_attention else None

    @property
    def keeps_batch_invariant(self) -> bool:
        """Whether answers shall not depend on the batch where the device can keep it."""
        return self.batch_invariant is not False
