"""From an `EngineConfig` to a running engine: runner, tokenizer, cache, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixcache._core import DraftIndex
from prefixcache.config.engine_config import Activations, EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.engine_parts.speculation_config import SpeculationConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine.engine import Engine
from prefixcache.engine.request_rules import RequestRules
from prefixcache.engine.residency import BlockResidency
from prefixcache.engine.runners import choose_runner, needs_torch
from prefixcache.engine.sizing.elastic import SelfSizing
from prefixcache.engine.weight_versions import content_name
from prefixcache.exceptions import FieldError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_settings import CacheSettings
from prefixcache.kv.elastic import ElasticPool
from prefixcache.kv.kv_folder import KeptFile, program_digest
from prefixcache.kv.recordings.record_writer import check_folder
from prefixcache.kv.recordings.recording import CacheRecorder
from prefixcache.kv.recordings.trace_writer import TraceWriter
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import KVLayout
from prefixcache.kv.tiers.host_blocks import disk_folder, make_disk_tier
from prefixcache.models.checkpoint import model_digest
from prefixcache.models.gguf.index import has_index, read_index
from prefixcache.models.hub import check_complete, read_config, resolve_model
from prefixcache.models.quantized import INT8_FORMATS, QUANT_FORMATS
from prefixcache.runner.base import KVSpecs, ModelSpec, Runner
from prefixcache.scheduler.drafts import Drafter
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.scheduler.step_time import RowTimes, StepTimeModel
from prefixcache.text.grammar.grammars import Grammars
from prefixcache.text.grammar.vocabulary import tokens_that_end, vocabulary_of
from prefixcache.text.tokenization.chat_template import read_template
from prefixcache.text.tokenization.detokenizer import Detokenizers
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.step_plan import SuppressedTokens

if TYPE_CHECKING:
    from prefixcache.kv.recordings.request_records import RequestRecords

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine and what was chosen for it.

    `arithmetic` is all that the bits of an answer depend on besides the request and the weights.
    """

    engine: Engine
    tokenizer: Tokenizer
    model: ModelConfig
    folder: Path
    dtype: str
    kv_dtype: str
    device: str
    attention: str
    activations: Activations
    batch_invariant: bool
    num_blocks: int
    max_model_len: int
    arithmetic: Mapping[str, object]


def build(
    config: EngineConfig,
    folder: Path | None = None,
    make_runner: Callable[[EngineConfig], Runner[Any]] = choose_runner,
) -> BuiltEngine:
    """Loads the model and puts an engine around it.

    `folder` is where the model's files are, if that is known already. Raises `ConfigError`,
    `ModelLoadError` or `OutOfMemoryError`.
    """
    if config.cache.record_trace is not None:
        check_folder(config.cache.record_trace, "record_trace")
    if config.record_requests is not None:
        check_folder(config.record_requests, "record_requests")
    template = read_template(config.chat_template)
    folder = folder or resolve_model(config.model, config.revision)
    check_weight_format(config, folder)
    check_complete(folder)
    model = read_config(config.model, folder)
    model = model.for_length(config.scheduler.context_length(model))
    config = _with_activations(config.for_model(model), folder)
    runner = make_runner(config)
    config = config.on(runner.device)
    with ThreadPoolExecutor(1) as loads:
        reading = loads.submit(Tokenizer.from_folder, folder, template)
        spec = runner.load(model, folder)
        tokenizer = reading.result()
    kv = runner.kv_specs()
    retention = Retention.of(config, kv.layout.kinds)
    writer = _trace_writer(config.cache)
    cache = _make_cache(config, model, spec, kv, retention, writer)
    _start_tiers(cache, kv.file, config.cache)
    arithmetic = _all_arithmetic(config, model, spec)
    scheduler = _make_scheduler(config, model, cache, runner, spec.max_model_len)
    log_pins = partial(
        _log_pins, config.cache, retention, cache, kv.layout, scheduler.limits.max_num_tokens_now
    )
    pool = ElasticPool(
        cache,
        runner.kv,
        kv.sizes,
        grows_by_itself=config.elastic.is_on,
        bounds_memory=config.cache.prefix_cache_max_blocks is not None,
        after_resize=log_pins,
    )
    sizing = None
    if config.elastic.is_on:
        sizing = SelfSizing.of(config.elastic, pool, runner.available_memory)
    engine = Engine(
        scheduler=scheduler,
        cache=cache,
        runner=runner,
        rules=RequestRules(
            model.vocab_size,
            tokens_that_end(tokenizer, model),
            suppressed=SuppressedTokens.of(
                model.generation.suppress_tokens,
                model.generation.begin_suppress_tokens,
                model.vocab_size,
            ),
            grammars=Grammars(partial(vocabulary_of, tokenizer, model)),
            seed=config.seed,
        ),
        make_detokenizer=Detokenizers(tokenizer),
        memory=runner.memory,
        pool=pool,
        self_sizing=sizing,
        records=_request_records(config, arithmetic | {"max_model_len": spec.max_model_len}),
    )
    if config.cache.kv_cache_metrics:
        engine.metrics.more.append(BlockResidency(cache, engine.evictions).families)
    if writer is not None:
        engine.metrics.more.append(writer.families)
    if model.generation.not_obeyed:
        names = ", ".join(model.generation.not_obeyed)
        logger.warning("generation_config.json has fields that are not obeyed: %s.", names)
    _log_choices(config, scheduler, spec, kv)
    _warn_of_flags(config.cache, cache)
    log_pins()
    return BuiltEngine(
        engine=engine,
        tokenizer=tokenizer,
        model=model,
        folder=folder,
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype,
        device=runner.device,
        attention=spec.attention,
        activations=config.activations,
        batch_invariant=spec.batch_invariant,
        num_blocks=kv.sizes.start,
        max_model_len=spec.max_model_len,
        arithmetic=arithmetic,
    )


def check_weight_format(config: EngineConfig, folder: Path) -> None:
    """Raises `FieldError` where the folder's weights are others than `config` requires."""
    is_gguf = has_index(folder)
    form = "tensors of a GGUF file" if is_gguf else "safetensors"
    for name in ("load_format", "quantization"):
        value = getattr(config, name)
        if value != "auto" and (value == "gguf") != is_gguf:
            problem = f"{value}: the model's weights are {form}, and are served as they are."
            raise FieldError(name, problem)


def _with_activations(config: EngineConfig, folder: Path) -> EngineConfig:
    """Settles "auto": int8 where the CPU's own kernels compute and all formats bear it.

    It is exact for rollouts: a trainer does not round activations.
    """
    if config.cpu_activations != "auto":
        if config.activations == "int8" and config.gets_new_weights:
            logger.warning(
                "Answers are computed with int8 activations, and new weights are expected: log "
                "probabilities differ from those of a trainer. --cpu-activations exact rounds none."
            )
        return config
    tensors = read_index(folder).tensors if has_index(folder) else ()
    formats = {tensor.format for tensor in tensors if tensor.format in QUANT_FORMATS}
    bears_it = bool(formats) and formats <= INT8_FORMATS
    is_int8 = bears_it and not config.gets_new_weights and not needs_torch(config)
    return replace(config, cpu_activations="int8" if is_int8 else "exact")


def _make_cache(
    config: EngineConfig,
    model: ModelConfig,
    spec: ModelSpec,
    kv: KVSpecs,
    retention: Retention,
    writer: TraceWriter | None,
) -> CacheManager:
    """The cache of the pool's blocks; `writer` records what it is asked."""
    settings = CacheSettings(
        num_blocks=kv.sizes.start,
        block_size=config.cache.block_size,
        model=model_digest(model),
        weights=content_name(spec.weights_digest),
        kv_dtype=spec.kv_dtype,
        arithmetic=_hashed_arithmetic(config, spec),
        groups=kv.layout.kinds,
        eviction_policy=config.cache.eviction_policy,
        retention_budget=config.cache.retention_budget,
        max_blocks=kv.sizes.ceiling,
        max_cached_blocks=config.cache.prefix_cache_max_blocks,
    )
    return CacheManager(
        settings,
        retention=retention,
        merge_twins=config.cache.merge_duplicate_blocks and spec.batch_invariant,
        max_weight_staleness=config.cache.max_weight_staleness,
        disk=None if kv.host_blocks is None else make_disk_tier(config.cache, kv.host_blocks),
        recorder=writer and CacheRecorder(writer),
    )


def _start_tiers(cache: CacheManager, file: KeptFile | None, config: CacheConfig) -> None:
    begun = time.perf_counter()
    cache.start_tiers(file)
    if file is not None:
        logger.info(
            "The KV cache is kept in %s: %d blocks were restored, %d dropped, in %.0f ms.",
            file.path,
            file.num_restored,
            file.num_dropped,
            (time.perf_counter() - begun) * 1000,
        )
    if cache.disk is not None:
        logger.info(
            "Blocks that are evicted go to the disk of %s, up to %.2f GiB of them.",
            disk_folder(config),
            (config.disk_cache_memory or 0) / 2**30,
        )


def _make_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    cache: CacheManager,
    runner: Runner[Any],
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
        drafter=_make_drafter(config.speculation),
        computes_once=model.states is not None,
    )


def _make_drafter(config: SpeculationConfig) -> Drafter | None:
    if config.source == "off":
        return None
    return Drafter(
        DraftIndex(config.speculate_history),
        RowTimes(),
        shares=config.source == "cache",
        most=config.most,
    )


def _trace_writer(config: CacheConfig) -> TraceWriter | None:
    """Raises `ConfigError` where the file cannot be made."""
    if config.record_trace is None:
        return None
    return TraceWriter(config.record_trace, config.record_trace_max_size)


def _request_records(config: EngineConfig, about: Mapping[str, object]) -> RequestRecords | None:
    """Raises `ConfigError` where the file cannot be made."""
    if config.record_requests is None:
        return None
    from prefixcache.kv.recordings.request_records import RequestRecords

    named = {"model": config.model, "revision": config.revision}
    return RequestRecords(config.record_requests, {**named, **about})


def _all_arithmetic(config: EngineConfig, model: ModelConfig, spec: ModelSpec) -> dict[str, object]:
    return {
        "architecture": model_digest(model),
        "dtype": spec.dtype,
        "kv_dtype": spec.kv_dtype,
        "activations": config.activations,
        "instructions": spec.instructions,
        "attention": spec.attention,
        "batch_invariant": spec.batch_invariant,
        "program": program_digest(),
    }


def _hashed_arithmetic(config: EngineConfig, spec: ModelSpec) -> str:
    """The arithmetic's name in the root of the cache's hashes: none hits what another computed."""
    exact = config.activations == "exact"
    return spec.arithmetic if exact else f"{spec.arithmetic}, {config.activations}"


def _log_choices(config: EngineConfig, scheduler: Scheduler, spec: ModelSpec, kv: KVSpecs) -> None:
    """What was chosen where nothing was said, in one line."""
    limits = config.scheduler.limits()
    logger.info(
        "%s%s on %s, attention %s. KV cache in %s: %d blocks of %d tokens (%.2f GiB)%s, "
        "prefix cache %s, eviction %s. A sequence has at most %d tokens, a step %d sequences and "
        "%d tokens.",
        spec.dtype,
        "" if config.activations == "exact" else " with int8 activations",
        spec.hardware,
        spec.attention,
        spec.kv_dtype,
        kv.sizes.start,
        config.cache.block_size,
        kv.sizes.start * kv.sizes.block_bytes / 2**30,
        _describe_groups(kv.layout),
        "on" if scheduler.admission.enabled else "off",
        config.cache.eviction_policy,
        scheduler.limits.max_num_tokens_now,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )


def _warn_of_flags(config: CacheConfig, cache: CacheManager) -> None:
    """Which flags change nothing."""
    flags = {
        "--pin-swa-tokens": config.pin_swa_tokens,
        "--prefix-cache-retention-interval": config.prefix_cache_retention_interval is not None,
    }
    given = " and ".join(name for name, is_given in flags.items() if is_given)
    if given and not cache.has_windows:
        logger.warning("Without effect: %s. No layer of this model has a sliding window.", given)


def _log_pins(
    config: CacheConfig,
    retention: Retention,
    cache: CacheManager,
    layout: KVLayout,
    max_model_len: int,
) -> None:
    """What is pinned, now and after each resize."""
    if not (retention.pin and cache.has_windows):
        return
    line = retention.describe_pins(
        cache.size.num_usable_blocks,
        cache.block_size,
        [group.sliding_window for group in layout.groups],
        max_model_len,
        config.prefix_cache_max_blocks,
    )
    logger.info(line)


def _describe_groups(layout: KVLayout) -> str:
    """The clause of the start line on several groups of layers; nothing where there is one."""
    if len(layout.groups) == 1:
        return ""
    num_groups, num_full = len(layout.groups), layout.kinds.count("full")
    num_convs = sum(group.conv_width > 0 for group in layout.groups)
    num_states = sum(group.state_tensors > 0 for group in layout.groups)
    others = f", convolution {num_convs}" if num_convs else ""
    others += f", state {num_states}" if num_states else ""
    return (
        f" for {num_groups} groups of layers (full {num_full}, "
        f"window {num_groups - num_full - num_convs - num_states}{others}; "
        f"size {layout.num_tensors}, padded {layout.num_padded})"
    )


def _caches_prefixes(config: CacheConfig, runner: Runner[Any]) -> bool:
    """Whether the prefix cache is on: if it is wanted, and the runner can do it."""
    if config.enable_prefix_caching and not runner.shares_kv:
        logger.warning("The prefix cache is off: this runner cannot share KV between requests.")
    return config.enable_prefix_caching and runner.shares_kv
