"""A CUDA graph's stand-in on the CPU: records what a step launches, and launches it again.

What Python computed while recording is frozen, as in a real graph: a tensor that a replay should
read but that the host made again, or a number that became part of the recording, shows as a
wrong result. Work that a real capture forbids (reading a value back, uploading one) raises here.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from reference import flashinfer_reference

_FORBIDDEN = {
    torch.ops.aten._local_scalar_dense.default: "reads a value back to the host",
    torch.ops.aten.nonzero.default: "has a result whose size the host must know",
    torch.ops.aten.lift_fresh.default: "uploads a tensor from the host",
}


class TapeCapture:
    """Records steps; `kernels` are FlashInfer's reference kernels, each one entry of a recording.

    Kernels read their tables when they run, so they are replayed as a whole; the page indices are
    those whose address was recorded.
    """

    def __init__(self) -> None:
        self._recording: _Tape | None = None
        self.num_replays = 0
        self.kernels = types.SimpleNamespace(
            BatchPrefillWithPagedKVCacheWrapper=self._taped(
                flashinfer_reference.BatchPrefillWithPagedKVCacheWrapper
            ),
            BatchDecodeWithPagedKVCacheWrapper=self._taped(
                flashinfer_reference.BatchDecodeWithPagedKVCacheWrapper
            ),
            append_paged_kv_cache=self._append,
        )

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        self.begin()
        step()
        return self.end()

    def in_pieces(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        self._recording = _Tape()
        self._recording.__enter__()

    def end(self) -> Callable[[], None]:
        tape = self._recording
        assert tape is not None
        tape.__exit__(None, None, None)
        self._recording = None
        return lambda: self._replay(tape)

    def _replay(self, tape: _Tape) -> None:
        self.num_replays += 1
        tape.replay()

    def _append(self, *args: Any) -> None:
        self._launch(flashinfer_reference.append_paged_kv_cache, *args)

    def _launch(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._recording is None:
            return kernel(*args, **kwargs)
        return self._recording.launch(kernel, *args, **kwargs)

    def _taped(self, wrapper: type) -> type:
        capture = self

        class Taped(wrapper):  # type: ignore[misc]
            def run(self, *args: Any, **kwargs: Any) -> Tensor:
                indices = self._paged_kv_indices_buf

                def kernel(*args: Any, **kwargs: Any) -> Tensor:
                    self._paged_kv_indices_buf = indices
                    return wrapper.run(self, *args, **kwargs)

                return capture._launch(kernel, *args, **kwargs)

        return Taped


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FORBIDDEN:
            raise RuntimeError(f"A captured step {_FORBIDDEN[func]} ({func}).")
        return self._record(func, args, kwargs or {})

    def launch(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return self._record(kernel, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)
