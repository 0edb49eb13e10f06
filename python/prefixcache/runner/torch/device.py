"""What an engine on a CUDA device is put together with: the device, the pool's size, graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from prefixcache.config.engine_config import EngineConfig
from prefixcache.exceptions import ConfigError, FieldError
from prefixcache.kv.specs import PoolSizes
from prefixcache.runner.sizing import MemorySize, host_memory, layout_of, most_guesses
from prefixcache.runner.torch.attention.grouped import GroupedAttention
from prefixcache.runner.torch.cuda_graph import (
    Capture,
    CudaCapture,
    DecodeGraphs,
    graph_sizes,
)
from prefixcache.runner.torch.cuda_memory import CudaMemory, cuda_driver
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.kv_tensors import KVTensors, Reserve
from prefixcache.runner.torch.ops.cuda import can_pin_matmul, is_hopper, pin_matmul, unpin_matmul
from prefixcache.runner.torch.piecewise_graphs import Graphs, PiecewiseGraphs, step_sizes
from prefixcache.runner.torch.profile_run import (
    DeviceMemory,
    fitting_blocks,
    measure_peak,
    run_largest_step,
)

logger = logging.getLogger(__name__)

Measure = Callable[[Callable[[], None], torch.device], DeviceMemory]


def choose_device(config: EngineConfig) -> tuple[torch.device, bool]:
    """The device asked for, and whether rows may be batch-invariant on it.

    "auto" is a GPU where there is one. Its index is the current one. Rows are batch-invariant on a
    GPU unless that is refused; where they are not asked for, also unless it is no Hopper device or
    CUDA was in use before: matmuls are pinned here, which must come first. Raises `FieldError` when
    CUDA is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu" or not (has_cuda or config.device == "cuda"):
        return torch.device("cpu"), config.keeps_batch_invariant
    if not has_cuda:
        raise FieldError(
            "device",
            f"is cuda, but torch {torch.__version__} finds no CUDA device: use cpu, or install a "
            "CUDA build of torch and a driver.",
        )
    invariant = config.keeps_batch_invariant
    is_asked = config.batch_invariant is True
    if invariant and not is_asked and not can_pin_matmul():
        logger.warning(
            "Answers may depend on the batch, and so on hits: CUDA was in use before this engine. "
            "Make the engine first, or a process for it."
        )
        invariant = False
    if invariant:
        pin_matmul()
    device = torch.device("cuda", torch.cuda.current_device())
    if invariant and not is_asked and not is_hopper(device):
        unpin_matmul()
        invariant = False
    return device, invariant


def device_memory(device: torch.device) -> MemorySize:
    """The memory of the device, container limits included."""
    return MemorySize(*torch.cuda.mem_get_info(device)) if device.type == "cuda" else host_memory()


def is_sized_by_run(config: EngineConfig, device: torch.device) -> bool:
    """Whether the pool takes what a profile run leaves: on CUDA, unless its size is given."""
    cache = config.cache
    return device.type == "cuda" and cache.num_blocks is None and cache.kv_cache_memory is None


def kv_tensors(
    config: EngineConfig,
    model: DecoderModel,
    attention: GroupedAttention,
    num_blocks: int,
    *,
    sizes: PoolSizes | None = None,
) -> KVTensors:
    """The pool of all groups of the model; `allocate` makes its memory.

    With `sizes` it can be resized, where the device allows it. Raises `ConfigError` where that is
    asked for and cannot be.
    """
    layout = layout_of(config, model.config, model.dtype.itemsize)
    max_blocks = num_blocks if sizes is None else sizes.ceiling
    return KVTensors(
        layout=layout,
        attention=attention,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        itemsize=model.dtype.itemsize,
        free_memory=lambda: device_memory(model.device).free,
        dtype=model.dtype,
        device=model.device,
        max_blocks=max_blocks,
        reserve=None if sizes is None else _reserve(config, model.device),
    )


def _reserve(config: EngineConfig, device: torch.device) -> Reserve | None:
    """What reserves the address space of a KV tensor; None where torch allocates it as a whole."""
    if not (config.elastic.is_on or config.cache.kv_cache_max_memory is not None):
        return None
    driver = cuda_driver(device) if device.type == "cuda" else None
    if driver is None:
        raise ConfigError(
            "kv_cache_max_memory, kv_cache_idle_release and min_free_memory need, with torch, a "
            "CUDA device that can map memory, and cuda-python: pip install cuda-python."
        )
    return partial(CudaMemory, device=device.index or 0, driver=driver)


def profile_blocks(
    config: EngineConfig,
    model: DecoderModel,
    attention: GroupedAttention,
    max_model_len: int,
    measure: Measure = measure_peak,
) -> int:
    """Blocks that fit next to the largest step, the null block included.

    Binds `attention` to a pool of the null block alone. Raises `OutOfMemoryError`.
    """
    limits = config.scheduler.limits(model.device.type)
    null_block = kv_tensors(config, model, attention, 1)
    null_block.allocate()
    memory = measure(
        lambda: run_largest_step(
            model,
            attention,
            max_tokens=limits.max_num_batched_tokens,
            max_sampled=limits.max_num_seqs * (1 + most_guesses(config)),
            max_model_len=max_model_len,
            block_size=config.cache.block_size,
            device=model.device,
        ),
        model.device,
    )
    return fitting_blocks(memory, config.cache.gpu_memory_utilization, null_block.num_bytes)


def make_graphs(
    config: EngineConfig,
    model: DecoderModel,
    attention: GroupedAttention,
    max_model_len: int,
    capture: Capture | None = None,
) -> Graphs | None:
    """Captured steps, or None: without CUDA, with `enforce_eager`, or a backend that has none.

    None too for a model with experts, since which of them compute is known on the device alone.

    `attention` must be bound.
    """
    if capture is None and model.device.type == "cuda":
        capture = CudaCapture(model.device)
    has_experts = model.config.experts is not None
    if capture is None or config.enforce_eager or has_experts or not attention.has_graphs:
        return None
    limits = config.scheduler.limits(model.device.type)
    max_seqs = limits.max_num_seqs
    sizes = graph_sizes(max_seqs)
    layout = layout_of(config, model.config, model.dtype.itemsize)
    max_pages = layout.most_pages(max_model_len, 1, config.cache.block_size)
    logger.info("Capturing CUDA graphs of %d batch sizes up to %d.", len(sizes), max_seqs)
    decodes = DecodeGraphs(
        model,
        attention,
        sizes=sizes,
        max_page_indices=[max_seqs * most for most in max_pages],
        device=model.device,
        capture=capture,
    )
    tokens = step_sizes(limits.max_num_batched_tokens, model.num_bytes // model.dtype.itemsize)
    steps = None
    if tokens:
        logger.info("Capturing CUDA graphs of steps of %d to %d tokens.", tokens[0], tokens[-1])
        steps = PiecewiseGraphs(
            model, attention, sizes=tokens, device=model.device, capture=capture
        )
    return Graphs(decodes, steps)
