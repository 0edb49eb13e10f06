"""The tokens that requests compute on a model with windows, by what is kept: a known table."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benches" / "serving"))
        yield importlib.import_module("hybrid")


@pytest.mark.parametrize(
    ("row", "k"),
    [("REGISTERED", 15), ("REGISTERED", 20), ("ANCHORS", 60), ("WINDOWS", 20), ("BOTH", 20)],
)
def test_each_request_computes_at_most_what_a_simulation_of_vllm_says(
    bench: ModuleType, row: str, k: int
) -> None:
    cell = bench.Cell(getattr(bench, row), k, num_output=2)
    done = bench.measure(bench.simulated(cell.row), cell)
    assert not bench.is_more(bench.computed(done), bench.EXPECTED[cell.row, k])


@pytest.mark.parametrize("row", ["REGISTERED", "ANCHORS", "BOTH"])
def test_with_room_for_all_the_suffix_alone_is_computed(bench: ModuleType, row: str) -> None:
    cell = bench.Cell(getattr(bench, row), 15, num_output=2)
    done = bench.measure(bench.simulated(cell.row), cell)
    assert bench.computed(done) == (bench.SUFFIX, bench.SUFFIX)


@pytest.mark.parametrize(("row", "computed"), [("BOTH", 448), ("SPACED", 3520), ("CLOSE", 3520)])
def test_pinned_prefixes_outlast_short_requests(bench: ModuleType, row: str, computed: int) -> None:
    """Short requests pin nothing, unless anchors are pinned however close."""
    cell = bench.Cell(getattr(bench, row), 8, num_output=2, num_short=400)
    done = bench.measure(bench.simulated(cell.row), cell)
    assert bench.computed(done) == (computed, computed)
