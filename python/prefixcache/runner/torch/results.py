"""Steps whose results are still on the device."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.runner.sampled_rows import outputs_of
from prefixcache.runner.torch.attention.fence import Fence
from prefixcache.runner.torch.sampling.logprobs import PackedLogprobs
from prefixcache.runner.torch.sampling.sampler import Sampled
from prefixcache.types.step_plan import SamplingInput, SequenceOutput


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight on the device. `read` waits for its numbers, unless it `is_known`."""

    results: StepResults
    read: Callable[[], npt.NDArray[np.int64]]
    is_known: bool


class StepResults:
    """What the host gets of a step: its tokens, and the log probabilities that were asked for.

    `numbers`, one row of int64 on the device, is what `outputs` reads; it begins with the sampled
    `token_ids_R`. `inputs` are as in `outputs_of`, `prompt_logprobs` and `pooled`
    by the place of their sequence in the plan.
    """

    def __init__(
        self,
        inputs: Sequence[Sequence[SamplingInput]],
        sampled: Sampled,
        prompt_logprobs: Mapping[int, Sequence[PackedLogprobs]],
        pooled: Mapping[int, Tensor],
    ) -> None:
        self.token_ids_R = sampled.token_ids_R
        self._inputs = inputs
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._pooled = pooled
        pieces = itertools.chain.from_iterable(prompt_logprobs.values())
        packed = (row.double().view(torch.int64) for row in pooled.values())
        parts = [*sampled.parts, *(piece.numbers for piece in pieces), *packed]
        self._ends = list(itertools.accumulate(map(len, parts)))
        self.numbers = parts[0] if len(parts) == 1 else torch.cat(parts)

    def outputs(self, numbers: npt.NDArray[np.int64]) -> list[SequenceOutput]:
        """One output for each sequence of the plan: an empty one where nothing was due."""
        parts = (numbers[a:b] for a, b in itertools.pairwise([0, *self._ends]))
        outputs = outputs_of(self._inputs, self._sampled.outputs(parts))
        for index, pieces in self._prompt_logprobs.items():
            logprobs = tuple(logprobs for piece in pieces for logprobs in piece.unpack(next(parts)))
            if outputs[index].error is None:
                outputs[index] = dataclasses.replace(outputs[index], prompt_logprobs=logprobs)
        for index in self._pooled:
            row = next(parts).view(np.float64).astype(np.float32)
            outputs[index] = dataclasses.replace(outputs[index], pooled=row)
        return outputs


class ResultCopies:
    """Sampled tokens, and what goes with them, on their way to the host: one copy a step.

    At most two copies are in flight: the third start reuses the first one's memory.
    """

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self._slots = deque(_Slot(max_seqs, device) for _ in range(2))

    def start(self, results: Tensor) -> Callable[[], npt.NDArray[np.int64]]:
        """Starts the copy of int64 numbers; the result waits for its end and returns them."""
        if not len(results):
            return lambda: np.empty(0, np.int64)
        self._slots.rotate()
        return self._slots[0].start(results)


class _Slot:
    """Host memory for one copy: enough for tokens alone, and more once more is asked for."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._host = self._memory(size)
        self._fence = Fence(device)

    def start(self, results: Tensor) -> Callable[[], npt.NDArray[np.int64]]:
        if len(results) > len(self._host):
            self._host = self._memory(len(results))
        host = self._host[: len(results)]
        host.copy_(results, non_blocking=True)
        self._fence.mark()
        return lambda: self._read(host)

    def _read(self, host: Tensor) -> npt.NDArray[np.int64]:
        self._fence.wait()
        return host.numpy()

    def _memory(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=self._on_cuda)
