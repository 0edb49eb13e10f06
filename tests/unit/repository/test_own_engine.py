"""The example engine over the cache alone, and that its own checks can fail."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_engine.py"


@pytest.fixture
def example() -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "[96, 48] of [100, 63] prompt tokens were hits",
        "tokens and logits have the bits of a cold run",
        "with a wrong block table they do not",
    ]


def test_one_other_bit_is_found(example: Any, monkeypatch: Any) -> None:
    step = example.Engine._step

    def flip(engine: Any, sequences: list[Any], texts: list[Any]) -> torch.Tensor:
        logits = step(engine, sequences, texts)
        if len(sequences) > 1:
            logits[-1, -1] = torch.nextafter(logits[-1, -1], torch.tensor(float("inf")))
        return logits

    monkeypatch.setattr(example.Engine, "_step", flip)
    with pytest.raises(SystemExit, match="the cache changed an answer"):
        example.main()


def test_a_control_that_cannot_fail_is_reported(example: Any, monkeypatch: Any) -> None:
    row = example.Model.compute_row

    def attend_to_the_null_block(model: Any, token: int, _: int, slot: int, pages: Any) -> Any:
        return row(model, token, 0, slot, pages[:1] * 0)

    monkeypatch.setattr(example.Model, "compute_row", attend_to_the_null_block)
    with pytest.raises(SystemExit, match="no answer depended on the block table"):
        example.main()
