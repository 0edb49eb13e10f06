"""New weights, sleep and pause on `LLM`, with real tiny models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from prefixcache import LLM, SamplingParams
from prefixcache.exceptions import EngineHaltedError, InvalidRequestError
from support.repeatable import slow

Checkpoint = Callable[..., Path]
PROMPT = [*range(20, 60)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", num_blocks=65)


def answer(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def cached(llm: LLM) -> int:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].num_cached_tokens


@pytest.fixture
def folders(tiny_checkpoint: Checkpoint) -> tuple[Path, Path]:
    return tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=4)


def test_state_dict_and_chunks(folders: tuple[Path, Path]) -> None:
    llm = make_llm(folders[0])
    tensors = load_file(folders[1] / "model.safetensors")
    with pytest.raises(InvalidRequestError, match="lacks") as caught:
        llm.control.load_state_dict(dict(list(tensors.items())[1:]))
    assert caught.value.param == "state_dict"
    assert llm.control.load_state_dict(tensors) == 1
    assert answer(llm) == answer(make_llm(folders[1]))
    llm.control.begin_weight_update()
    for name, tensor in load_file(folders[0] / "model.safetensors").items():
        llm.control.update_weights({name: tensor})
        with pytest.raises(EngineHaltedError, match="end_weight_update"):
            answer(llm)
    assert llm.control.end_weight_update(full=True) == 2
    assert answer(llm) == answer(make_llm(folders[0]))


@pytest.mark.parametrize("level", [slow(1), 2])
def test_sleep_and_wake_up(folders: tuple[Path, Path], level: int) -> None:
    llm = make_llm(folders[0])
    first = answer(llm)
    model = weakref.ref(llm._engine._steps._runner.memory.weights.loaded)
    kv = llm._engine._pool.memory
    mapped = kv.num_mapped_bytes()
    llm.control.sleep(level)
    gc.collect()
    # All but what lies in one granule with the null block.
    assert kv.num_mapped_bytes() < mapped / 2
    assert (model() is None) is (level == 2)
    assert llm.control.is_sleeping
    with pytest.raises(EngineHaltedError, match="asleep"):
        answer(llm)
    llm.control.wake_up()
    assert not llm.control.is_sleeping
    assert cached(llm) == 0
    assert answer(llm) == first


def test_the_way_of_reinforcement_learning(folders: tuple[Path, Path]) -> None:
    """Sleep, weights alone, their update, then the cache: as trainers call vLLM."""
    llm = make_llm(folders[0])
    llm.control.sleep(level=2)
    llm.control.wake_up(tags=["weights"])
    llm.control.load_state_dict(load_file(folders[1] / "model.safetensors"))
    assert llm.control.is_sleeping
    llm.control.wake_up(tags=["kv_cache"])
    assert answer(llm) == answer(make_llm(folders[1]))
