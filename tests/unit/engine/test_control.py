"""Pause, sleep and new weights between two steps: what becomes of requests, blocks and hits."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.fake_engine import make_engine, make_request
from fakes.fake_memory import fake_checkpoint, lone_answer, make_versioned_engine
from prefixcache.engine.control import Control
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import EngineHaltedError, InvalidRequestError, ModelLoadError
from prefixcache.models.checkpoint import Checkpoint
from prefixcache.types.request import RequestOutput

PROMPT = [*range(10, 27)]


class Driver:
    """Steps an engine and gathers answers as a client would."""

    def __init__(self, **options: Any) -> None:
        self.engine, self.runner, self.cache = make_versioned_engine(**options)
        self.control = self.engine.control
        self.answers: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.restarted: list[str] = []

    def add(
        self, name: str, prompt: list[int] = PROMPT, max_tokens: int = 8, **params: Any
    ) -> None:
        self.engine.add_request(make_request(name, prompt, max_tokens=max_tokens, **params))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    def run(self) -> None:
        self.take(self.engine.take_outputs())
        for _ in range(1000):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("the loop hangs")

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.restarted:
                self.restarted.append(output.request_id)
                self.answers[output.request_id].clear()
            self.answers[output.request_id] += output.token_ids
            if output.token_ids:
                self.cached.setdefault(output.request_id, output.num_cached_tokens)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    def answer(self, name: str, **options: Any) -> list[int]:
        self.add(name, **options)
        self.run()
        return self.answers[name]

    def swap(self, weights: int, mode: Any = "recompute") -> int:
        return self.control.update_weights_from_disk(_folder(weights), mode)


def _folder(weights: int) -> str:
    return str(weights)


@pytest.fixture(autouse=True)
def _folders_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "prefixcache.engine.weights.weight_updates.resolve_model", lambda name, revision: Path(name)
    )


@pytest.fixture
def driver() -> Driver:
    return Driver()


def all_free(driver: Driver) -> bool:
    driver.cache.core.validate()
    return driver.cache.core.num_free_blocks == driver.cache.size.num_blocks - 1


def test_the_lone_answers_differ_by_weights(driver: Driver) -> None:
    assert driver.answer("a") == lone_answer(PROMPT, 8, 0)
    assert lone_answer(PROMPT, 8, 0) != lone_answer(PROMPT, 8, 1)


def test_new_weights_hit_nothing_computed_before(driver: Driver) -> None:
    driver.answer("a")
    assert driver.swap(1) == 1
    assert driver.answer("b") == lone_answer(PROMPT, 8, 1)
    assert driver.cached["b"] == 0
    assert driver.answer("c") == lone_answer(PROMPT, 8, 1)
    assert driver.cached["c"] == 16


def test_without_the_step_of_the_version_a_stale_hit_shows(driver, monkeypatch):
    driver.answer("a")
    monkeypatch.setattr(driver.cache.versions, "begin", lambda weights: 1)
    driver.swap(1)
    assert driver.answer("b") != lone_answer(PROMPT, 8, 1)


def test_the_same_weights_again_are_another_version(driver: Driver) -> None:
    driver.answer("a")
    assert [driver.swap(1), driver.swap(0)] == [1, 2]
    assert driver.answer("b") == lone_answer(PROMPT, 8, 0)
    assert driver.cached["b"] == 0


def test_recompute_begins_answers_again(driver: Driver) -> None:
    driver.add("a")
    driver.step(3)
    driver.swap(1)
    driver.run()
    assert driver.restarted == ["a"]
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 1)
    assert all_free(driver)


def test_recompute_is_silent_where_nothing_was_handed_out() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("prefill")
    driver.add("waiting", PROMPT[::-1])
    driver.step()
    driver.swap(1)
    driver.run()
    assert driver.restarted == []
    assert driver.answers["prefill"] == lone_answer(PROMPT, 8, 1)
    assert driver.answers["waiting"] == lone_answer(PROMPT[::-1], 8, 1)


def test_recompute_reaches_preempted_requests() -> None:
    driver = Driver(num_blocks=10, max_model_len=32)
    driver.add("old", PROMPT[:8], max_tokens=20)
    driver.add("new", PROMPT[8:16], max_tokens=20)
    while not driver.engine.control.prefix_cache_stats().preemptions:
        driver.step()
    assert driver.answers["new"]
    driver.swap(1)
    driver.run()
    assert driver.answers["new"] == lone_answer(PROMPT[8:16], 20, 1)
    assert driver.answers["old"] == lone_answer(PROMPT[:8], 20, 1)


@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_recompute_asks_again_for_the_prompts_logprobs(num_steps: int) -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", prompt_logprobs=0)
    driver.step(num_steps)
    driver.swap(1)
    outputs = [output for _ in range(4) for output in driver.engine.step()]
    (first,) = [output for output in outputs if output.prompt_logprobs]
    assert first.prompt_logprobs is not None
    assert [known.rank for known in first.prompt_logprobs if known] == [1] * (len(PROMPT) - 1)


def test_recompute_forgets_the_tokens_in_the_cache_too(driver: Driver) -> None:
    driver.add("a", max_tokens=20)
    driver.step(12)
    old = driver.answers["a"][:8]
    driver.swap(1)
    driver.run()
    prompt = [*PROMPT, *old, 1]
    assert driver.answer("b", prompt=prompt) == lone_answer(prompt, 8, 1)


def test_keep_goes_on_with_its_blocks_and_registers_nothing(driver: Driver) -> None:
    driver.add("kept", max_tokens=12)
    driver.step(3)
    held = driver.cache.core.stats()["blocks_in_use"]
    before = list(driver.answers["kept"])
    driver.swap(1, "keep")
    assert driver.cache.core.stats()["blocks_in_use"] == held
    driver.run()
    assert driver.restarted == []
    assert driver.answers["kept"][:3] == before
    assert len(driver.answers["kept"]) == 12
    assert driver.cache.core.stats()["cached_blocks"] == 0
    assert driver.answer("b") == lone_answer(PROMPT, 8, 1)
    assert driver.cached["b"] == 0
    assert all_free(driver)


def test_a_kept_request_that_is_preempted_restarts_under_the_new_root() -> None:
    driver = Driver(num_blocks=10, max_model_len=32)
    driver.add("old", PROMPT[:8], max_tokens=20)
    driver.add("kept", PROMPT[8:16], max_tokens=20)
    driver.step(2)
    driver.swap(1, "keep")
    driver.run()
    assert driver.engine.control.prefix_cache_stats().preemptions
    assert len(driver.answers["kept"]) == 20
    assert driver.cache.core.stats()["cached_blocks"] > 0
    prompt = [*PROMPT[8:16], *driver.answers["kept"][:4], 1]
    assert driver.answer("b", prompt=prompt) == lone_answer(prompt, 8, 1)
    assert driver.cached["b"] > 0


def test_abort_ends_running_and_waiting_requests() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add("a")
    driver.add("b")
    driver.step(2)
    driver.swap(1, "abort")
    driver.run()
    assert driver.ends == {"a": "abort", "b": "abort"}
    assert driver.answer("c") == lone_answer(PROMPT, 8, 1)
    assert all_free(driver)


def test_a_broken_path_changes_nothing(driver: Driver) -> None:
    driver.add("a")
    driver.step(2)
    with pytest.raises(InvalidRequestError, match="holds no number") as caught:
        driver.control.weights.check_path("broken")
    assert caught.value.param == "model_path"
    with pytest.raises(ModelLoadError):
        driver.control.weights.update_weights_from_folder(Checkpoint(Path("broken"), ""))
    driver.run()
    assert driver.restarted == []
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 0)
    assert driver.control.weight_version == 0


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_paused_requests_wait_and_lose_nothing(driver: Driver, mode: Any) -> None:
    driver.add("a")
    driver.step(3)
    driver.control.pause(mode)
    driver.add("later", PROMPT[::-1])
    assert not driver.engine.has_work()
    assert driver.engine.has_unfinished()
    driver.control.pause(mode)
    driver.control.resume()
    driver.run()
    assert driver.restarted == []
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 0)
    assert driver.answers["later"] == lone_answer(PROMPT[::-1], 8, 0)
    driver.control.resume()


@pytest.mark.parametrize("halt", [lambda c: c.pause("abort"), lambda c: c.sleep(1, "abort")])
def test_pause_and_sleep_with_abort(driver, halt):
    driver.add("a")
    halt(driver.control)
    driver.run()
    assert driver.ends == {"a": "abort"}


def test_sleep_gives_kv_back_and_tokens_stay(driver: Driver) -> None:
    driver.answer("warm")
    driver.add("a")
    driver.step(3)
    driver.control.sleep(1)
    assert driver.control.is_sleeping
    assert not driver.runner.has_kv
    assert driver.runner.weights == 0
    assert not driver.engine.has_work()
    assert all_free(driver)
    assert driver.cache.core.stats()["cached_blocks"] == 0
    with pytest.raises(EngineHaltedError, match="asleep"):
        driver.add("b")
    driver.control.wake_up()
    driver.run()
    assert driver.restarted == []
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 0)
    assert driver.answer("b") == lone_answer(PROMPT, 8, 0)


def test_level_2_gives_the_weights_back_too_and_reads_them_again(driver: Driver) -> None:
    driver.swap(5)
    driver.add("a")
    driver.step(3)
    driver.control.sleep(2)
    assert driver.runner.weights is None
    driver.control.wake_up(["weights"])
    assert driver.runner.weights == 5
    assert driver.control.is_sleeping
    driver.control.wake_up(["kv_cache"])
    assert not driver.control.is_sleeping
    driver.run()
    assert driver.restarted == ["a"]
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 5)


def test_sleep_can_deepen_and_waking_twice_does_nothing(driver: Driver) -> None:
    driver.control.sleep(1)
    driver.control.sleep(2)
    assert driver.runner.weights is None
    driver.control.sleep(1)
    driver.control.wake_up()
    driver.control.wake_up()
    assert driver.answer("a") == lone_answer(PROMPT, 8, 0)


def test_weights_that_came_as_tensors_are_waited_for(driver: Driver) -> None:
    driver.control.load_state_dict(_tensors(3))
    driver.control.sleep(2)
    driver.control.wake_up()
    assert driver.control.is_sleeping
    with pytest.raises(InvalidRequestError, match="lacks"):
        driver.control.load_state_dict({"a": torch.tensor(4)}, strict=False)
    driver.control.load_state_dict(_tensors(4))
    assert not driver.control.is_sleeping
    assert driver.answer("a") == lone_answer(PROMPT, 8, 4)


def test_sleeping_through_an_update_and_a_pause(driver: Driver) -> None:
    driver.add("a")
    driver.step(2)
    driver.control.pause()
    driver.control.sleep(1)
    driver.swap(2)
    driver.control.wake_up()
    assert not driver.engine.has_work()
    driver.control.resume()
    driver.run()
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 2)


def _tensors(weights: int) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor(weights), "b": torch.tensor(weights)}


def test_nothing_is_computed_from_the_first_chunk_to_the_end(driver: Driver) -> None:
    driver.answer("warm")
    driver.add("a")
    driver.step(2)
    driver.control.begin_weight_update()
    driver.add("b")
    steps = len(driver.runner.plans)
    driver.control.update_weights({"a": torch.tensor(6)})
    assert not driver.engine.has_work()
    with pytest.raises(InvalidRequestError, match=r"lacks \['b'\]") as caught:
        driver.control.end_weight_update(full=True)
    assert caught.value.param == "weights"
    assert driver.control.is_updating
    driver.control.update_weights({"b": torch.tensor(6)})
    assert driver.control.end_weight_update(full=True) == 1
    assert len(driver.runner.plans) == steps
    driver.run()
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 6)
    assert driver.answers["b"] == lone_answer(PROMPT, 8, 6)
    assert driver.cached["b"] == 0


def test_a_partial_update_is_none_to_complain_about(driver: Driver) -> None:
    driver.control.begin_weight_update()
    driver.control.update_weights({"a": torch.tensor(6)})
    driver.control.end_weight_update()
    driver.control.load_state_dict({"b": torch.tensor(7)}, strict=False)
    assert driver.answer("a") == lone_answer(PROMPT, 8, 7)


def test_a_folder_ends_an_update_that_nobody_ends(driver: Driver) -> None:
    driver.control.begin_weight_update()
    driver.control.update_weights({"a": torch.tensor(6)})
    driver.swap(8)
    assert driver.answer("a") == lone_answer(PROMPT, 8, 8)


def test_after_level_2_an_update_must_be_whole(driver: Driver) -> None:
    driver.control.sleep(2)
    driver.control.begin_weight_update()
    driver.control.update_weights({"a": torch.tensor(6)})
    with pytest.raises(InvalidRequestError, match="lacks b"):
        driver.control.end_weight_update()
    driver.control.update_weights({"b": torch.tensor(6)})
    driver.control.end_weight_update()
    assert driver.control.is_sleeping
    driver.control.wake_up()
    assert driver.answer("a") == lone_answer(PROMPT, 8, 6)


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        (lambda c: c.sleep(3), "level", "level must be one of 1, 2, got 3"),
        (lambda c: c.sleep(True), "level", "got True"),
        (lambda c: c.sleep("1"), "level", "got '1'"),
        (lambda c: c.sleep(1, "keep"), "mode", "mode must be one of 'recompute', 'abort'"),
        (lambda c: c.pause("wait"), "mode", "got 'wait'"),
        (lambda c: c.pause(["keep"]), "mode", "mode must be"),
        (lambda c: c.wake_up(["kv"]), "tags", "tags must be one of 'weights', 'kv_cache'"),
        (lambda c: c.begin_weight_update("x"), "mode", "mode must be"),
        (lambda c: c.load_state_dict({}, "x"), "mode", "mode must be"),
        (lambda c: c.update_weights_from_disk("1", "x"), "mode", "mode must be"),
        (lambda c: c.load_state_dict({"a": torch.tensor(1)}), "state_dict", "lacks"),
        (lambda c: c.load_state_dict({"z": torch.tensor(1)}), "state_dict", "unexpected"),
        (lambda c: c.update_weights({"a": torch.tensor(1)}), None, "no weight update"),
        (lambda c: c.end_weight_update(), None, "no weight update"),
    ],
)
def test_wrong_calls_name_what_is_wrong_and_change_nothing(driver, call, param, message):
    driver.add("a")
    driver.step(2)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        call(driver.control)
    assert caught.value.param == param
    driver.run()
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 0)
    assert driver.control.weight_version == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda control: control.begin_weight_update(),
        Control.sleep,
        Control.wake_up,
        lambda control: control.load_state_dict(_tensors(1)),
    ],
)
def test_an_open_update_refuses_what_would_cross_it(driver: Driver, call: Any) -> None:
    driver.control.begin_weight_update()
    with pytest.raises(InvalidRequestError, match="has begun"):
        call(driver.control)
    driver.control.end_weight_update()
    assert driver.answer("a") == lone_answer(PROMPT, 8, 0)


def test_a_wrong_name_refuses_its_whole_chunk(driver: Driver) -> None:
    driver.control.begin_weight_update()
    with pytest.raises(InvalidRequestError, match="unexpected tensor z"):
        driver.control.update_weights({"a": torch.tensor(1), "z": torch.tensor(1)})
    assert driver.runner.weights == 0


def test_an_engine_without_memory_can_still_pause() -> None:
    engine: Engine = make_engine()[0]
    with pytest.raises(InvalidRequestError, match="cannot be changed"):
        engine.control.sleep()
    engine.control.pause()
    assert not engine.control.is_sleeping
    with pytest.raises(EngineHaltedError, match="resume"):
        engine.control.raise_if_halted()


def test_the_stats_are_a_steady_line_across_updates(driver: Driver) -> None:
    driver.answer("a")
    driver.answer("b")
    before = driver.engine.control.prefix_cache_stats()
    assert (before.queries, before.hits) == (2, 1)
    assert (before.queried_tokens, before.hit_tokens) == (34, 16)
    assert before.recent_hit_ratio == pytest.approx(16 / 34)
    driver.swap(1)
    driver.control.sleep(2)
    asleep = driver.engine.control.prefix_cache_stats()
    assert (asleep.queries, asleep.hit_tokens) == (2, 16)
    assert (asleep.is_sleeping, asleep.is_paused, asleep.cached_blocks) == (True, False, 0)
    assert asleep.weight_version == 2
    driver.control.wake_up()
    driver.control.pause()
    driver.control.resume()
    driver.answer("c")
    after = driver.engine.control.prefix_cache_stats()
    assert (after.queries, after.hits, after.queried_tokens) == (3, 1, 51)
    assert after.blocks_in_use + after.free_blocks == after.num_blocks - 1
    assert after.is_sleeping is False


def test_an_engine_that_cannot_wake_up_sleeps_on(driver, monkeypatch):
    driver.add("a")
    driver.step(2)
    driver.control.sleep(2)
    memory = driver.engine.state.memory

    def refuse(*_: Any) -> None:
        raise ModelLoadError("the folder is gone")

    with monkeypatch.context() as patch:
        patch.setattr(memory.weights, "load", refuse)
        with pytest.raises(ModelLoadError, match="gone"):
            driver.control.wake_up()
    assert driver.control.is_sleeping
    driver.control.wake_up()
    driver.run()
    assert driver.answers["a"] == lone_answer(PROMPT, 8, 0)


def test_weights_are_called_by_their_content_however_they_came(driver: Driver) -> None:
    control = driver.control
    names = [control.weights_name]
    roots = [control.prefix_hash_info().root_hash]
    driver.answer("a")
    for weights in (1, 0):
        driver.swap(weights)
        names.append(control.weights_name)
        roots.append(control.prefix_hash_info().root_hash)
    assert names == ["blake3:0", "blake3:1", "blake3:0"]
    assert roots[0] == roots[2] != roots[1]
    driver.answer("b")
    assert driver.cached["b"] == 0
    assert control.weight_version == 2


def test_weights_of_which_nothing_is_known_are_counted(driver: Driver) -> None:
    control, names = driver.control, list[str]()
    for tag in (None, None, "t", None):
        control.load_state_dict({"a": torch.tensor(1), "b": torch.tensor(1)}, weight_version=tag)
        names.append(control.weights_name)
    assert names == ["count:1:blake3:0", "count:2:blake3:0", "tag:t", "count:4:tag:t"]
    control.sleep(2)
    driver.swap(1)
    control.wake_up()
    assert control.weights_name == "blake3:1"


def test_a_tag_of_other_weights_is_refused_before_anything_is_done(driver: Driver) -> None:
    control = driver.control
    driver.add("a")
    driver.step(2)
    control.update_weights_from_disk("1", "keep", weight_version="t")
    with pytest.raises(InvalidRequestError, match=r"'t' is the tag of other weights") as caught:
        control.update_weights_from_disk("2", weight_version="t")
    assert caught.value.param == "weight_version"
    assert (control.weights_name, control.weight_version) == ("tag:t", 1)
    driver.run()
    assert driver.restarted == []
    control.update_weights_from_disk("2", weight_version="u")
    assert control.update_weights_from_disk("1", weight_version="t") == 3
    assert control.update_weights_from_disk("2", weight_version="v") == 4


def _changed_on_disk(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """The folder 1 holds the weights 2 from now on."""
    weights = driver.engine.state.memory.weights
    monkeypatch.setattr(weights, "check_folder", lambda _: Checkpoint(Path("2"), "2"))


@pytest.mark.parametrize("tag", [None, "t"])
def test_weights_that_changed_on_disk_have_another_name_when_the_engine_wakes(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tag: str | None
) -> None:
    control = driver.control
    control.update_weights_from_disk("1", weight_version=tag)
    name = control.weights_name
    control.sleep(2)
    control.wake_up()
    assert control.weights_name == name
    driver.answer("a")
    control.sleep(2)
    _changed_on_disk(monkeypatch, driver)
    control.wake_up()
    assert control.weights_name == "blake3:2"
    assert driver.answer("b") == lone_answer(PROMPT, 8, 2)


def test_weights_that_a_failed_update_puts_back_have_the_name_of_what_they_are(driver, monkeypatch):
    control = driver.control
    driver.swap(1)
    driver.answer("a")
    weights = driver.engine.state.memory.weights
    load = weights.load

    def restored(checkpoint: Checkpoint) -> None:
        load(weights.check_folder(Path("1")))
        raise ModelLoadError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "load", restored)
        with pytest.raises(ModelLoadError, match="gone"):
            driver.swap(3)
        assert (control.weights_name, control.weight_version) == ("blake3:1", 1)
        _changed_on_disk(patch, driver)
        with pytest.raises(ModelLoadError, match="gone"):
            control.weights.update_weights_from_folder(fake_checkpoint(3))
    assert (control.weights_name, control.weight_version) == ("blake3:2", 2)
    assert driver.answer("b") == lone_answer(PROMPT, 8, 2)
