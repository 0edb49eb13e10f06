"""The runner of a CPU, which needs no torch: numpy and our own kernels."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from prefixcache._core import Cpu
from prefixcache.config.engine_config import Activations, EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import FieldError
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.kv_folder import (
    FileLayout,
    KeptFile,
    kv_file_name,
    open_kept_file,
    program_digest,
)
from prefixcache.kv.specs import KVLayout
from prefixcache.kv.tiers.disk_store import generation_file
from prefixcache.kv.tiers.host_blocks import HostBlocks, disk_folder, scope_of
from prefixcache.models.arrays import DTYPES
from prefixcache.models.checkpoint import (
    Checkpoint,
    model_digest,
    read_checkpoint,
    remembered_checkpoint,
)
from prefixcache.models.gguf.index import has_index
from prefixcache.models.laid_out.weights_folder import (
    WeightsCache,
    default_folder,
    num_bytes_of,
)
from prefixcache.models.loader import choose_dtype, load_model
from prefixcache.models.quantized import QUANT_FORMATS
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.base import KVSpecs, ModelMemory, ModelSpec
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.runner.cpu.linear import KernelDType
from prefixcache.runner.cpu.model import CpuModel, attention_kernels
from prefixcache.runner.cpu.sampler import Sampler
from prefixcache.runner.cpu.step import StepComputer
from prefixcache.runner.sizing import (
    available_memory,
    check_kv_dtype,
    choose_num_blocks,
    fitting_model_len,
    host_memory,
    layout_of,
    pool_sizes,
)
from prefixcache.runner.threads import num_threads
from prefixcache.types.step_plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

KERNEL_REVISION = 1
"""Of the bits that the CPU's kernels compute: a change that rounds otherwise raises it."""
_LEAST_CACHED_BYTES = 32 << 20
"""Of a model whose weights are kept laid out if nothing is said: smaller ones load at once."""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step, all of which is computed."""

    result: StepResult
    is_known = True


class CpuRunner:
    """See `Runner`. Raises `FieldError` for instructions that the processor does not have."""

    device = "cpu"
    shares_kv = True
    runs_ahead = False

    def __init__(self, config: EngineConfig) -> None:
        self._config = config.on("cpu")
        self._cpu = _make_cpu(num_threads(config.cpu_threads), config.cpu_instructions)

    @property
    def block_tables(self) -> Sequence[BlockTableBuffers]:
        """See `StepRunner`."""
        return self._steps.block_tables

    def load(self, model: ModelConfig, folder: Path) -> ModelSpec:
        """See `Runner`. The weights are read for their digest in parallel."""
        config, cpu = self._config, self._cpu
        dtype = _choose_dtype(config, model, cpu, folder)
        check_kv_dtype(config.cache, dtype)
        layout = layout_of(config, model, DTYPES[dtype].itemsize)
        attentions = attention_kernels(model, layout, cpu, dtype)
        specs = _kv_specs(config, layout, DTYPES[dtype].itemsize)
        max_model_len = fitting_model_len(config, model, layout, specs.sizes.ceiling)
        facts = _kv_facts(config, layout, dtype)
        if facts:
            _log_unread_kv(config, model, cpu, folder)
        layout_on_disk = _file_layout(config.cache, specs, facts)
        make = partial(CpuModel, model, cpu, dtype, max_model_len, config.activations)
        cache = _weights_cache(config, model, dtype, cpu)
        loaded, checkpoint, mapped = _load_weights(make, model, folder, cache, cpu.threads)
        weights = ReplaceableModel(loaded, make, checkpoint, requantize=config.requantize)
        weights.info = replace(weights.info, mapped_bytes=mapped)
        _check_quantized(config, weights.info.formats)
        specs = replace(specs, file=_kept_file(config.cache, layout_on_disk, specs))
        self.kv = _kv_memory(config, specs, DTYPES[dtype].itemsize)
        self.memory = ModelMemory(weights, self.kv)
        self.memory.make_kv()
        self._specs = replace(specs, host_blocks=_host_blocks(self.kv, facts))
        tables = self._make_tables(layout, max_model_len)
        self._steps = StepComputer(weights, attentions, self.kv, tables, Sampler(cpu))
        return ModelSpec(
            dtype=dtype,
            kv_dtype=_kv_dtype(config, dtype),
            hardware=f"cpu with {cpu.threads} threads ({cpu.instructions})",
            attention="cpu",
            batch_invariant=True,
            max_model_len=max_model_len,
            weights_digest=checkpoint.digest,
            instructions=cpu.instructions,
            kernel_revision=KERNEL_REVISION,
        )

    def _make_tables(self, layout: KVLayout, max_model_len: int) -> list[BlockTableBuffers]:
        limits = self._config.scheduler.limits()
        chunk = limits.max_num_batched_tokens
        return [
            BlockTableBuffers.of_size(
                max_tokens=chunk, max_seqs=limits.max_num_seqs, max_pages=max_pages
            )
            for max_pages in layout.most_pages(max_model_len, chunk, self._config.cache.block_size)
        ]

    def kv_specs(self) -> KVSpecs:
        """See `Runner`."""
        return self._specs

    def submit(self, plan: StepPlan) -> ComputedStep:
        """See `StepRunner`."""
        return ComputedStep(self._steps.compute(plan))

    def results(self, step: ComputedStep) -> StepResult:
        """See `StepRunner`."""
        return step.result

    def run_empty_step(self) -> None:
        """See `StepRunner`."""
        self._steps.compute_nothing()

    def available_memory(self) -> int:
        """See `Runner`."""
        return available_memory()


def _make_cpu(threads: int, instructions: str | None) -> Cpu:
    """Raises `FieldError` where the processor has no such instructions."""
    available = Cpu.available_instructions()
    if instructions is not None and instructions not in available:
        raise FieldError(
            "cpu_instructions",
            f"must be one of {', '.join(available)} on this processor, not {instructions}.",
        )
    return Cpu(threads, instructions)


def _load_weights(
    make: Callable[[], CpuModel],
    model: ModelConfig,
    folder: Path,
    cache: WeightsCache | None,
    threads: int,
) -> tuple[CpuModel, Checkpoint, int]:
    """The filled model, and how many bytes of it are mapped from `cache`.

    What is not is read, for its digest in parallel.
    """
    remembered = remembered_checkpoint(folder)
    mapped = 0

    def restore(made: CpuModel) -> Collection[str]:
        nonlocal mapped
        if cache is None or remembered is None:
            return ()
        parts = made.laid_out()
        names = cache.restore(remembered.digest, parts)
        mapped = num_bytes_of({name: parts[name] for name in names})
        return names

    with ThreadPoolExecutor(1) as digests:
        reading = digests.submit(lambda: remembered or read_checkpoint(folder, threads))
        loaded = load_model(make, model, folder, restore)
        checkpoint = reading.result()
    checkpoint.check_unchanged()
    if cache is not None:
        cache.keep(checkpoint.digest, loaded.laid_out())
    return loaded, checkpoint, mapped


def _weights_cache(
    config: EngineConfig, model: ModelConfig, dtype: str, cpu: Cpu
) -> WeightsCache | None:
    folder = config.weights_cache_dir
    if folder == "none":
        return None
    facts = {
        "model": model_digest(model),
        "dtype": dtype,
        "instructions": cpu.instructions,
        "activations": config.activations,
        "program": program_digest(),
    }
    return WeightsCache(
        folder or default_folder(),
        config.weights_cache_size,
        0 if folder else _LEAST_CACHED_BYTES,
        facts,
        cpu.threads,
    )


def _choose_dtype(config: EngineConfig, model: ModelConfig, cpu: Cpu, folder: Path) -> KernelDType:
    # Plain AVX-512 multiplies dense bfloat16, which is half as large, but blocks faster in float32.
    is_dense = config.activations == "int8" or not has_index(folder)
    has_products = cpu.instructions == "avx512_bf16" or (cpu.instructions == "avx512" and is_dense)
    dtype = choose_dtype(config.dtype, model.checkpoint_dtype, multiplies_bfloat16=has_products)
    return cast("KernelDType", dtype)


def _kv_specs(config: EngineConfig, layout: KVLayout, itemsize: int) -> KVSpecs:
    memory = host_memory()
    block_bytes = layout.bytes_per_block(config.cache.block_size, itemsize)
    start = choose_num_blocks(config.cache, layout, itemsize, memory)
    return KVSpecs(layout, pool_sizes(config.cache, start, block_bytes, memory))


def _kv_memory(config: EngineConfig, specs: KVSpecs, itemsize: int) -> KVMemory:
    return KVMemory(
        layout=specs.layout,
        num_blocks=specs.sizes.start,
        block_size=config.cache.block_size,
        itemsize=itemsize,
        free_memory=available_memory,
        max_blocks=specs.sizes.ceiling,
        file=specs.file,
    )


def _kv_dtype(config: EngineConfig, dtype: str) -> str:
    """What keys and values are kept as."""
    return "int8" if config.cache.kv_cache_dtype == "int8" else dtype


def _kv_facts(config: EngineConfig, layout: KVLayout, dtype: str) -> Mapping[str, object]:
    """All that the bytes of a block depend on besides its hash, which the arithmetic enters."""
    cache = config.cache
    if not cache.enable_prefix_caching or (cache.kv_cache_dir or cache.disk_cache_memory) is None:
        return {}
    return {
        "dtype": dtype,
        "kept as": _kv_dtype(config, dtype),
        "program": program_digest(),
        "block size": cache.block_size,
        "heads": layout.num_kv_heads,
        "head size": layout.head_dim,
        "groups": layout.kinds,
        "layers": [group.layers for group in layout.groups],
        "heads of groups": [group.heads for group in layout.groups],
        "convolutions": [
            (group.conv_width, group.kept_tokens, group.layers_per_tensor)
            for group in layout.groups
        ],
        "states": [dataclasses.astuple(part) for part in layout.states],
        **({"activations": "int8"} if config.activations == "int8" else {}),
    }


def _log_unread_kv(config: EngineConfig, model: ModelConfig, cpu: Cpu, folder: Path) -> None:
    """Says so where KV was kept of the other activations, and none yet of those of now."""
    other: Activations = "int8" if config.activations == "exact" else "exact"
    mine, theirs = (
        any(place.exists() for place in _kept_places(each, model, cpu, folder))
        for each in (config, replace(config, cpu_activations=other))
    )
    if theirs and not mine:
        logger.warning(
            "Nothing that was kept hits: it was computed with --cpu-activations %s, and this "
            "server computes with %s. It stays, and --cpu-activations %s reads it again.",
            *(other, config.activations, other),
        )


def _kept_places(
    config: EngineConfig, model: ModelConfig, cpu: Cpu, folder: Path
) -> Iterator[Path]:
    """The file that KV of these activations is kept in, or that is there while the disk has any."""
    cache = config.cache
    dtype = _choose_dtype(config, model, cpu, folder)
    itemsize = DTYPES[dtype].itemsize
    layout = layout_of(config, model, itemsize)
    facts = _kv_facts(config, layout, dtype)
    if cache.kv_cache_dir is not None:
        yield cache.kv_cache_dir / kv_file_name(facts)
    if cache.disk_cache_memory is not None:
        scope = scope_of(facts, layout.bytes_per_block(cache.block_size, itemsize))
        yield generation_file(disk_folder(cache), scope)


def _host_blocks(kv: KVMemory, facts: Mapping[str, object]) -> HostBlocks | None:
    if not facts:
        return None
    return HostBlocks(
        addresses=kv.addresses,
        tensor_block_bytes=kv.bytes_per_tensor_block,
        block_bytes=kv.bytes_per_block,
        num_blocks=kv.most_blocks,
        facts=facts,
        owner=kv,
        before_load=kv.before_load,
    )


def _file_layout(
    cache: CacheConfig, specs: KVSpecs, facts: Mapping[str, object]
) -> FileLayout | None:
    """What the file of `kv_cache_dir` is of. Raises `FieldError` where that is too small for it."""
    layout, sizes = specs.layout, specs.sizes
    if cache.kv_cache_dir is None or not facts:
        return None
    wanted = FileLayout(
        facts=facts,
        num_tensors=layout.num_tensors,
        block_bytes=sizes.block_bytes // layout.num_tensors,
        max_blocks=sizes.ceiling,
        block_tokens=cache.block_size,
    )
    most = cache.kv_cache_dir_size
    if most is not None and most < wanted.num_bytes:
        raise FieldError(
            "kv_cache_dir_size",
            f"must be at least {wanted.num_bytes} bytes, which the KV cache takes, got {most}.",
        )
    return wanted


def _kept_file(cache: CacheConfig, wanted: FileLayout | None, specs: KVSpecs) -> KeptFile | None:
    """The file of that layout, where there can be one."""
    if wanted is None or cache.kv_cache_dir is None:
        return None
    return open_kept_file(cache.kv_cache_dir, wanted, specs.sizes.start, cache.kv_cache_dir_size)


def _check_quantized(config: EngineConfig, formats: Collection[str]) -> None:
    """Raises `FieldError` where int8 activations are asked for and nothing is quantized."""
    if config.activations == "exact" or set(formats) & set(QUANT_FORMATS):
        return
    raise FieldError(
        "cpu_activations",
        "must be exact: no weight of this model is quantized. Serve a quantized GGUF file, or a "
        "folder that `prefixcache convert --quantize` made.",
    )
