"""No model: reads as many bytes as the weights are, once a step. What memory allows at most."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class Contender:
    def __init__(self, *, num_bytes: int, threads: int, **_: object) -> None:
        words = np.random.default_rng(0).integers(0, 1 << 31, num_bytes // 4, np.int32)
        self._parts = np.array_split(words, threads)
        self._threads = ThreadPoolExecutor(threads)
        self._num_bytes = num_bytes
        self.version = f"numpy {np.__version__}"

    def weight_bytes(self) -> int:
        return self._num_bytes

    def ttft(self, **_: object) -> None:
        return None

    def begin(self, prompts: list[list[int]], max_steps: int) -> None:  # noqa: ARG002
        self._is_alone = len(prompts) == 1

    def go_on(self, steps: int) -> float | None:
        """Of a batch of one alone: the others read no more, so they would tell nothing new."""
        if not self._is_alone:
            return None
        begun = time.perf_counter()
        for _ in range(steps):
            list(self._threads.map(np.max, self._parts))
        return time.perf_counter() - begun

    def end(self) -> None:
        return None
