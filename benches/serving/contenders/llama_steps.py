"""What llama.cpp and ik_llama.cpp have in common: one batch of tokens a step, greedy.

Warm means that the sequence's KV cells stay in the context, as their servers keep them for a slot.
Of states they go back to none, so a model that has them has no warm time.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class LlamaSteps(ABC):
    """The tasks, for whoever has a `llama_batch` and can compute it."""

    _batch: Any
    _vocab_size: int

    @abstractmethod
    def _compute(self) -> int:
        """`llama_decode` of the batch: 0 if it was computed."""

    @abstractmethod
    def _logits(self, index: int) -> ctypes._Pointer[ctypes.c_float]:
        """Of the batch's token at that index."""

    @abstractmethod
    def _clear(self) -> None:
        """Drops every sequence."""

    @abstractmethod
    def _cut(self, length: int) -> bool:
        """Keeps the first tokens of sequence 0 alone; False if its states cannot go back."""

    def ttft(self, prompt: list[int], first: list[int], second: list[int]) -> dict[str, float]:
        cold = self._prefill({0: prompt + first})
        begun = time.perf_counter()
        if not self._cut(len(prompt)):
            return {"cold": cold}
        self._decode({0: second}, start=len(prompt))
        return {"cold": cold, "warm": time.perf_counter() - begun}

    def begin(self, prompts: list[list[int]], max_steps: int) -> None:  # noqa: ARG002
        self._prefill(dict(enumerate(prompts)))
        self._length = len(prompts[0])

    def go_on(self, steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            self._decode({row: [token] for row, token in enumerate(self._rows[-1])}, self._length)
            self._length += 1
        return time.perf_counter() - begun

    def end(self) -> list[int]:
        return [tokens[0] for tokens in self._rows]

    def log_probabilities(self, tokens: list[int]) -> list[float]:
        """Of each token after the first, given those before it."""
        self._clear()
        self._fill({0: tokens}, start=0)
        for index in range(len(tokens)):
            self._batch.logits[index] = True
        if self._compute() != 0:
            raise RuntimeError("llama_decode failed")
        return [self._log_probability(index, token) for index, token in enumerate(tokens[1:])]

    def _prefill(self, rows: dict[int, list[int]]) -> float:
        self._clear()
        self._rows: list[list[int]] = []
        begun = time.perf_counter()
        self._decode(rows, start=0)
        return time.perf_counter() - begun

    def _decode(self, rows: dict[int, list[int]], start: int) -> None:
        """Computes each sequence's tokens from position `start` on, and keeps their next ones."""
        last = self._fill(rows, start)
        if self._compute() != 0:
            raise RuntimeError("llama_decode failed")
        self._rows.append([self._likeliest(index) for index in last])

    def _fill(self, rows: dict[int, list[int]], start: int) -> list[int]:
        batch, index, last = self._batch, 0, []
        for sequence, tokens in rows.items():
            for offset, token in enumerate(tokens):
                batch.token[index] = token
                batch.pos[index] = start + offset
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = offset == len(tokens) - 1
                index += 1
            last.append(index - 1)
        batch.n_tokens = index
        return last

    def _row(self, index: int) -> np.ndarray:
        return np.ctypeslib.as_array(self._logits(index), shape=(self._vocab_size,))

    def _likeliest(self, index: int) -> int:
        return int(np.argmax(self._row(index)))

    def _log_probability(self, index: int, token: int) -> float:
        row = self._row(index).astype(np.float64)
        return float(row[token] - row.max() - np.log(np.exp(row - row.max()).sum()))
