"""Weights swapped at random moments under load: every answer is that of one version as a whole.

Two hammers: one in steps over numbers for weights, whose tokens tell under which weights each key
was written; and one over real tiny models behind an `AsyncEngine`. Both count what happens, not
seconds, so that a slow machine proves as much.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fakes.fake_engine import make_request
from fakes.fake_memory import fake_checkpoint, lone_answer, make_versioned_engine
from prefixcache import LLM, SamplingParams
from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.build import build
from prefixcache.engine.control import Control
from prefixcache.engine.steps import InFlightRequests
from prefixcache.exceptions import EngineHaltedError
from prefixcache.kv.specs import GroupKind
from prefixcache.types.modes import InFlightMode
from prefixcache.types.request import CacheOptions, Request, RequestOutput
from support.repeatable import bounded, long

ROUNDS = bounded(usual=1, long=30)
STEM = [*range(20, 60)]
WINDOW: GroupKind = ("sliding_window", 9)
LAYOUTS: list[tuple[GroupKind, ...]] = [("full",), ("full", WINDOW, WINDOW), (WINDOW,)]


class SteppedHammer:
    """Requests of shared prefixes arrive, weights come and go, between the steps of one engine."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.choose = random.Random(seed)
        self.groups = self.choose.choice(LAYOUTS)
        self.engine, self.runner, self.cache = make_versioned_engine(
            groups=self.groups,
            num_blocks=1 + len(self.groups) * self.choose.choice([23, 64]),
            max_num_batched_tokens=self.choose.choice([12, 64]),
            max_model_len=64,
            share_in_flight=self.choose.random() < 0.5,
            merge_twins=self.choose.random() < 0.5,
            **options,
        )
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.mixed: set[str] = set()
        self.roots: dict[str, str] = {}
        self.num_restarted = 0
        self.num_checked = 0

    def run(self, num_events: int) -> None:
        events: list[Callable[[], None]] = [self.arrive] * 3 + [self.step] * 12
        events += [self.swap, self.swap_in_flight, self.nap, self.update_in_chunks]
        events += [self.pause, self.forget]
        for _ in range(num_events):
            weights = self.runner.weights
            self.choose.choice(events)()
            self.take(self.engine.take_outputs(), weights)
        while self.engine.has_unfinished():
            self.step()
        self.cache.core.validate()
        assert self.cache.core.num_free_blocks == self.cache.size.num_blocks - 1
        assert not self.answers

    def arrive(self) -> None:
        prompt = [*STEM[: self.choose.randrange(1, 40)], self.choose.randrange(9)]
        name, length = str(len(self.requests)), self.choose.randrange(1, 20)
        self.requests[name] = (prompt, length)
        self.answers[name] = []
        self.engine.add_request(make_request(name, prompt, max_tokens=length))

    def step(self) -> None:
        self.take(self.engine.step(), self.runner.weights)

    def swap(self) -> None:
        self.replace("recompute")

    def swap_in_flight(self) -> None:
        """What is in flight mixes weights from here on, so that nothing of it may ever be hit."""
        if self.choose.random() < 0.08:  # else few answers would be left to check
            self.mixed |= self.answers.keys()
            self.replace("keep")

    def replace(self, mode: InFlightMode) -> None:
        """Each of four contents comes back under its name, with or without a tag."""
        weights = self.choose.randrange(4)
        tag = self.choose.choice([None, f"step-{weights}"])
        control, folder = self.engine.control, fake_checkpoint(weights)
        control.weights.update_weights_from_folder(folder, mode, weight_version=tag)
        assert control.weights_name == (f"tag:{tag}" if tag else f"blake3:{weights}")
        self.roots.setdefault(control.weights_name, control.prefix_hash_info().root_hash)
        assert control.prefix_hash_info().root_hash == self.roots[control.weights_name]

    def nap(self) -> None:
        control = self.engine.control
        control.sleep(self.choose.choice([1, 2]))
        if self.choose.random() < 0.5:
            self.swap()
        control.wake_up()
        if control.is_sleeping:
            self.swap()

    def update_in_chunks(self) -> None:
        control, weights = self.engine.control, torch.tensor(self.choose.randrange(4))
        control.begin_weight_update()
        for name in ("a", "b"):
            control.update_weights({name: weights})
            self.arrive()
        control.end_weight_update(full=True)

    def pause(self) -> None:
        self.engine.control.pause(self.choose.choice(["keep", "recompute"]))
        self.arrive()
        self.engine.control.resume()

    def forget(self) -> None:
        self.engine.control.reset_prefix_cache()

    def take(self, outputs: list[RequestOutput], weights: int | None) -> None:
        """What came of work under `weights`."""
        for output in outputs:
            answer = self.answers[output.request_id]
            if output.restarted:
                self.num_restarted += 1
                self.mixed.discard(output.request_id)
                answer.clear()
            answer += output.token_ids
            if output.finished:
                self.check(output.request_id, self.answers.pop(output.request_id), weights)

    def check(self, name: str, answer: list[int], weights: int | None) -> None:
        assert weights is not None
        if name in self.mixed:
            return
        assert answer == lone_answer(*self.requests[name], weights, self.groups)
        self.num_checked += 1


@pytest.mark.parametrize("ahead", [long(False), True])
def test_every_answer_is_that_of_the_weights_it_ended_under(seed: int, ahead: bool) -> None:
    hammers = [SteppedHammer(seed + i, ahead=ahead) for i in range(8 * ROUNDS)]
    for hammer in hammers:
        hammer.run(400)
    assert sum(hammer.num_checked for hammer in hammers) > 35 * len(hammers)
    assert sum(hammer.num_restarted for hammer in hammers) > 10 * len(hammers)


def _skip_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = "prefixcache.kv.versions.CacheVersions.renew"
    monkeypatch.setattr(cache, lambda self, weights: self._core.weight_version + 1)


def _keep_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InFlightRequests, "restart_all", lambda self: None)


def _keep_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def requeue(requests: InFlightRequests, request_ids: Sequence[str]) -> None:
        requests.interrupt("recompute")

    monkeypatch.setattr(InFlightRequests, "_restart", requeue)


def _sleep_without_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache.kv.versions.CacheVersions.reset", lambda self: None)


@pytest.mark.long
@pytest.mark.parametrize(
    "break_it", [_skip_the_version, _keep_in_flight, _keep_the_tokens, _sleep_without_forgetting]
)
def test_the_hammer_notices_what_it_is_for(monkeypatch, break_it):
    break_it(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012 - one of the seeds
        for seed in range(6):
            SteppedHammer(seed).run(400)


def test_the_hammer_notices_steps_that_run_on_under_new_weights(monkeypatch):
    monkeypatch.setattr(InFlightRequests, "drain", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError)):
        SteppedHammer(0, ahead=True).run(400)


# Real models.

Checkpoint = Callable[..., Path]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 60,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}


def _prompts(count: int) -> list[list[int]]:
    choose = random.Random(1)
    return [
        STEM[: choose.choice([0, 16, 32, 40])] + [choose.randrange(3, 300) for _ in range(3)]
        for _ in range(count)
    ]


def _params(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8 * (number % 2), seed=number, max_tokens=4 + number % 17, ignore_eos=True
    )


def _lone_answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    llm = LLM(str(folder), enable_prefix_caching=False, **OPTIONS)
    return [
        llm.generate(prompt, _params(number), use_tqdm=False)[0].outputs[0].token_ids
        for number, prompt in enumerate(prompts)
    ]


class LiveHammer:
    """Clients ask one served model, whose weights one more task swaps."""

    def __init__(self, folders: list[Path], engine: AsyncEngine, seed: int) -> None:
        self.folders = folders
        self.engine = engine
        self.prompts = _prompts(24)
        self.expected = [_lone_answers(folder, self.prompts) for folder in folders]
        self.choose = random.Random(seed)
        self.seen = [0] * len(folders)
        self.num_restarted = self.num_cached_tokens = self.num_swaps = self.num_outputs = 0

    @property
    def has_seen_all(self) -> bool:
        """Whether answers under each of the weights came, and some that began again."""
        enough = self.num_swaps >= 40 * ROUNDS and self.num_restarted > 3 and min(self.seen) > 3
        assert enough or self.num_swaps < 400 * ROUNDS, "answers do not meet the swaps"
        return enough and self.num_cached_tokens > 0

    async def run(self) -> None:
        swaps = asyncio.create_task(self.swap_on())
        await asyncio.gather(*(self.ask_on(client) for client in range(6)), swaps)
        final = await self.swap(0)
        for number in range(len(self.prompts)):
            assert await self.answer(f"last-{number}", number) == self.expected[0][number]
        assert self.engine.control.prefix_cache_stats().weight_version == final

    async def ask_on(self, client: int) -> None:
        count = 0
        while not self.has_seen_all:
            number = (client * 7 + count) % len(self.prompts)
            try:
                answer = await self.answer(f"{client}-{count}", number)
            except EngineHaltedError:
                await asyncio.sleep(0.005)
                continue
            versions = [answers[number] for answers in self.expected]
            assert answer in versions
            self.seen[versions.index(answer)] += 1
            count += 1

    async def answer(self, name: str, number: int) -> list[int]:
        request = Request(
            request_id=name,
            prompt_token_ids=self.prompts[number],
            params=_params(number),
            cache=CacheOptions(),
        )
        tokens: list[int] = []
        async for output in self.engine.generate(request):
            self.num_outputs += 1
            if output.restarted:
                self.num_restarted += 1
                tokens.clear()
            tokens += output.token_ids
            self.num_cached_tokens += output.num_cached_tokens
            assert output.finish_reason in (None, "length")
        return tokens

    async def swap_on(self) -> None:
        while not self.has_seen_all:
            await self.more_outputs(self.choose.randrange(120))
            if self.choose.random() < 0.2:
                await self.nap()
            await self.swap(self.choose.randrange(len(self.folders)))

    async def more_outputs(self, count: int) -> None:
        """Lets the clients come so far, however fast they are."""
        until = self.num_outputs + count
        while self.num_outputs < until and not self.has_seen_all:
            await asyncio.sleep(0.001)

    async def nap(self) -> None:
        level = self.choose.choice([1, 2])
        await self.engine.run(lambda control: control.sleep(level))
        await self.engine.run(lambda control: control.wake_up())

    async def swap(self, version: int) -> int:
        self.num_swaps += 1
        way = self.choose.choice([self.from_disk, self.from_memory, self.in_chunks])
        return await way(self.folders[version])

    async def from_disk(self, folder: Path) -> int:
        return await self.engine.run(lambda control: control.update_weights_from_disk(str(folder)))

    async def from_memory(self, folder: Path) -> int:
        state = load_file(folder / "model.safetensors")
        return await self.engine.run(lambda control: control.load_state_dict(state))

    async def in_chunks(self, folder: Path) -> int:
        tensors = load_file(folder / "model.safetensors")

        def update(control: Control) -> int:
            control.begin_weight_update("recompute")
            for name, tensor in tensors.items():
                control.update_weights({name: tensor})
            return control.end_weight_update(full=True)

        return await self.engine.run(update)


@pytest.fixture
async def live(tiny_checkpoint: Checkpoint, seed: int) -> AsyncIterator[LiveHammer]:
    folders = [tiny_checkpoint("smollm2", seed=seed) for seed in (0, 11, 12)]
    engine = AsyncEngine(build(EngineConfig.from_flags(model=str(folders[0]), **OPTIONS)).engine)
    yield LiveHammer(folders, engine, seed)
    await engine.shutdown()


@pytest.mark.slow
async def test_real_models_answer_as_alone_under_one_version(live: LiveHammer) -> None:
    await live.run()
    stats = live.engine.control.prefix_cache_stats()
    assert stats.blocks_in_use == 0
    assert live.has_seen_all


@pytest.mark.long
async def test_real_models_show_a_missing_version_step(live, monkeypatch):
    _skip_the_version(monkeypatch)
    with pytest.raises(AssertionError):
        await live.run()
