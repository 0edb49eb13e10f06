"""The runner on torch: CUDA, and a CPU with our own kernels or torch's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from prefixcache._core import Cpu
from prefixcache.attention.grouped import GroupedAttention
from prefixcache.attention.registry import AttentionOptions, make_attention
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ConfigError
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.cache_manager import fitting_tokens
from prefixcache.kv.specs import PoolSizes, kv_layout
from prefixcache.models.checkpoint import read_checkpoint
from prefixcache.models.decoder import DecoderModel
from prefixcache.models.loader import choose_dtype, load_model, make_model
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.ops.quantized import QUANT_FORMATS
from prefixcache.ops.sets import torch_is_faster
from prefixcache.ops.threads import default_threads
from prefixcache.runner.base import KVSpecs, ModelSpec
from prefixcache.runner.device import (
    choose_device,
    is_sized_by_run,
    kv_tensors,
    make_graphs,
    profile_blocks,
    shares_answers,
)
from prefixcache.runner.kv_tensors import attention_groups
from prefixcache.runner.model_memory import ModelMemory
from prefixcache.runner.model_runner import ModelRunner
from prefixcache.runner.results import LaunchedStep
from prefixcache.runner.sizing import available_memory, choose_num_blocks, pool_sizes
from prefixcache.types.step_plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


class TorchRunner:
    """See `Runner`. Raises `ConfigError` for a device that is not there."""

    shares_kv = True

    def __init__(self, config: EngineConfig) -> None:
        self._device = choose_device(config)
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
        dtype = choose_dtype(config.dtype, model.checkpoint_dtype, device)
        threads = config.cpu_threads or default_threads()
        cpu = _kernel_threads(config, device, threads)
        with ThreadPoolExecutor(1) as digests:
            reading = digests.submit(read_checkpoint, folder, threads)
            loaded, attention, sizes, max_model_len = _model_and_pool(
                config, model, folder, dtype, device, cpu
            )
            checkpoint = reading.result()
        checkpoint.check_unchanged()
        make = partial(
            make_model,
            model,
            dtype=dtype,
            device=device,
            cpu=cpu,
            activations=config.cpu_activations,
            max_positions=max_model_len,
        )
        weights = ReplaceableModel(loaded, make, checkpoint, requantize=config.requantize)
        _check_quantized(config, weights)
        self.kv = kv_tensors(config, loaded, attention, sizes.start, sizes=sizes)
        self._specs = KVSpecs(self.kv.layout, sizes)
        self.steps = _step_runner(config, weights, attention, self._specs, max_model_len, device)
        self.memory = ModelMemory(
            weights,
            self.kv,
            self.steps,
            lambda: make_graphs(config, weights.loaded, attention, max_model_len),
        )
        self.memory.make_kv()
        self.memory.settle()
        keeps = attention.batch_invariant and config.keeps_batch_invariant(device.type)
        return ModelSpec(
            dtype=str(dtype).removeprefix("torch."),
            hardware=_describe(device, cpu, threads),
            attention=attention.name,
            batch_invariant=keeps,
            shares_answers=shares_answers(attention),
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
        return available_memory(self._device)


def _describe(device: torch.device, cpu: Cpu | None, threads: int) -> str:
    of_cpu = f" with {threads} threads" if device.type == "cpu" else ""
    return f"{device}{of_cpu}" + ("" if cpu is None else f" ({cpu.instructions})")


def _check_quantized(config: EngineConfig, weights: ReplaceableModel) -> None:
    """Raises `ConfigError` where int8 activations are asked for and there are no blocks."""
    if config.cpu_activations == "exact" or set(weights.info.formats) & set(QUANT_FORMATS):
        return
    raise ConfigError(
        "cpu_activations must be exact: no weight of this model is kept in blocks. Serve a "
        "quantized GGUF file, or a folder that `prefixcache convert --quantize` made."
    )


def _model_and_pool(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    cpu: Cpu | None,
) -> tuple[DecoderModel, GroupedAttention, PoolSizes, int]:
    """The loaded model, its attention without a pool, the pool's sizes and the context length.

    Where a profile run sizes the pool, the model must be there first.
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
    if is_sized_by_run(config, device):
        longest = config.scheduler.context_length(model_config)
        model = load(max_positions=longest)
        attention = _attention(config, model, cpu)
        sizes = sized(profile_blocks(config, model, attention, longest))
        max_model_len = _max_model_len(config, model_config, sizes.ceiling)
    else:
        sizes = sized(choose_num_blocks(config.cache, layout, dtype, device))
        max_model_len = _max_model_len(config, model_config, sizes.ceiling)
        model = load(max_positions=max_model_len)
        attention = _attention(config, model, cpu)
    return model, attention, sizes, max_model_len


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


def _step_runner(
    config: EngineConfig,
    model: ReplaceableModel,
    attention: GroupedAttention,
    specs: KVSpecs,
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
        max_pages=specs.layout.most_pages(max_model_len, max_tokens, config.cache.block_size),
        device=device,
    )
