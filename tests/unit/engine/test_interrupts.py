"""Ctrl-C may come at any line of a step: the next request is answered, and no block is lost."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from safetensors.torch import load_file

import prefixcache
from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from fakes.late_runner import LateRunner
from prefixcache import LLM, SamplingParams
from support.repeatable import bounded, slow

PACKAGE = str(Path(prefixcache.__file__).parent)
PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 60], list(range(40, 60)))


@contextmanager
def interrupted_at(
    line: int, within: str | tuple[str, ...] = PACKAGE
) -> Generator[list[str], None, None]:
    """Raises `KeyboardInterrupt` at the n-th line of the package; the list then names it."""
    places: list[str] = []
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(within):
            return None
        if event == "line" and next(lines) == line:
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield places
    except KeyboardInterrupt:
        assert places
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("ahead", [slow(False), True])
@pytest.mark.parametrize("groups", [("full",), slow(("full", ("sliding_window", 6)))])
def test_at_every_line_of_a_step(ahead: bool, groups: Any, seed: int) -> None:
    step = bounded(usual=53, long=1)
    for line in itertools.count(seed % step, step):
        # Few blocks, so that requests are preempted.
        engine, runner, cache = make_engine(
            num_blocks=14,
            groups=groups,
            ahead=ahead,
            share_in_flight=True,
            max_num_batched_tokens=8,
        )
        for name, prompt in zip("abc", PROMPTS, strict=True):
            engine.add_request(make_request(name, prompt, max_tokens=7))
        with interrupted_at(line) as places:
            while engine.has_unfinished():
                engine.step()
        if engine.has_unfinished():
            assert places[0].endswith((" has_unfinished", " step")), places  # nothing was begun
            engine.forget_all()
        if isinstance(runner, LateRunner):
            runner.finish()
        assert engine.jobs.queue_length == 0
        cache.core.validate()
        assert cache.core.num_free_blocks == cache.size.num_usable_blocks, places
        engine.add_request(make_request("a", PROMPTS[0], max_tokens=5))
        outputs = [output for _ in range(20) for output in engine.step()]
        reported = [token for output in outputs for token in output.token_ids]
        assert reported == answer_alone(PROMPTS[0], 5), places
        assert cache.core.num_free_blocks == cache.size.num_usable_blocks, places
        if not places:
            return


def test_the_next_call_is_answered(tiny_checkpoint: Callable[..., Path], seed: int) -> None:
    llm = LLM(str(tiny_checkpoint("smollm2")), kv_cache_memory="4MiB", block_size=4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def generate() -> list[tuple[int, ...]]:
        results = llm.generate(list(PROMPTS), params, use_tqdm=False)
        return [tuple(result.outputs[0].token_ids) for result in results]

    expected = generate()
    step = bounded(usual=797, long=23)
    for line in itertools.count(seed % step, step):
        with interrupted_at(line) as places:
            generate()
        assert generate() == expected, places
        if not places:
            return


@pytest.mark.parametrize(
    "call", [slow("receive_weights"), slow("load_state_dict"), "update_weights_from_disk"]
)
def test_weights_are_never_called_by_the_name_of_others(
    tiny_checkpoint: Callable[..., Path], seed: int, call: str
) -> None:
    """Whatever line of an update Ctrl-C comes at, an answer is of old weights or of new ones."""
    folders = [tiny_checkpoint("smollm2", seed=number) for number in (0, 1)]
    llm = LLM(str(folders[0]), dtype="float32", num_blocks=65, block_size=4)
    control, params = llm.control, SamplingParams(temperature=0, max_tokens=2, logprobs=0)
    tensors = load_file(folders[1] / "model.safetensors")
    update = {
        "receive_weights": lambda: control.receive_weights([tensors]),
        "load_state_dict": lambda: control.load_state_dict(tensors),
        "update_weights_from_disk": lambda: control.update_weights_from_disk(str(folders[1])),
    }[call]

    def generate() -> list[Any]:
        return [one.outputs[0].logprobs for one in llm.generate(list(PROMPTS), params)]

    expected: dict[str, list[Any]] = {}
    for folder in folders:
        control.update_weights_from_disk(str(folder))
        expected[control.weights_name] = generate()
    names = ("weight_versions", "weights/weight_updates")
    engine = [f"{PACKAGE}/engine/{name}.py" for name in names]
    files = (*engine, f"{PACKAGE}/models/replaceable.py")
    step = bounded(usual=13, long=1)
    for line in itertools.count(seed % step, step):
        control.update_weights_from_disk(str(folders[0]))
        assert generate() == expected[control.weights_name]
        with interrupted_at(line, files) as places:
            update()
        known = [expected.get(control.weights_name)]
        assert generate() in (known if known[0] else [*expected.values()]), places
        if not places:
            return
