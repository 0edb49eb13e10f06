"""A step on a GPU waits for nothing, and takes one copy each way: shapes alone tell.

Fake tensors of a CUDA device hold no numbers, so reading one back, or making a shape of what it
holds, is an error there; every other way to the device is a copy that is counted here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefixcache.kv.specs import KVGroup
from prefixcache.runner.torch.attention.base import AttentionGroup, AttentionSpec
from prefixcache.runner.torch.batch import StepBuffers
from prefixcache.runner.torch.results import StepResults
from prefixcache.runner.torch.sampling import race
from prefixcache.runner.torch.sampling.row_options import SampledRow
from prefixcache.runner.torch.sampling.sampler import Sampler
from prefixcache.runner.torch.sampling.upload import Upload
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput, ScheduledSequence, StepPlan
from support.plans import context

CUDA = torch.device("cuda")
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "all cuts": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    "frequency": {"temperature": 0, "frequency_penalty": 0.1},
    "repetition": {"repetition_penalty": 1.2},
    "bias": {"temperature": 0, "logit_bias": {3: 2.0}},
    "logprobs": {"logprobs": 5},
    "allowed": {"allowed_token_ids": (3, 5)},
    "bad words": {"temperature": 0, "bad_words_token_ids": ((3,), (0, 4), (5, 0, 4))},
    "greedy logprobs": {"temperature": 0, "logprobs": 0},
}


class Copies(TorchDispatchMode):
    """Counts operations between the host and the device."""

    def __init__(self) -> None:
        super().__init__()
        self.between: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # A scalar is an argument of the launch.
        devices = {t.device.type for t in tensors if t.ndim or t.device.type != "cpu"}
        if len(devices) > 1:
            self.between.append(str(func))
        return result


def rows_of(options: list[dict[str, Any]], step: int) -> list[SampledRow]:
    return [
        SampledRow(
            f"{r}",
            2 + step,
            SamplingInput(
                params=SamplingParams(**given),
                seed=r,
                tokens=context((1, 2)),
                banned_token_ids=(7,) if r % 5 == 4 else (),
            ),
        )
        for r, given in enumerate(options)
    ]


def fake_uploads(monkeypatch: pytest.MonkeyPatch) -> list[Upload]:
    """Those that are sent from now on, to a device that holds no numbers."""
    sent: list[Upload] = []

    def send(upload: Upload, device: torch.device) -> torch.Tensor:
        sent.append(upload)
        return torch.empty(upload._size, dtype=torch.int64, device=device)

    monkeypatch.setattr(Upload, "send", send)
    return sent


def sampled_step(
    monkeypatch: pytest.MonkeyPatch, options: list[dict[str, Any]]
) -> tuple[int, list]:
    """Uploads of a step whose contexts are counted, and its other copies."""
    sent = fake_uploads(monkeypatch)
    monkeypatch.setattr(race, "fused_kernels", lambda _x: None)
    with FakeTensorMode(), torch.inference_mode():
        sampler = Sampler(64, CUDA)
        logits = torch.empty(len(options), 5000, device=CUDA)
        sampler.sample(logits, rows_of(options, 0))
        sent.clear()
        with Copies() as copies:
            result = sampler.sample(logits, rows_of(options, 1))
            results = StepResults([], result, {}, {})
    assert results.numbers.device.type == "cuda"
    assert result.token_ids_R.shape == (len(options),)
    return len(sent), copies.between


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_option_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    uploads, copies = sampled_step(monkeypatch, [options] * 6)
    assert uploads <= 1
    assert copies == []


def test_a_mixed_batch_waits_for_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_step(monkeypatch, [*OPTIONS.values()] * 8) == (1, [])


def test_a_steps_tables_go_to_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode, one whose token is still on the device, and a chunk of two tokens."""
    sent = fake_uploads(monkeypatch)
    sampling = rows_of([{}], 0)[0].sampling
    plan = StepPlan(
        (
            ScheduledSequence(request_id="a", start=17, num_tokens=1, sampling=sampling),
            ScheduledSequence(request_id="b", start=3, num_tokens=1, sampling=sampling),
            ScheduledSequence(request_id="c", start=30, num_tokens=2, sampling=None),
        ),
        np.array([5, -1, 7, 8], dtype=np.int32),
        2,
    )
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
    buffers = StepBuffers(
        groups=[AttentionGroup(spec, KVGroup((0,))), AttentionGroup(spec, KVGroup((1,)))],
        block_size=16,
        max_tokens=8,
        max_seqs=3,
        max_pages=[4, 2],
        device=CUDA,
    )
    full, window = buffers.block_tables
    full.indptr[:] = [0, 2, 3, 5]
    window.indptr[:] = [0, 1, 2, 4]
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        batch = buffers.load(plan, torch.empty(3, dtype=torch.int64, device=CUDA))
    of_full, of_window = batch.attention
    assert (len(sent), copies.between) == (1, [])
    on_device = {
        batch.token_ids_T: (4, torch.int64),
        batch.positions_T: (4, torch.int64),
        batch.sampled_rows_R: (2, torch.int64),
        of_full.slot_mapping: (4, torch.int64),
        of_full.kv_indices: (5, torch.int32),
        of_window.slot_mapping: (4, torch.int64),
        of_window.kv_indices: (4, torch.int32),
    }
    for tensor, (length, dtype) in on_device.items():
        assert (tensor.device.type, len(tensor), tensor.dtype) == ("cuda", length, dtype)
    for attention in (of_full, of_window):
        assert attention.first_pages is not None
        assert (attention.first_pages.device.type, len(attention.first_pages)) == ("cpu", 3)


def test_what_waits_is_seen() -> None:
    """A shape that depends on numbers; an index that the host holds."""
    with FakeTensorMode(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(4, 5, device=CUDA).nonzero()
    with FakeTensorMode(), Copies() as copies:
        torch.empty(4, 5, device=CUDA)[torch.tensor([1, 2])]
    assert copies.between
