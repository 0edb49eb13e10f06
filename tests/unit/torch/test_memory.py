"""Sizing the pool by a run of the largest step, and what an engine on CUDA is made with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from fakes.tape import TapeCapture
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.exceptions import ConfigError, FieldError, OutOfMemoryError
from prefixcache.runner.torch import device as runner_device
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from prefixcache.runner.torch.attention.torch_attention import TorchAttention
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.ops import cuda as ops_cuda
from prefixcache.runner.torch.profile_run import (
    DeviceMemory,
    fitting_blocks,
    run_largest_step,
)
from support.loaded import torch_model
from support.paged_models import grouped_attention

CPU = torch.device("cpu")
GIB = 1 << 30
TinyCheckpoint = Callable[..., Path]


def load(folder: Path) -> DecoderModel:
    return torch_model(folder)


def test_the_pool_takes_what_weights_step_and_others_leave_of_the_allowed_share() -> None:
    memory = DeviceMemory(total=100 * GIB, free=60 * GIB, reserved=37 * GIB, peak=30 * GIB)
    assert memory.outside == 3 * GIB
    assert fitting_blocks(memory, 0.9, GIB) == 90 - 3 - 30
    assert fitting_blocks(memory, 0.5, 4 * GIB) == (50 - 3 - 30) // 4


def test_no_room_for_a_single_block_names_the_numbers() -> None:
    memory = DeviceMemory(total=10 * GIB, free=2 * GIB, reserved=8 * GIB, peak=8 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"allows 9,216 MiB of 10,240.*need 8,192 MiB"):
        fitting_blocks(memory, 0.9, GIB)
    assert fitting_blocks(memory, 0.9, GIB // 2) == 2


class Watched:
    """A model that notes the largest call of each kind."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.tokens = self.rows = self.last_position = 0

    def forward(self, token_ids, positions, attention):
        self.tokens = max(self.tokens, len(token_ids))
        self.last_position = max(self.last_position, int(positions.max()))
        return self._model.forward(token_ids, positions, attention)

    def compute_logits(self, hidden):
        self.rows = max(self.rows, len(hidden))
        return self._model.compute_logits(hidden)


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(64, 200), (64, 20), (60, 20), (5, 3)])
def test_the_trial_is_the_largest_step_there_can_be(tiny_checkpoint, max_tokens, max_model_len):
    model = Watched(load(tiny_checkpoint("qwen3")))
    attention = grouped_attention(model._model, TorchAttention)
    pool = torch.zeros(1, 2, 4, 2, 32)
    attention.bind([pool, pool.clone()])
    run_largest_step(
        model,
        attention,
        max_tokens=max_tokens,
        max_sampled=5,
        max_model_len=max_model_len,
        block_size=4,
        device=CPU,
    )
    assert (model.tokens, model.rows) == (max_tokens, 5)
    assert model.last_position == min(max_tokens, max_model_len) - 1


def config(**options) -> EngineConfig:
    return EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32), **options
    )


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-window"])
def test_a_pool_is_sized_by_run_where_nothing_says_its_size(tiny_checkpoint, architecture):
    """The one with windows has four layers, in two groups of two that share the blocks' bytes."""
    cuda = torch.device("cuda", 1)
    assert runner_device.is_sized_by_run(config(), cuda)
    assert not runner_device.is_sized_by_run(config(), CPU)
    assert not runner_device.is_sized_by_run(config(cache=CacheConfig(num_blocks=9)), cuda)
    assert not runner_device.is_sized_by_run(config(cache=CacheConfig(kv_cache_memory=9)), cuda)
    model = load(tiny_checkpoint(architecture))
    ran = []

    def measure(profile_run, device) -> DeviceMemory:
        profile_run()
        ran.append(device)
        return DeviceMemory(total=1000 * 2**14, free=900 * 2**14, reserved=0, peak=0)

    attention = grouped_attention(model, TorchAttention)
    blocks = runner_device.profile_blocks(config(), model, attention, 100, measure)
    per_block = 2 * 2 * 16 * 2 * 32 * 4  # layers, keys and values, tokens, heads, size, bytes
    assert blocks == (900 - 100) * 2**14 // per_block
    assert ran == [model.device]


def test_graphs_are_made_where_backend_and_flags_allow(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load(tiny_checkpoint("qwen3"))
    capture = TapeCapture()
    attention = grouped_attention(
        model,
        partial(
            FlashInferAttention,
            dtype=torch.float32,
            device=CPU,
            kernels=capture.kernels,
            workspace_bytes=16,
        ),
    )
    attention.bind([torch.zeros(3, 2, 16, 2, 32) for _ in range(2)])
    assert runner_device.make_graphs(config(), model, attention, 64, capture) is not None
    assert (
        runner_device.make_graphs(config(enforce_eager=True), model, attention, 64, capture) is None
    )
    plain = grouped_attention(model, TorchAttention)
    assert runner_device.make_graphs(config(), model, plain, 64, capture) is None
    assert runner_device.make_graphs(config(), model, attention, 64) is None, "a CPU has no graphs"


def test_the_device_is_the_gpu_and_rows_keep_their_bits_where_they_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinned = []
    monkeypatch.setattr(runner_device, "pin_matmul", lambda: pinned.append(True))
    monkeypatch.setattr(runner_device, "unpin_matmul", pinned.clear)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runner_device.choose_device(config()) == (CPU, True)
    with pytest.raises(FieldError, match=r"^device is cuda, but torch .* finds no CUDA device"):
        runner_device.choose_device(config(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    third = torch.device("cuda", 2)
    assert runner_device.choose_device(config(device="cpu")) == (CPU, True)
    for capability, unasked in (((8, 0), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        for asked, kept in ((None, unasked), (True, True), (False, False)):
            pinned.clear()
            assert runner_device.choose_device(config(batch_invariant=asked)) == (third, kept)
            assert bool(pinned) is kept
    monkeypatch.setattr(runner_device, "can_pin_matmul", lambda: False)
    pinned.clear()
    with caplog.at_level(logging.WARNING):
        assert runner_device.choose_device(config()) == (third, False)
    assert "CUDA was in use before" in caplog.text
    assert not pinned


def test_matmuls_are_pinned_before_cuda_starts_or_not_at_all(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    monkeypatch.setattr(ops_cuda.os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="before CUDA is used"):
        ops_cuda.pin_matmul()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    ops_cuda.pin_matmul()
    assert chosen == ["cublaslt"]
    assert ops_cuda.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    ops_cuda.pin_matmul()
    assert len(chosen) == 2, "a second engine of a pinned process was refused"
    ops_cuda.unpin_matmul()
    assert chosen[2:] == ["default"]
    assert not ops_cuda.os.environ
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is True


@pytest.mark.parametrize("share", [0.0, 1.1, float("nan")])
def test_a_share_of_memory_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        CacheConfig(gpu_memory_utilization=share)
