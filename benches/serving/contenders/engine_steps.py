"""What engines have in common that take requests and are then asked for steps, greedy."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class EngineSteps(ABC):
    """The tasks, for an engine with a prefix cache of its own."""

    _batch: list[Any]
    _tokens: list[int]

    @abstractmethod
    def _added(self, prompt: Sequence[int], max_tokens: int) -> Any:
        """A new request of that many tokens, whatever they are."""

    @abstractmethod
    def _step(self, requests: Sequence[Any]) -> int:
        """One step, in which each of the requests gets one token; the first one's token."""

    def _reset(self) -> None:
        """Empties the cache, where an earlier task may have left a prompt in it."""
        return

    def weight_bytes(self) -> int | None:
        """None if the engine does not say."""
        return None

    def ttft(self, prompt: list[int], first: list[int], second: list[int]) -> dict[str, float]:
        self._reset()
        cold = self._first_token(prompt + first)
        return {"cold": cold, "warm": self._first_token(prompt + second)}

    def begin(self, prompts: list[list[int]], max_steps: int) -> None:
        self._reset()
        self._batch = [self._added(prompt, max_steps + 2) for prompt in prompts]
        self._tokens = [self._step(self._batch)]

    def go_on(self, steps: int) -> float:
        begun = time.perf_counter()
        self._tokens += [self._step(self._batch) for _ in range(steps)]
        return time.perf_counter() - begun

    def _first_token(self, prompt: Sequence[int]) -> float:
        begun = time.perf_counter()
        self._step([self._added(prompt, 1)])
        return time.perf_counter() - begun
