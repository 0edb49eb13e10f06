"""vLLM's offloading manager over the disk tier: before and after a kill, and with faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
import tiers
from engine import PROMPTS, Engine, configure, transfer_config

FIRST, SECOND = PROMPTS.values()
NUM_FIRST, NUM_SECOND = len(FIRST) // 16, len(SECOND) // 16
START = Callable[..., Engine]


def test_blocks_that_left_memory_come_back(start: START) -> None:
    engine = start()
    assert engine.find(FIRST) == 0
    engine.store(FIRST)
    engine.store(SECOND)
    engine.forget_memory()
    assert (engine.find(FIRST), engine.find(SECOND)) == (NUM_FIRST, NUM_SECOND)
    assert engine.find(range(7, 407)) == NUM_SECOND
    assert engine.find(range(1, 161)) == 0


def test_a_killed_process_leaves_its_blocks_to_the_next_one(
    tmp_path: Path, model: Path, start: START
) -> None:
    script = Path(__file__).with_name("engine.py")
    memory = tiers.line_of_killed(script, tmp_path, "/dev/shm/")
    Path(memory.strip()).unlink()  # vLLM leaves it.
    engine = start()
    assert (engine.find(FIRST), engine.find(SECOND)) == (NUM_FIRST, NUM_SECOND)


def test_other_weights_in_the_same_files_find_nothing(model: Path, start: START) -> None:
    engine = start()
    engine.store(FIRST)
    engine.close()
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[::-1])
    assert start().find(FIRST) == 0


def test_only_folders_of_ranks_are_made_and_nobody_else_may_open_them(
    tmp_path: Path, start: START
) -> None:
    tiers.check_folders(tmp_path / "kv", start)


def test_an_option_that_is_no_number_is_named(start: START) -> None:
    tiers.check_numbers(start)


def test_the_bound_holds(tmp_path: Path, start: START) -> None:
    bound = 1 << 20
    engine = start(max_bytes=bound)
    for number in range(0, 100 * 320, 320):
        engine.store(range(number % 190, number % 190 + 320))
        assert damage.num_disk_bytes(tmp_path / "kv" / "rank0") <= bound
    engine.store(FIRST)
    engine.forget_memory()
    assert engine.find(FIRST) == NUM_FIRST


@pytest.mark.timeout(0)
def test_no_injected_fault_gives_other_bytes(model: Path) -> None:
    """FAULTS=100000 injects as many."""
    prompts = (FIRST, range(3, 163))

    def start(root: Path) -> damage.Engine:
        engine = Engine(configure(model, transfer_config(root, max_bytes=damage.BOUND)))

        def store(prompt: int) -> None:
            engine.forget_memory()
            engine.tier._late.clear()
            engine.store(prompts[prompt])
            engine.forget_memory()

        return damage.Engine(
            engine.tier,
            root / "rank0",
            lambda: engine.rows.copy(),
            store,
            lambda prompt: engine.find(prompts[prompt]),
            engine.close,
        )

    damage.damage_lives(start)


class Hung:
    """A store whose disk answers only after `answer` is set; its calls keep their timeouts."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.answer = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_into(self, keys: list[bytes], buffers: list[Any], timeout: float) -> list[bool]:
        if self.answer.wait(timeout):
            return self._store.get_into(keys, buffers, timeout)
        return [False] * len(keys)


def test_blocks_that_come_too_late_are_misses_and_nobody_waits_for_them_again(
    start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    engine.store(FIRST)
    engine.forget_memory()
    monkeypatch.setattr(engine.tier, "_deadline", 0.1)
    hung = Hung(engine.tier._store)
    monkeypatch.setattr(engine.tier, "_store", hung)
    assert engine.find(FIRST) == 0
    hung.answer.set()
    monkeypatch.setattr(engine.tier, "_deadline", 60)
    assert engine.find(FIRST) == 0
    engine.tier._late = dict.fromkeys(engine.tier._late, 0.0)  # The pause is over.
    assert engine.find(FIRST) == NUM_FIRST


def test_a_reset_ends_what_was_stored_for_this_process_alone(start: START) -> None:
    """vLLM resets caches among other things for new weights, which it does not say to a tier."""
    engine = start()
    engine.store(FIRST)
    engine.connector.reset_cache()
    assert engine.find(FIRST) == 0
    engine.store(SECOND)
    engine.forget_memory()
    assert engine.find(SECOND) == NUM_SECOND
    engine.close()
    engine = start()
    assert (engine.find(FIRST), engine.find(SECOND)) == (NUM_FIRST, 0)


def test_a_transfer_that_raises_is_a_miss(start: START, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    engine.store(FIRST)
    engine.forget_memory()
    with monkeypatch.context() as patch:
        patch.setattr(engine.tier, "_store", Raising(engine.tier._store))
        assert engine.find(FIRST) == 0


class Raising(Hung):
    def get_into(self, keys: list[bytes], buffers: list[Any], timeout: float) -> list[bool]:
        raise ValueError("closed")
