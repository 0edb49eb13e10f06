"""From an `EngineConfig` to a running engine: model, tokenizer, KV tensors, cache, scheduler."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from prefixcache._core import Cpu
from prefixcache.attention.grouped import GroupedAttention
from prefixcache.attention.registry import AttentionOptions, make_attention
from prefixcache.config.engine_config import Activations, CacheConfig, EngineConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine.device import (
    choose_device,
    is_sized_by_trial,
    kv_tensors,
    make_graphs,
    shares_answers,
    trial_blocks,
)
from prefixcache.engine.elastic import SelfSizing
from prefixcache.engine.engine import Engine, EngineParts
from prefixcache.engine.losses import LossReader
from prefixcache.engine.memory import ModelMemory
from prefixcache.engine.residency import BlockResidency
from prefixcache.engine.weights_names import content_name
from prefixcache.exceptions import ConfigError
from prefixcache.kv.cache_manager import CacheManager, fitting_tokens
from prefixcache.kv.elastic import ElasticPool
from prefixcache.kv.recording import RecordedCacheManager
from prefixcache.kv.retention import Retention
from prefixcache.kv.sizing import PoolSizes, choose_num_blocks, pool_sizes
from prefixcache.kv.specs import KVLayout, kv_layout
from prefixcache.kv.tensors import KVTensors, attention_groups
from prefixcache.kv.trace_writer import TraceWriter, check_folder
from prefixcache.models.checkpoint import model_digest, read_checkpoint
from prefixcache.models.decoder import DecoderModel
from prefixcache.models.hub import read_config, resolve_model
from prefixcache.models.loader import choose_dtype, load_model, make_model
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.ops.blocks import BLOCK_FORMATS
from prefixcache.ops.sets import torch_is_faster
from prefixcache.ops.threads import default_threads
from prefixcache.runner.decoder import Decoder
from prefixcache.runner.model_runner import ModelRunner
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.scheduler.step_time import StepTimeModel
from prefixcache.text.grammar.grammars import Grammars
from prefixcache.text.model_vocabulary import tokens_that_end, vocabulary_of
from prefixcache.text.tokenization.detokenizer import Detokenizers
from prefixcache.text.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine and what was chosen for it."""

    engine: Engine
    tokenizer: Tokenizer
    model: ModelConfig
    folder: Path
    dtype: str
    device: str
    attention: str
    activations: Activations
    batch_invariant: bool
    num_blocks: int
    max_model_len: int


def build(config: EngineConfig, folder: Path | None = None) -> BuiltEngine:
    """Loads the model and puts an engine around it.

    `folder` is where the model's files are, if that is known already. Raises `ConfigError`,
    `ModelLoadError` or `OutOfMemoryError`.
    """
    if config.cache.record_trace is not None:
        check_folder(config.cache.record_trace)
    folder = folder or resolve_model(config.model, config.revision)
    model_config = read_config(config.model, folder)
    device = choose_device(config)
    config = config.on(device.type)
    dtype = choose_dtype(config.dtype, model_config.checkpoint_dtype, device)
    tokenizer = Tokenizer.from_folder(folder)
    threads = config.cpu_threads or default_threads()
    cpu = _kernel_threads(config, device, threads)
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(read_checkpoint, folder, threads)
        model, attention, sizes, max_model_len = _model_and_pool(
            config, model_config, folder, dtype, device, cpu
        )
        checkpoint = reading.result()
    checkpoint.check_unchanged()
    make = partial(
        make_model,
        model_config,
        dtype=dtype,
        device=device,
        cpu=cpu,
        activations=config.cpu_activations,
        max_positions=max_model_len,
    )
    weights = ReplaceableModel(model, make, checkpoint, requantize=config.requantize)
    _check_quantized(config, weights)
    kv = kv_tensors(config, model, attention, sizes.start, sizes=sizes)
    runner = _runner(config, weights, attention, kv.layout, max_model_len, device)
    memory = ModelMemory(
        weights, kv, runner, lambda: make_graphs(config, weights.loaded, attention, max_model_len)
    )
    memory.make_kv()
    memory.settle()
    batch_invariant = attention.batch_invariant and config.keeps_batch_invariant(device.type)
    retention = Retention.of(config, kv.layout.kinds)
    writer = _trace_writer(config.cache)
    names = (model_digest(model_config), content_name(checkpoint.digest))
    cache = _make_cache(config, names, kv, sizes, retention, writer, merge_twins=batch_invariant)
    pool = ElasticPool(cache, kv, sizes, grows_by_itself=config.elastic.is_on)
    eos_token_ids = tokens_that_end(tokenizer, model_config)
    losses = LossReader(cache)
    parts = EngineParts(
        scheduler=_make_scheduler(config, cache, runner, max_model_len),
        cache=cache,
        runner=runner,
        make_detokenizer=Detokenizers(tokenizer),
        vocab_size=model_config.vocab_size,
        eos_token_ids=eos_token_ids,
        seed=config.seed,
        memory=memory,
        pool=pool,
        self_sizing=SelfSizing.of(config.elastic, pool, device) if config.elastic.is_on else None,
        residency=BlockResidency(cache, losses) if config.cache.kv_cache_metrics else None,
        losses=losses,
        grammars=Grammars(partial(vocabulary_of, tokenizer, model_config)),
    )
    engine = Engine(parts)
    if writer is not None:
        engine.metrics.of_recording = writer.families
    _log_choices(config, parts, kv, cpu, threads)
    _log_retention(config.cache, retention, cache, kv.layout, parts.scheduler.max_num_tokens)
    return BuiltEngine(
        engine=engine,
        tokenizer=tokenizer,
        model=model_config,
        folder=folder,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention=attention.name,
        activations=config.cpu_activations,
        batch_invariant=batch_invariant,
        num_blocks=sizes.start,
        max_model_len=max_model_len,
    )


def _make_cache(
    config: EngineConfig,
    names: tuple[str, str],
    kv: KVTensors,
    sizes: PoolSizes,
    retention: Retention,
    writer: TraceWriter | None,
    *,
    merge_twins: bool,
) -> CacheManager:
    """The cache of the blocks of `kv`; `writer` records what it is asked.

    `names` are what its hashes call the model and the weights.
    """
    model, weights = names
    make = partial(RecordedCacheManager, writer=writer) if writer else CacheManager
    return make(
        sizes.start,
        config.cache.block_size,
        model=model,
        weights=weights,
        kv_dtype=str(kv.dtype).removeprefix("torch."),
        arithmetic=_arithmetic(config, kv.dtype),
        groups=kv.layout.kinds,
        eviction_policy=config.cache.eviction_policy,
        retention=retention,
        retention_budget=config.cache.retention_budget,
        publish_answers=shares_answers(kv.attention),
        merge_twins=config.cache.merge_duplicate_blocks and merge_twins,
        max_blocks=sizes.ceiling,
        max_cached_blocks=config.cache.prefix_cache_max_blocks,
    )


def _make_scheduler(
    config: EngineConfig,
    cache: CacheManager,
    runner: ModelRunner,
    max_model_len: int,
) -> Scheduler:
    max_step_ms = config.scheduler.limits().max_step_ms
    return Scheduler(
        config.scheduler,
        cache,
        max_model_len=max_model_len,
        enable_prefix_caching=_caches_prefixes(config.cache, runner),
        step_times=StepTimeModel() if max_step_ms else None,
        max_step_ms=max_step_ms,
    )


def _trace_writer(config: CacheConfig) -> TraceWriter | None:
    """Raises `ConfigError` where the file cannot be made."""
    if config.record_trace is None:
        return None
    return TraceWriter(config.record_trace, config.record_trace_max_size)


def _arithmetic(config: EngineConfig, dtype: torch.dtype) -> str:
    """The arithmetic's name in the root of the cache's hashes: none hits what another computed."""
    name = str(dtype).removeprefix("torch.")
    if config.cpu_instructions is not None:
        name = f"{name}/{config.cpu_instructions}"
    return name if config.cpu_activations == "exact" else f"{name}, {config.cpu_activations}"


def _check_quantized(config: EngineConfig, weights: ReplaceableModel) -> None:
    """Raises `ConfigError` where int8 activations are asked for and there are no blocks."""
    if config.cpu_activations == "exact" or set(weights.info.formats) & set(BLOCK_FORMATS):
        return
    raise ConfigError(
        "cpu_activations must be exact: no weight of this model is kept in blocks. Serve a "
        "quantized GGUF file, or a folder that `prefixcache convert --quantize` made."
    )


def _log_choices(
    config: EngineConfig, parts: EngineParts, kv: KVTensors, cpu: Cpu | None, threads: int
) -> None:
    """What was chosen where nothing was said, in one line."""
    of_cpu = f" with {threads} threads" if kv.device.type == "cpu" else ""
    kernels = "" if cpu is None else f" ({cpu.instructions})"
    limits = config.scheduler.limits()
    logger.info(
        "%s on %s%s%s, attention %s. KV cache: %d blocks of %d tokens (%.2f GiB)%s, "
        "prefix cache %s, eviction %s. A sequence has at most %d tokens, a step %d sequences and "
        "%d tokens.",
        str(kv.dtype).removeprefix("torch."),
        kv.device,
        of_cpu,
        kernels,
        kv.attention.name,
        kv.num_blocks,
        kv.block_size,
        kv.num_bytes / 2**30,
        _describe_groups(kv.layout),
        "on" if parts.scheduler.caches_prefixes else "off",
        config.cache.eviction_policy,
        parts.scheduler.max_num_tokens,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )


def _log_retention(
    config: CacheConfig,
    retention: Retention,
    cache: CacheManager,
    layout: KVLayout,
    max_model_len: int,
) -> None:
    """What is pinned, or which flags change nothing."""
    flags = {
        "--pin-swa-tokens": config.pin_swa_tokens,
        "--prefix-cache-retention-interval": config.prefix_cache_retention_interval is not None,
    }
    given = " and ".join(name for name, is_given in flags.items() if is_given)
    if given and not cache.has_windows:
        logger.warning("Without effect: %s. No layer of this model has a sliding window.", given)
    elif retention.pin:
        windows = [group.sliding_window for group in layout.groups]
        line = retention.describe_pins(
            cache.num_usable_blocks, cache.block_size, windows, max_model_len
        )
        logger.info(line)


def _describe_groups(layout: KVLayout) -> str:
    """The clause of the start line on several groups of layers; nothing where there is one."""
    if len(layout.groups) == 1:
        return ""
    num_groups, num_full = len(layout.groups), layout.kinds.count("full")
    return (
        f" for {num_groups} groups of layers (full {num_full}, window {num_groups - num_full}; "
        f"size {layout.num_tensors}, padded {layout.num_padded})"
    )


def _caches_prefixes(config: CacheConfig, runner: ModelRunner) -> bool:
    """Whether the prefix cache is on: if it is wanted, and the runner can do it."""
    if config.enable_prefix_caching and not runner.shares_kv:
        logger.warning("The prefix cache is off: this runner cannot share KV between requests.")
    return config.enable_prefix_caching and runner.shares_kv


def _max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The context length, lowered to what the pool holds unless it was asked for."""
    longest = config.scheduler.context_length(model)
    kinds = kv_layout(model).kinds
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


def _model_and_pool(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    cpu: Cpu | None,
) -> tuple[DecoderModel, GroupedAttention, PoolSizes, int]:
    """The loaded model, its attention without a pool, the pool's sizes and the context length.

    Where a trial step sizes the pool, the model must be there first.
    """
    layout = kv_layout(model_config)
    load = partial(
        load_model,
        model_config,
        folder,
        dtype=dtype,
        device=device,
        cpu=cpu,
        activations=config.cpu_activations,
    )
    sized = partial(
        pool_sizes,
        config.cache,
        block_bytes=layout.bytes_per_block(config.cache.block_size, dtype.itemsize),
        device=device,
    )
    if is_sized_by_trial(config, device):
        longest = config.scheduler.context_length(model_config)
        model = load(max_positions=longest)
        attention = _attention(config, model, cpu)
        sizes = sized(trial_blocks(config, model, attention, longest))
        max_model_len = _max_model_len(config, model_config, sizes.ceiling)
    else:
        sizes = sized(choose_num_blocks(config.cache, layout, dtype, device))
        max_model_len = _max_model_len(config, model_config, sizes.ceiling)
        model = load(max_positions=max_model_len)
        attention = _attention(config, model, cpu)
    return model, attention, sizes, max_model_len


def _kernel_threads(config: EngineConfig, device: torch.device, threads: int) -> Cpu | None:
    """The threads of the CPU's own kernels; None where torch's kernels are used, or another device.

    Torch then has one thread: its OpenMP threads spin after each op, on the cores of ours.

    Raises `ConfigError` where int8 activations are asked for, which those alone know.

    Where the batch may change an answer's bits, the faster ones are used, which are most often ours
    too; `attention="torch"` then asks for torch's throughout.
    """
    quantizes = config.cpu_activations == "int8"
    own = device.type == "cpu"
    if own and not config.keeps_batch_invariant(device.type):
        own = config.attention != "torch" and (quantizes or not torch_is_faster())
    if quantizes and not own:
        raise ConfigError(
            f"cpu_activations must be exact on {device} with attention {config.attention}: int8 "
            "needs the CPU's own kernels."
        )
    if device.type == "cpu":
        torch.set_num_threads(1 if own else threads)
    return _make_cpu(threads, config.cpu_instructions) if own else None


def _make_cpu(threads: int, instructions: str | None) -> Cpu:
    """Raises `ConfigError` where the processor has no such instructions."""
    available = Cpu.available_instructions()
    if instructions is not None and instructions not in available:
        raise ConfigError(
            f"cpu_instructions must be one of {', '.join(available)} on this processor, "
            f"not {instructions}."
        )
    return Cpu(threads, instructions)


def _attention(config: EngineConfig, model: DecoderModel, cpu: Cpu | None) -> GroupedAttention:
    """Raises `ConfigError` where it cannot keep what is asked for."""
    options = AttentionOptions(
        device=model.device,
        dtype=model.dtype,
        batch_invariant=config.keeps_batch_invariant(model.device.type),
        cpu=cpu,
    )
    groups = attention_groups(kv_layout(model.config), model.attention_spec)
    attention = make_attention(config.attention, groups, options)
    if config.batch_invariant and not attention.batch_invariant:
        raise ConfigError(
            f"batch_invariant cannot be kept on {model.device} by attention {attention.name}. It "
            "is on a CPU by attention cpu, and on CUDA by flashinfer where the device is a Hopper "
            "one (compute capability 9.0): use one of these, or leave --batch-invariant out."
        )
    return attention


def _runner(
    config: EngineConfig,
    model: Decoder,
    attention: GroupedAttention,
    layout: KVLayout,
    max_model_len: int,
    device: torch.device,
) -> ModelRunner:
    """A runner without graphs: those need the KV tensors."""
    limits = config.scheduler.limits()
    max_tokens = limits.max_num_batched_tokens
    return ModelRunner(
        model,
        attention,
        max_tokens=max_tokens,
        max_seqs=limits.max_num_seqs,
        max_pages=layout.most_pages(max_model_len, max_tokens, config.cache.block_size),
        device=device,
    )
