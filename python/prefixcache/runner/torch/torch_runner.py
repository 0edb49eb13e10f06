"""The runner on torch: CUDA, and a CPU with torch's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import FieldError
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.specs import PoolSizes
from prefixcache.models.checkpoint import read_checkpoint
from prefixcache.models.loader import choose_dtype, load_model
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.base import KVSpecs, ModelSpec
from prefixcache.runner.sizing import (
    check_kv_dtype,
    choose_num_blocks,
    fitting_model_len,
    layout_of,
    pool_sizes,
)
from prefixcache.runner.threads import num_threads
from prefixcache.runner.torch.attention.grouped import GroupedAttention
from prefixcache.runner.torch.attention.registry import AttentionOptions, make_attention
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.device import (
    choose_device,
    device_memory,
    is_sized_by_run,
    kv_tensors,
    make_graphs,
    profile_blocks,
)
from prefixcache.runner.torch.kv_tensors import attention_groups
from prefixcache.runner.torch.model_memory import TorchModelMemory
from prefixcache.runner.torch.model_runner import ModelRunner
from prefixcache.runner.torch.ops.arrays import given_tensor
from prefixcache.runner.torch.ops.sets import Ops
from prefixcache.runner.torch.results import LaunchedStep
from prefixcache.types.step_plan import StepPlan, StepResult


class TorchRunner:
    """See `Runner`. Raises `FieldError` for a device that is not there."""

    shares_kv = True

    def __init__(self, config: EngineConfig) -> None:
        if config.activations == "int8":
            raise FieldError(
                "cpu_activations",
                f"must be exact on {config.device} with attention {config.attention}: int8 needs "
                "the CPU's own kernels.",
            )
        given: dict[str, object] = {
            name: getattr(config.cache, name) for name in ("kv_cache_dir", "disk_cache_memory")
        }
        if config.weights_cache_dir != "none":
            given["weights_cache_dir"] = config.weights_cache_dir
        for name, value in given.items():
            if value is not None:
                raise FieldError(name, "needs the CPU's own kernels, without torch.")
        if config.cache.kv_cache_dtype == "int8":
            raise FieldError(
                "kv_cache_dtype",
                "int8 needs the CPU's own kernels: neither torch nor FlashInfer attends to "
                "integers with a scale for each token and head.",
            )
        self._device, self._invariant = choose_device(config)
        self._config = config.on(self._device.type)

    @property
    def device(self) -> str:
        """See `Runner`."""
        return str(self._device)

    @property
    def runs_ahead(self) -> bool:
        """See `StepRunner`."""
        return self.steps.runs_ahead

    @property
    def block_tables(self) -> Sequence[BlockTableBuffers]:
        """See `StepRunner`."""
        return self.steps.block_tables

    def load(self, model: ModelConfig, folder: Path) -> ModelSpec:
        """See `Runner`. The weights are read for their digest in parallel."""
        config, device = self._config, self._device
        if model.states is not None and config.speculation.source != "off":
            raise FieldError(
                "speculate",
                f"needs the CPU's own kernels for a model with states, not attention "
                f"{config.attention} on {device}.",
            )
        dtype = _choose_dtype(config, model, device)
        dtype_name = str(dtype).removeprefix("torch.")
        check_kv_dtype(config.cache, dtype_name)
        threads = num_threads(config.cpu_threads)
        if device.type == "cpu":
            torch.set_num_threads(threads)
        with ThreadPoolExecutor(1) as digests:
            reading = digests.submit(read_checkpoint, folder, threads)
            loaded, attention, sizes, max_model_len = _model_and_pool(
                config, model, folder, dtype, device, invariant=self._invariant
            )
            checkpoint = reading.result()
        checkpoint.check_unchanged()
        make = partial(DecoderModel, model, Ops(dtype, device), max_model_len)
        weights = ReplaceableModel(
            loaded, make, checkpoint, requantize=config.requantize, convert=given_tensor
        )
        self.kv = kv_tensors(config, loaded, attention, sizes.start, sizes=sizes)
        self._specs = KVSpecs(self.kv.layout, sizes)
        self.steps = _step_runner(config, weights, attention, self._specs, max_model_len, device)
        self.memory = TorchModelMemory(
            weights,
            self.kv,
            self.steps,
            lambda: make_graphs(config, weights.loaded, attention, max_model_len),
        )
        self.memory.make_kv()
        self.memory.settle()
        of_cpu = f" with {threads} threads" if device.type == "cpu" else ""
        return ModelSpec(
            dtype=dtype_name,
            kv_dtype=dtype_name,
            hardware=f"{device}{of_cpu} (torch)",
            attention=attention.name,
            batch_invariant=attention.batch_invariant and self._invariant,
            max_model_len=max_model_len,
            weights_digest=checkpoint.digest,
        )

    def kv_specs(self) -> KVSpecs:
        """See `Runner`."""
        return self._specs

    def submit(self, plan: StepPlan) -> LaunchedStep:
        """See `StepRunner`."""
        return self.steps.submit(plan)

    def results(self, step: LaunchedStep) -> StepResult:
        """See `StepRunner`."""
        return self.steps.results(step)

    def run_empty_step(self) -> None:
        """See `StepRunner`."""
        self.steps.run_empty_step()

    def available_memory(self) -> int:
        """See `Runner`."""
        return device_memory(self._device).free


def _choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        has_products = torch.cuda.is_bf16_supported()
    else:
        has_products = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
    dtype = choose_dtype(config.dtype, model.checkpoint_dtype, multiplies_bfloat16=has_products)
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def _model_and_pool(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
) -> tuple[DecoderModel, GroupedAttention, PoolSizes, int]:
    """The loaded model, its attention without a pool, the pool's sizes and the context length.

    Where a profile run sizes the pool, the model must be there first.
    """
    layout = layout_of(config, model_config, dtype.itemsize)

    def load(max_positions: int) -> DecoderModel:
        make = partial(DecoderModel, model_config, Ops(dtype, device), max_positions)
        return load_model(make, model_config, folder)

    memory = device_memory(device)
    sized = partial(
        pool_sizes,
        config.cache,
        block_bytes=layout.bytes_per_block(config.cache.block_size, dtype.itemsize),
        memory=memory,
    )
    if is_sized_by_run(config, device):
        longest = config.scheduler.context_length(model_config)
        model = load(longest)
        attention = _attention(config, model, invariant=invariant)
        sizes = sized(profile_blocks(config, model, attention, longest))
        max_model_len = fitting_model_len(config, model_config, layout, sizes.ceiling)
    else:
        sizes = sized(choose_num_blocks(config.cache, layout, dtype.itemsize, memory))
        max_model_len = fitting_model_len(config, model_config, layout, sizes.ceiling)
        model = load(max_model_len)
        attention = _attention(config, model, invariant=invariant)
    return model, attention, sizes, max_model_len


def _attention(config: EngineConfig, model: DecoderModel, *, invariant: bool) -> GroupedAttention:
    """Raises `FieldError` where it cannot keep what is asked for."""
    options = AttentionOptions(device=model.device, dtype=model.dtype, batch_invariant=invariant)
    groups = attention_groups(
        layout_of(config, model.config, model.dtype.itemsize), model.attention_spec
    )
    attention = make_attention(config.attention, groups, options)
    if config.batch_invariant and not attention.batch_invariant:
        raise FieldError(
            "batch_invariant",
            f"cannot be kept on {model.device} by attention {attention.name}. It is on a "
            "CPU by attention cpu, and on CUDA by flashinfer where the device is a Hopper one "
            "(compute capability 9.0): use one of these, or leave --batch-invariant out.",
        )
    return attention


def _step_runner(
    config: EngineConfig,
    weights: ReplaceableModel[DecoderModel],
    attention: GroupedAttention,
    specs: KVSpecs,
    max_model_len: int,
    device: torch.device,
) -> ModelRunner:
    """A runner without graphs: those need the KV tensors."""
    limits = config.scheduler.limits()
    max_tokens = limits.max_num_batched_tokens
    return ModelRunner(
        weights,
        attention,
        max_tokens=max_tokens,
        max_seqs=limits.max_num_seqs,
        max_pages=specs.layout.most_pages(max_model_len, max_tokens, config.cache.block_size),
        block_size=config.cache.block_size,
        device=device,
    )
