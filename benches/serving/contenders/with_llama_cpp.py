"""llama.cpp through llama-cpp-python's low-level functions, one `llama_decode` a step, greedy.

Warm means that the sequence's KV cells stay in the context, as its server keeps them for a slot.
Of states it goes back to none, so a model that has them has no warm time.
"""

from __future__ import annotations

import ctypes
import time
from importlib.metadata import version

import llama_cpp
import numpy as np


class Contender:
    def __init__(self, *, model: str, threads: int, max_tokens: int, max_seqs: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        self._context = llama_cpp.llama_init_from_model(
            self._model, _context_params(threads, max_tokens, max_seqs)
        )
        if not self._context:
            raise RuntimeError(f"llama.cpp could not open {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(max_tokens, 0, 1)
        self.version = f"llama-cpp-python {version('llama-cpp-python')}"

    def weight_bytes(self) -> int:
        return llama_cpp.llama_model_size(self._model)

    def ttft(self, prompt: list[int], first: list[int], second: list[int]) -> dict[str, float]:
        cold = self._prefill({0: prompt + first})
        begun = time.perf_counter()
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, len(prompt), -1):
            return {"cold": cold}
        self._decode({0: second}, start=len(prompt))
        return {"cold": cold, "warm": time.perf_counter() - begun}

    def save(
        self, file: str, prompt: list[int], first: list[int], second: list[int]
    ) -> dict[str, float]:
        """Cold and warm, then the prompt's slot to a file, and through memory and back."""
        times = self.ttft(prompt, first, second)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, len(prompt), -1)
        tokens = (llama_cpp.llama_token * len(prompt))(*prompt)
        begun = time.perf_counter()
        llama_cpp.llama_state_seq_save_file(self._context, file.encode(), 0, tokens, len(prompt))
        times["save"] = time.perf_counter() - begun
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self._context, 0))()
        llama_cpp.llama_state_seq_get_data(self._context, state, len(state), 0)
        llama_cpp.llama_memory_clear(self._memory, True)
        begun = time.perf_counter()
        llama_cpp.llama_state_seq_set_data(self._context, state, len(state), 0)
        self._decode({0: second}, start=len(prompt))
        return times | {"memory": time.perf_counter() - begun}

    def restore(self, file: str, length: int, second: list[int]) -> dict[str, float]:
        """The slot of a file of another process, up to the first token."""
        tokens, count = (llama_cpp.llama_token * length)(), ctypes.c_size_t()
        self._rows = []
        begun = time.perf_counter()
        llama_cpp.llama_state_seq_load_file(
            self._context, file.encode(), 0, tokens, length, ctypes.byref(count)
        )
        self._decode({0: second}, start=count.value)
        assert count.value == length
        return {"after": time.perf_counter() - begun}

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

    def _prefill(self, rows: dict[int, list[int]]) -> float:
        llama_cpp.llama_memory_clear(self._memory, True)
        self._rows: list[list[int]] = []
        begun = time.perf_counter()
        self._decode(rows, start=0)
        return time.perf_counter() - begun

    def _decode(self, rows: dict[int, list[int]], start: int) -> None:
        """Computes each sequence's tokens from position `start` on, and keeps their next ones."""
        last = self._fill(rows, start)
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
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

    def _likeliest(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))


def _context_params(threads: int, max_tokens: int, max_seqs: int) -> ctypes.Structure:
    """Each sequence gets an equal share of the tokens."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = max_tokens
    params.n_batch = max_tokens
    params.n_seq_max = max_seqs
    params.n_threads = params.n_threads_batch = threads
    return params
