"""Steps with prompts as CUDA graphs of what lies between attentions.

A step of few tokens takes a card less time than the host to launch, and its attention cannot be
captured, since it depends on the sequences. So each run of work between two attentions is a graph,
and attention is launched as the step was planned. What depends on the number of tokens alone is
captured for some numbers; rows that are left over compute what nobody reads. Letters of shapes: T
tokens of a step, E hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prefixcache.runner.torch.attention.grouped import GroupedAttention, Rotation
from prefixcache.runner.torch.batch import Batch
from prefixcache.runner.torch.cuda_graph import (
    Capture,
    DecodeGraphs,
    Replay,
    StepTokens,
    choose_size,
    no_garbage_collection,
)
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.profile_run import null_batch

# Multiplications of a step that take a card about as long as the host takes to launch it.
_MOST_PRODUCTS = 4e12
_SIZES = (
    *(16, 32, 64),
    *range(128, 512, 64),
    *range(512, 1024, 128),
    *range(1024, 2049, 256),
)


def step_sizes(max_tokens: int, num_weights: int) -> tuple[int, ...]:
    """Numbers of tokens to capture; beyond them a model of this size keeps a card busy."""
    most = min(max_tokens, _MOST_PRODUCTS / max(num_weights, 1))
    return tuple(size for size in _SIZES if size <= most)


class PiecewiseGraphs:
    """The captured steps of one model on one device, by their number of tokens."""

    def __init__(
        self,
        model: DecoderModel,
        attention: GroupedAttention,
        *,
        sizes: Sequence[int],
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._model = model
        self._sizes = tuple(sizes)
        self._device = device
        self._tokens = StepTokens(max(sizes), device)
        self._hidden_TE: Tensor | None = None
        self._pieces = _AttentionBetweenPieces(attention, capture, max(sizes))
        # The largest first: smaller ones then find room in the memory it took.
        with no_garbage_collection():
            self._steps = {
                size: self._captured(size, capture) for size in sorted(sizes, reverse=True)
            }

    def fits(self, batch: Batch) -> bool:
        """Whether a captured step holds this one."""
        return len(batch.token_ids_T) <= self._sizes[-1]

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, E], valid until the next step; attention must be planned for it.

        Raises `ValueError` where no captured step holds it.
        """
        count = len(batch.token_ids_T)
        size = choose_size(self._sizes, count)
        if size is None or self._hidden_TE is None:
            raise ValueError(f"No graph holds {count} tokens; the largest has {self._sizes[-1]}.")
        self._tokens.load(batch)
        self._pieces.num_rows = count
        for part in self._steps[size]:
            part()
        return self._hidden_TE[:count]

    @torch.inference_mode()
    def _captured(self, size: int, capture: Capture) -> list[Replay]:
        """The step's graphs and attentions. It is run before: kernels are compiled then."""
        pieces = self._pieces
        pieces.plan([null_batch([1] * size, 1, self._device)] * pieces.num_groups)
        pieces.num_rows = size
        with capture.in_pieces():
            self._step(size)
            return pieces.recorded(partial(self._step, size))

    def _step(self, size: int) -> None:
        tokens = self._tokens
        hidden_TE = self._model.forward(tokens.ids[:size], tokens.positions[:size], self._pieces)
        if self._hidden_TE is None:
            self._hidden_TE = torch.empty_like(hidden_TE)
        self._hidden_TE[:size].copy_(hidden_TE)


class _AttentionBetweenPieces(GroupedAttention):
    """Attention of `num_rows` rows, which ends a piece of a recording and begins the next one.

    It takes tensors of fixed addresses, which all layers share, and leaves its result in one.
    """

    def __init__(self, attention: GroupedAttention, capture: Capture, max_rows: int) -> None:
        super().__init__(attention.groups, attention.backends)
        self.num_rows = 0
        self._capture = capture
        self._max_rows = max_rows
        self._fixed: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._parts: list[Replay] | None = None

    def recorded(self, step: Callable[[], None]) -> list[Replay]:
        """The pieces of a step that was run before, and the attentions between them."""
        parts = self._parts = []
        self._capture.begin()
        step()
        parts.append(self._capture.end())
        self._parts = None
        return parts

    def run(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `GroupedAttention.run`."""
        given = [self._copied(place, x) for place, x in enumerate((q_THD, k_TKD, v_TKD))]
        run = super().run

        def attend(rows: slice) -> Tensor:
            q, k, v = (None if x is None else x[rows] for x in given)
            assert q is not None
            return run(layer, q, k, v, sinks_H)

        return self._between(attend, q_THD)

    def _rotate_and_run(
        self, layer: int, qk_TND: Tensor, v_TKD: Tensor, rotation: Rotation
    ) -> Tensor:
        qk, v = self._copied(3, qk_TND), self._copied(4, v_TKD)
        assert qk is not None
        assert v is not None
        cosines, sines = rotation
        run = super()._rotate_and_run

        def attend(rows: slice) -> Tensor:
            return run(layer, qk[rows], v[rows], (cosines[rows], sines[rows]))

        return self._between(attend, qk_TND[:, v_TKD.shape[1] :])

    def _between(self, attend: Callable[[slice], Tensor], like: Tensor) -> Tensor:
        """What attention leaves: [T, H, D] as `like`."""
        out = self._at(5, like)

        def part() -> None:
            rows = slice(self.num_rows)
            out[rows].copy_(attend(rows))

        if self._parts is None:
            part()
        else:
            self._parts += [self._capture.end(), part]
            self._capture.begin()
        return out[: len(like)]

    def _copied(self, place: int, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        fixed = self._at(place, x)
        fixed[: len(x)].copy_(x)
        return fixed

    def _at(self, place: int, like: Tensor) -> Tensor:
        """The tensor of this place, for the rows of the largest step."""
        key = (place, like.shape[1:], like.dtype)
        if key not in self._fixed:
            self._fixed[key] = like.new_empty((self._max_rows, *like.shape[1:]))
        return self._fixed[key]


@dataclass(frozen=True, slots=True)
class Graphs:
    """What is captured of a model: decodes as a whole, other steps in pieces."""

    decodes: DecodeGraphs
    steps: PiecewiseGraphs | None
