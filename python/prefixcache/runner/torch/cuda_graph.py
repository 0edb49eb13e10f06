"""Decode steps as CUDA graphs: one launch in place of hundreds.

A graph is captured for each of a few batch sizes. A step takes the smallest that holds it; the
rows that are left over read and write the null block, and nobody reads what they compute. Each
graph holds the model, the logits and the greedy choice. What is done for other sampling options
follows outside, on the graph's logits. Letters of shapes: S sequences of the step, V vocabulary.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from prefixcache.runner.torch.attention.grouped import GroupedAttention
from prefixcache.runner.torch.batch import Batch
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.profile_run import null_batch
from prefixcache.runner.torch.sampling.sampler import greedy_token_ids

Replay = Callable[[], None]


class Capture(Protocol):
    """Records the work that is launched; a replay launches it again.

    The memory that a recording takes for itself may be used again by the next one.
    """

    def __call__(self, step: Callable[[], None], /) -> Replay:
        """Records a whole step, after running it at least once."""
        ...

    def in_pieces(self) -> AbstractContextManager[None]:
        """Around a step that is run as a whole and then recorded in pieces."""
        ...

    def begin(self) -> None:
        """Begins a piece."""
        ...

    def end(self) -> Replay:
        """Ends the piece."""
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a replay computed, on the device: valid until the next one."""

    token_ids_S: Tensor  # greedy choices, -1 where the logits are unusable
    logits_SV: Tensor


def graph_sizes(max_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: close together where rows are cheap, up to `max_seqs` itself.

    At most an eighth of a large batch is padding; below 8 rows it is at most half.
    """
    if max_seqs < 1:
        raise ValueError(f"max_seqs must be at least 1, got {max_seqs}.")
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_seqs, 32)]
    return (*(size for size in steps if size < max_seqs), max_seqs)


def choose_size(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `count` rows, None when all are smaller."""
    at = bisect.bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


class DecodeGraphs:
    """The captured decodes of one model on one device.

    `max_page_indices` bounds the page indices of a decode in each group: sequences times the most
    pages of one.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: GroupedAttention,
        *,
        sizes: Sequence[int],
        max_page_indices: Sequence[int],
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sizes = tuple(sizes)
        self._device = device
        self._tokens = StepTokens(max(sizes), device)
        self._chosen_S = torch.zeros(max(sizes), dtype=torch.int64, device=device)
        self._logits_SV: Tensor | None = None
        attention.reserve_graphs(self._sizes, max_page_indices)
        # The largest first: smaller ones then find room in the memory it took.
        with no_garbage_collection():
            self._replays = {
                size: self._capture(size, capture) for size in sorted(sizes, reverse=True)
            }

    def fits(self, batch: Batch) -> bool:
        """Whether the step is a pure decode that a graph holds."""
        count = len(batch.attention[0].last_page_len)
        return batch.attention[0].num_decodes == count <= self._sizes[-1]

    def run(self, batch: Batch) -> Decoded:
        """Replays the smallest graph that holds the step. Raises `ValueError` when none does."""
        count = len(batch.attention[0].last_page_len)
        size = choose_size(self._sizes, count)
        if size is None or self._logits_SV is None:
            raise ValueError(
                f"No graph holds {count} sequences; the largest has {self._sizes[-1]}."
            )
        self._attention.plan_graph(batch.attention, size)
        self._tokens.load(batch)
        self._replays[size]()
        return Decoded(self._chosen_S[:count], self._logits_SV[:count])

    @torch.inference_mode()
    def _capture(self, size: int, capture: Capture) -> Replay:
        row = replace(null_batch([1], 1, self._device), num_decodes=1)
        self._attention.plan_graph([row] * self._attention.num_groups, size)
        return capture(lambda: self._step(size))

    def _step(self, size: int) -> None:
        """What a graph holds. All it reads and leaves behind has a fixed address."""
        tokens = self._tokens
        hidden_TE = self._model.forward(tokens.ids[:size], tokens.positions[:size], self._attention)
        logits_RV = self._model.compute_logits(hidden_TE)
        if self._logits_SV is None:
            self._logits_SV = torch.empty_like(logits_RV)
        self._logits_SV[:size].copy_(logits_RV)
        self._chosen_S[:size].copy_(greedy_token_ids(logits_RV))


class StepTokens:
    """Inputs of a step at fixed addresses. Rows beyond it keep old tokens."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)

    def load(self, batch: Batch) -> None:
        """The step's tokens; they are on the device, so the copies only queue up."""
        count = len(batch.token_ids_T)
        self.ids[:count].copy_(batch.token_ids_T)
        self.positions[:count].copy_(batch.positions_T)


class CudaCapture:
    """Records CUDA graphs that share one pool of memory.

    The step runs twice before: kernels are compiled, libraries make their handles and choose
    their algorithms then, none of which can be captured.
    """

    _WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._piece = torch.cuda.CUDAGraph()

    def __call__(self, step: Callable[[], None], /) -> Replay:
        """Captures `step`; the result replays it on the stream that is current then."""
        with self.in_pieces():
            for _ in range(self._WARM_UPS):
                step()
            torch.cuda.synchronize(self._stream.device)
            self.begin()
            step()
            return self.end()

    @contextmanager
    def in_pieces(self) -> Generator[None, None, None]:
        """All on the stream of the captures."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def begin(self) -> None:
        """Begins a graph."""
        self._piece = torch.cuda.CUDAGraph()
        self._piece.capture_begin(pool=self._pool)

    def end(self) -> Replay:
        """Ends the graph; the result replays it on the stream that is current then."""
        self._piece.capture_end()
        return self._piece.replay


@contextmanager
def no_garbage_collection() -> Generator[None, None, None]:
    """Graphs and tensors of an engine before are freed now: a capture may not free memory."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
