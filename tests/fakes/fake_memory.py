"""Weights that are a number, and a runner whose tokens tell under which weights KV was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fakes.fake_cache import make_cache
from fakes.fake_engine import make_engine
from fakes.fake_runner import FakeRunner, window_of
from fakes.late_runner import LateRunner
from fakes.plain_runner import next_token
from prefixcache.engine.engine import Engine
from prefixcache.engine.weight_versions import content_name
from prefixcache.exceptions import ModelLoadError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.specs import GroupKind
from prefixcache.models.checkpoint import Checkpoint
from prefixcache.types.request import TokenLogprobs
from prefixcache.types.step_plan import (
    SamplingInput,
    ScheduledSequence,
    SequenceOutput,
    StepPlan,
)

NAMES = ("a", "b")


def versioned_token(history: Sequence[int], writers: Sequence[int], weights: int) -> int:
    """The token after a history whose KV was written under `writers`, sampled under `weights`."""
    pairs = zip(history, writers, strict=True)
    return next_token([*(token * 1000 + writer for token, writer in pairs), weights])


def lone_answer(
    prompt: Sequence[int],
    max_tokens: int,
    weights: int,
    groups: Sequence[GroupKind] = ("full",),
) -> list[int]:
    """What a request gets that nobody disturbs."""
    tokens = list(prompt)
    window = window_of(groups) or len(prompt) + max_tokens
    for _ in range(max_tokens):
        seen = tokens[-window:]
        tokens.append(versioned_token(seen, [weights] * len(seen), weights))
    return tokens[len(prompt) :]


class VersionedRunner(FakeRunner):
    """Computes only while weights and KV are there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writers = np.full(self._kv.shape, -1, dtype=np.int64)
        self.arrays.append(self._writers)
        self.weights: int | None = 0
        self.has_kv = True

    def execute(self, plan: StepPlan) -> list[SequenceOutput]:
        assert self.weights is not None
        assert self.has_kv
        self._write(self._writers, np.full(plan.num_tokens, self.weights))
        return super().execute(plan)

    def _prompt_logprobs(self, row: int, sequence: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
        """Their ranks are the weights."""
        assert self.weights is not None
        found = super()._prompt_logprobs(row, sequence)
        return tuple(dataclasses.replace(one, rank=self.weights) for one in found)

    def lose_kv(self) -> None:
        self.has_kv = False
        self._kv[:] = -1
        self._writers[:] = -1

    def _output(
        self, row: int, sequence: ScheduledSequence, sampling: SamplingInput | None, end: int
    ) -> SequenceOutput:
        output = super()._output(row, sequence, sampling, end)
        if output.token_id is None:
            return output
        assert self.weights is not None
        history, writers = (self._seen(kv, row, end) for kv in (self._kv, self._writers))
        token = versioned_token(history, writers, self.weights)
        return dataclasses.replace(output, token_id=token)


class LateVersionedRunner(VersionedRunner, LateRunner):
    """Computes late, and so under the weights of that moment."""


class FakeWeights:
    """The folder `.../7` holds the weights 7, whose digest is "7"; other folders are refused."""

    quantized_digest = requantized_digest = None

    def __init__(self, runner: VersionedRunner) -> None:
        self._runner = runner
        self.checkpoint: Checkpoint | None = fake_checkpoint(0)
        self._unwritten: set[str] = set()

    @property
    def complete(self) -> bool:
        return self._runner.weights is not None and not self._unwritten

    def check_folder(self, folder: Path) -> Checkpoint:
        if not folder.name.isdigit():
            raise ModelLoadError(f"{folder} holds no number.")
        return Checkpoint(folder, folder.name)

    def check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name in tensors:
            if name not in NAMES:
                raise ModelLoadError(f"The update holds an unexpected tensor {name}.")

    def check_all_named(self, names: Collection[str]) -> None:
        if missing := set(NAMES) - set(names):
            raise ModelLoadError(f"The update lacks {sorted(missing)}.")

    def load(self, checkpoint: Checkpoint) -> None:
        self.check_folder(checkpoint.folder)
        self._runner.weights, self._unwritten = int(checkpoint.digest), set()
        self.checkpoint = checkpoint

    def write(self, tensors: Mapping[str, Tensor]) -> set[str]:
        self.check_tensors(tensors)
        if self._runner.weights is None:
            self._unwritten = set(NAMES)
        self._unwritten -= tensors.keys()
        self.checkpoint = None
        for tensor in tensors.values():
            self._runner.weights = int(tensor)
        return set(tensors)

    replace = write

    def missing(self) -> set[str]:
        return set(self._unwritten) if self._runner.weights is not None else set(NAMES)

    def give_up(self) -> None:
        self._runner.weights = None
        self._unwritten = set()


def fake_checkpoint(weights: int) -> Checkpoint:
    """The folder with these weights."""
    return Checkpoint(Path(str(weights)), str(weights))


class FakeMemory:
    def __init__(self, runner: VersionedRunner) -> None:
        self._runner = runner
        self.weights = FakeWeights(runner)
        self.num_settled = 0

    @property
    def has_kv(self) -> bool:
        return self._runner.has_kv

    def make_kv(self) -> None:
        self._runner.has_kv = True

    def give_up_kv(self) -> None:
        self._runner.lose_kv()

    def settle(self) -> None:
        self.num_settled += 1


def make_versioned_engine(
    *, ahead: bool = False, max_weight_staleness: int = 0, **options: Any
) -> tuple[Engine, Any, CacheManager]:
    """An engine whose weights can be replaced and given up."""
    cache = {"weights": content_name("0"), "max_weight_staleness": max_weight_staleness}
    return make_engine(
        make_runner=LateVersionedRunner if ahead else VersionedRunner,
        make_memory=FakeMemory,
        make_cache=partial(make_cache, **cache),
        **options,
    )
