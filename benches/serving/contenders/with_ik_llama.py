"""ik_llama.cpp through its own library, one `llama_decode` a step, greedy.

Its structures are not those of llama-cpp-python, so a few lines of C are compiled with its header.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int, c_int8, c_int32, c_uint64, c_void_p
from pathlib import Path

from contenders.llama_steps import LlamaSteps

_C = """
#include "llama.h"
struct llama_context *opened(const char *file, int tokens, int seqs, int threads) {
    struct llama_model_params model = llama_model_default_params();
    struct llama_context_params context = llama_context_default_params();
    context.n_ctx = context.n_batch = tokens;
    context.n_seq_max = seqs;
    context.n_threads = context.n_threads_batch = threads;
    SETTINGS;
    llama_backend_init();
    struct llama_model *weights = llama_model_load_from_file(file, model);
    return weights ? llama_init_from_model(weights, context) : NULL;
}
struct llama_batch *new_batch(int tokens) {
    static struct llama_batch batch;
    batch = llama_batch_init(tokens, 0, 1);
    return &batch;
}
int compute(struct llama_context *context, struct llama_batch *batch) {
    return llama_decode(context, *batch);
}
"""


class _Batch(ctypes.Structure):
    """The beginning of a `llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class Contender(LlamaSteps):
    """`build` is a folder in which cmake has built a checkout of ik_llama.cpp.

    `settings` set fields of its parameters: "context.flash_attn=0,model.repack_tensors=1".
    """

    def __init__(
        self,
        *,
        model: str,
        build: str,
        threads: int,
        max_tokens: int,
        max_seqs: int,
        settings: str = "",
    ) -> None:
        self._library = lib = _compiled(Path(build), settings)
        self._context = c_void_p(lib.opened(model.encode(), max_tokens, max_seqs, threads))
        if not self._context:
            raise RuntimeError(f"ik_llama.cpp could not open {model}")
        self._model = c_void_p(lib.llama_get_model(self._context))
        self._vocab_size = lib.llama_n_vocab(self._model)
        self._batch = lib.new_batch(max_tokens).contents
        info = lib.llama_print_system_info().decode()
        self.version = f"ik_llama.cpp {_commit(Path(build))}, {info}"

    def weight_bytes(self) -> int:
        return self._library.llama_model_size(self._model)

    def _compute(self) -> int:
        return self._library.compute(self._context, ctypes.byref(self._batch))

    def _logits(self, index: int) -> ctypes._Pointer[c_float]:
        return self._library.llama_get_logits_ith(self._context, index)

    def _clear(self) -> None:
        self._library.llama_kv_cache_clear(self._context)

    def _cut(self, length: int) -> bool:
        return self._library.llama_kv_cache_seq_rm(self._context, 0, length, -1)


def _compiled(build: Path, settings: str) -> ctypes.CDLL:
    """The library, with the functions of `_C`."""
    source = build.parent
    found = next(build.rglob("libllama.so")).parent
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/shim.so"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", target]
        command += [f"-I{source}/include", f"-I{source}/ggml/include"]
        command += [f"-L{found}", "-lllama", f"-Wl,-rpath,{found}"]
        code = _C.replace("SETTINGS", settings.replace(",", ";"))
        subprocess.run(command, input=code, text=True, check=True)
        library = ctypes.CDLL(target)
    library.opened.restype = library.llama_get_model.restype = c_void_p
    library.new_batch.restype = POINTER(_Batch)
    library.llama_model_size.restype = c_uint64
    library.llama_print_system_info.restype = ctypes.c_char_p
    library.llama_get_logits_ith.restype = POINTER(c_float)
    library.llama_get_logits_ith.argtypes = [c_void_p, c_int]
    library.llama_kv_cache_seq_rm.restype = ctypes.c_bool
    return library


def _commit(build: Path) -> str:
    command = ["git", "-C", str(build), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
