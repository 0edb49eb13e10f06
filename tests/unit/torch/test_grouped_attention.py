"""Attention of several groups of layers: tables that begin at a window, and who computes what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equality import with_windows
from prefixcache.kv.specs import KVGroup
from prefixcache.runner.torch.attention.base import AttentionBackend, AttentionGroup, AttentionSpec
from prefixcache.runner.torch.attention.registry import make_attention
from support.kernel_attention import backend_of
from support.loaded import cpu_model, torch_model
from support.paged_driver import CpuDriver, PagedDriver, make_batch

BACKENDS = ["torch", "cpu"]
BLOCK = 16
LENGTH = 150
TABLE = torch.randperm(20, generator=torch.Generator().manual_seed(2)).add(1).tolist()


class WindowLayer:
    """One layer with a window and one sequence, whose first tokens are there."""

    def __init__(self, name: str, window: int) -> None:
        self.window = window
        spec = AttentionSpec(
            num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, sliding_window=window
        )
        self.backend = backend_of(name, spec)
        self.kv = torch.zeros(self.backend.kv_shape(22, BLOCK, 2, 32))
        self.backend.bind([self.kv])
        generator = torch.Generator().manual_seed(window)
        self.qkv = torch.randn(LENGTH, 8, 32, generator=generator).split([4, 2, 2], dim=1)

    def rows(self, start: int, stop: int, *, leaves_out: bool) -> torch.Tensor:
        """Outputs of positions `start:stop`."""
        window = self.window if leaves_out else None
        self.backend.plan(make_batch([(start, stop)], [TABLE], BLOCK, window))
        return self.backend.run(0, *(part[start:stop] for part in self.qkv))

    def spoil_behind(self, position: int) -> None:
        """Others write what they like to pages behind the window of a position."""
        for page in TABLE[: max(position + 1 - self.window, 0) // BLOCK]:
            self.kv[page] = float("nan")


positions = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 60))


@settings(deadline=None, max_examples=40)
@given(window=st.integers(1, 120), at=positions)
@pytest.mark.parametrize("name", BACKENDS)
def test_pages_behind_the_window_may_be_left_out_and_spoiled(name, window, at):
    start, stop = at[0], min(at[0] + at[1], LENGTH)
    layer = WindowLayer(name, window)
    whole = layer.rows(0, LENGTH, leaves_out=False)[start:stop]
    listed = layer.rows(start, stop, leaves_out=False)
    layer.spoil_behind(start)
    left_out = layer.rows(start, stop, leaves_out=True)
    if layer.backend.batch_invariant:
        assert torch.equal(left_out, listed)
        assert torch.equal(left_out, whole)
    else:
        torch.testing.assert_close(left_out, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("window", "first", "pages"),
    [
        (33, -1, 9),
        (33, 5, 4),  # the first query, at 96, sees keys from 64 on: page 4
        (100, 1, 8),
        (None, 1, 8),
    ],
)
def test_tables_without_a_page_that_a_query_sees_are_refused(name, window, first, pages):
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)
    backend = backend_of(name, replace(spec, sliding_window=window))
    backend.bind([torch.zeros(backend.kv_shape(22, BLOCK, 2, 32))])
    good = make_batch([(96, 144)], [TABLE], BLOCK)
    backend.plan(good)
    lie = replace(
        good,
        kv_indptr=torch.tensor([0, pages], dtype=torch.int32),
        first_pages=torch.tensor([first], dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="first_pages"):
        backend.plan(lie)


@settings(
    deadline=None,
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(window=st.sampled_from([5, 20, 70]), chunk=st.integers(5, 60), data=st.data())
def test_torch_and_the_cpus_kernel_agree_on_a_model_of_two_kinds(
    tiny_checkpoint: Callable[..., Path], window: int, chunk: int, data: st.DataObject
) -> None:
    folder = tiny_checkpoint("qwen3", **with_windows(window))
    tokens = data.draw(st.lists(st.integers(3, 383), min_size=80, max_size=120))
    logits = []
    for driver in (PagedDriver(torch_model(folder)), CpuDriver(cpu_model(folder))):
        assert len(driver.layout.groups) == 3
        starts = range(0, len(tokens), chunk)
        parts = [driver.forward([(0, a, tokens[a : a + chunk])]) for a in starts]
        logits.append(torch.cat(parts))
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


def test_each_layer_goes_to_its_groups_backend_by_its_number_there() -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=16, scale=1.0)
    groups = [AttentionGroup(spec, KVGroup((1, 3))), AttentionGroup(spec, KVGroup((0, 2)))]
    attention = make_attention("torch", groups)
    ran: list[tuple[AttentionBackend, int]] = []
    for backend in attention.backends:
        backend.run = lambda layer, *_, backend=backend: ran.append((backend, layer))  # type: ignore
    nothing = torch.empty(0)
    for layer in range(4):
        attention.run(layer, nothing, nothing, nothing)
    first, second = attention.backends
    assert ran == [(second, 0), (first, 0), (second, 1), (first, 1)]
