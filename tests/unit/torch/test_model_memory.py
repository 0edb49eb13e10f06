"""Captured graphs live and die with the addresses they hold; recent hits leave the window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixcache.exceptions import OutOfMemoryError
from prefixcache.runner.torch.model_memory import TorchModelMemory
from prefixcache.scheduler.admission import HitCounter


class Parts:
    """A model memory around stand-ins; `captured` counts how often graphs were made."""

    def __init__(self) -> None:
        self.captured = 0
        self.weights: Any = SimpleNamespace(complete=True)
        self.kv: Any = SimpleNamespace(
            device=torch.device("cpu"), allocate=lambda: None, give_up=self._give_up
        )
        self.runner: Any = SimpleNamespace(graphs=None)
        self.memory = TorchModelMemory(self.weights, self.kv, self.runner, self._capture)
        self.memory.make_kv()
        self.memory.settle()

    def _capture(self) -> Any:
        assert self.memory.has_kv
        assert self.weights.complete
        self.captured += 1
        return object()

    def _give_up(self) -> None:
        assert self.runner.graphs is None, "graphs would keep the memory"


def test_graphs_are_captured_once_and_outlive_updates_in_place() -> None:
    parts = Parts()
    graphs = parts.runner.graphs
    parts.memory.settle()
    assert parts.runner.graphs is graphs
    assert parts.captured == 1


def test_graphs_go_with_the_kv_and_come_back_with_all() -> None:
    parts = Parts()
    parts.memory.give_up_kv()
    parts.memory.settle()
    assert parts.runner.graphs is None
    parts.weights.complete = False
    parts.memory.make_kv()
    parts.memory.settle()
    assert parts.runner.graphs is None
    parts.weights.complete = True
    parts.memory.settle()
    assert parts.captured == 2


def test_graphs_go_with_the_weights() -> None:
    parts = Parts()
    parts.weights.complete = False
    parts.memory.settle()
    assert parts.runner.graphs is None
    parts.weights.complete = True
    parts.memory.settle()
    assert parts.captured == 2


def test_kv_that_does_not_fit_is_not_there() -> None:
    parts = Parts()
    parts.memory.give_up_kv()

    def refuse() -> None:
        raise OutOfMemoryError("too large")

    parts.kv.allocate = refuse
    with pytest.raises(OutOfMemoryError):
        parts.memory.make_kv()
    assert not parts.memory.has_kv


def test_the_window_holds_the_last_requests_and_the_lifetime_all() -> None:
    counter = HitCounter(window=3)
    assert counter.recent_ratio == 0.0
    for hit in (10, 10, 0, 0):
        counter.add(10, hit)
    assert counter.num_recent == 3
    assert counter.recent_ratio == pytest.approx(1 / 3)
    assert (counter.queries, counter.hits) == (4, 2)
    assert (counter.queried_tokens, counter.hit_tokens) == (40, 20)
