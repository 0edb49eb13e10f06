"""llama.cpp through llama-cpp-python's low-level functions, one `llama_decode` a step, greedy."""

from __future__ import annotations

import ctypes
import time
from importlib.metadata import version

import llama_cpp

from contenders.llama_steps import LlamaSteps


class Contender(LlamaSteps):
    """`settings` set fields of its parameters: "context.n_ubatch=256,model.use_extra_bufts=0"."""

    def __init__(
        self, *, model: str, threads: int, max_tokens: int, max_seqs: int, settings: str = ""
    ) -> None:
        params = {
            "model": llama_cpp.llama_model_default_params(),
            "context": llama_cpp.llama_context_default_params(),
        }
        context = params["context"]
        context.n_ctx = context.n_batch = max_tokens
        context.n_seq_max = max_seqs
        context.n_threads = context.n_threads_batch = threads
        for setting in filter(None, settings.split(",")):
            place, value = setting.split("=")
            of, name = place.split(".")
            getattr(params[of], name)
            setattr(params[of], name, int(value))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), params["model"])
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not open {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(max_tokens, 0, 1)
        build = llama_cpp.llama_print_system_info().decode()
        self.version = f"llama-cpp-python {version('llama-cpp-python')}, {build}"

    def weight_bytes(self) -> int:
        return llama_cpp.llama_model_size(self._model)

    def save(
        self, file: str, prompt: list[int], first: list[int], second: list[int]
    ) -> dict[str, float]:
        """Cold and warm, then the prompt's slot to a file, and through memory and back."""
        times = self.ttft(prompt, first, second)
        self._cut(len(prompt))
        tokens = (llama_cpp.llama_token * len(prompt))(*prompt)
        begun = time.perf_counter()
        llama_cpp.llama_state_seq_save_file(self._context, file.encode(), 0, tokens, len(prompt))
        times["save"] = time.perf_counter() - begun
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self._context, 0))()
        llama_cpp.llama_state_seq_get_data(self._context, state, len(state), 0)
        self._clear()
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

    def _compute(self) -> int:
        return llama_cpp.llama_decode(self._context, self._batch)

    def _logits(self, index: int) -> ctypes._Pointer[ctypes.c_float]:
        return llama_cpp.llama_get_logits_ith(self._context, index)

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)

    def _cut(self, length: int) -> bool:
        return llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
