"""How long a step will take, learned from the steps before it.

A step costs a fixed time, a time for each token (the linears), and a time for each pair of a token
and a position that it attends to, so that the same chunk takes longer deeper in a prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from prefixcache.types.step_plan import StepPlan

_REMEMBERED_STEPS = 16
_AGEING = 0.8
"""Weight of a remembered step relative to the next younger one of its kind."""
_TYPICAL_TOKENS = 16
_SHORTEST = 1e-6
"""Seconds of the shortest step: a clock may tell none at all."""
_NEW = 0.05
"""Weight of the last step in the averages of `RowTimes`."""
_USUAL_SHARE = 0.2
_DOUBT = 0.5
"""Variance of rows from which what was measured counts more than what is usual."""


class StepLoad(NamedTuple):
    """What a step computes: tokens, and pairs of a token and a position it attends to."""

    tokens: int = 0
    pairs: int = 0

    def plus(self, start: int, count: int) -> StepLoad:
        """With `count` more tokens of one sequence, at positions from `start` on."""
        pairs = count * start + count * (count + 1) // 2
        return StepLoad(self.tokens + count, self.pairs + pairs)


_Sample = tuple[StepLoad, float]
"""What a step computed, and the seconds that it took."""


class StepTimeModel:
    """Seconds of a step by its load: least squares over the last steps, and how far they stray.

    Steps with chunks of prompts are remembered apart from pure decodes, thousands of which lie
    between two prompts. Of decodes with drafts `RowTimes` learns.
    """

    def __init__(self) -> None:
        self._decodes: deque[_Sample] = deque(maxlen=_REMEMBERED_STEPS)
        self._prefills: deque[_Sample] = deque(maxlen=_REMEMBERED_STEPS)
        self._fitted: _Fit | None = None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns that the step took so long."""
        if plan.drafts and plan.num_decodes == len(plan.sequences):
            return
        load = StepLoad()
        for sequence in plan.sequences:
            load = load.plus(sequence.start, sequence.num_tokens)
        is_decode = load.tokens == len(plan.sequences)
        samples = self._decodes if is_decode else self._prefills
        samples.append((load, max(seconds, _SHORTEST)))
        self._fitted = None

    def most_tokens(
        self, load: StepLoad, start: int, wanted: int, seconds: float, *, stays_near: bool
    ) -> int:
        """How many of `wanted` tokens from `start` on may join a step of `load`.

        As many as let the step end within `seconds`. With `stays_near` it is also not far from all
        that were measured: what nobody measured may take any time.
        """
        fit = self._fit()
        fewest, most = 0, wanted
        while fewest < most:  # load and time grow with the tokens
            middle = (fewest + most + 1) // 2
            together = load.plus(start, middle)
            is_near = fit.covers(together) or not stays_near
            if is_near and fit.longest(together) <= seconds:
                fewest = middle
            else:
                most = middle - 1
        return fewest

    def seconds(self, start: int, count: int, chunk: int) -> float:
        """How long `count` tokens from `start` on take in chunks; 0 until a chunk was measured."""
        if not self._prefills:
            return 0.0
        fit, load = self._fit(), StepLoad().plus(start, count)
        num_steps = -(-count // chunk)
        return fit.per_step * num_steps + fit.per_token * load.tokens + fit.per_pair * load.pairs

    def _fit(self) -> _Fit:
        if self._fitted is None:
            self._fitted = _Fit.to(self._decodes, self._prefills)
        return self._fitted


class RowTimes:
    """How much longer a step takes with more rows, by the times of steps without chunks.

    A line through them, where the last steps count most. Where these had equally many rows, a row
    is taken to cost `_USUAL_SHARE` of what a step costs in any case: so drafts that were too dear
    once are tried again.
    """

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns that the step took so long."""
        if plan.num_decodes < len(plan.sequences) or not plan.num_tokens:
            return
        if not self._seconds:
            self._rows, self._seconds = plan.num_tokens, seconds
        rows, late = plan.num_tokens - self._rows, seconds - self._seconds
        self._rows += _NEW * rows
        self._seconds += _NEW * late
        self._variance = (1 - _NEW) * (self._variance + _NEW * rows * rows)
        self._covariance = (1 - _NEW) * (self._covariance + _NEW * rows * late)

    def times_longer(self, fewer: int, more: int) -> float:
        """How many times longer a step of `more` rows takes than one of `fewer`, at least 1."""
        usual = _USUAL_SHARE * self._seconds / (1 + _USUAL_SHARE * self._rows)
        a_row = (self._covariance + _DOUBT * usual) / (self._variance + _DOUBT)
        before = self._seconds + a_row * (fewer - self._rows)
        if a_row <= 0 or before <= 0:
            return 1 + _USUAL_SHARE * (more - fewer) / (1 + _USUAL_SHARE * fewer)
        return 1 + a_row * (more - fewer) / before


class _Fit(NamedTuple):
    """Seconds for a step, a token and a pair; how far steps stray, as a share of their time."""

    per_step: float
    per_token: float
    per_pair: float
    spread: float
    largest: StepLoad

    @classmethod
    def to(cls, decodes: Sequence[_Sample], prefills: Sequence[_Sample]) -> _Fit:
        """The fit to what was measured, each kind from the oldest to the youngest."""
        samples = [*decodes, *prefills]
        if not samples:
            return cls(0.0, 0.0, 0.0, 0.0, StepLoad())
        loads = np.array([(1.0, *load) for load, _ in samples])
        seconds = np.array([duration for _, duration in samples])
        # Errors count as shares of a step of that load, not of the time it happened to take: that
        # would trust the fastest steps most.
        weights = np.array([*_weights(len(decodes)), *_weights(len(prefills))])
        weights /= _TYPICAL_TOKENS + loads[:, 1]
        costs = _nonnegative_least_squares(loads * weights[:, None], seconds * weights)
        chunks = slice(len(decodes), None)
        return cls(
            *costs.tolist(),
            spread=_spread(loads[chunks] @ costs, seconds[chunks]),
            largest=StepLoad(*map(int, loads[:, 1:].max(axis=0))),
        )

    def longest(self, load: StepLoad) -> float:
        """Seconds that few steps of this load exceed, as far as is known."""
        mean = self.per_step + self.per_token * load.tokens + self.per_pair * load.pairs
        return mean * (1 + self.spread)

    def covers(self, load: StepLoad) -> bool:
        """Whether the load is near one that was measured."""
        # The second chunk of a prompt has three times the pairs of the first one.
        return load.tokens <= 2 * self.largest.tokens and load.pairs <= 4 * self.largest.pairs


def _weights(count: int) -> list[float]:
    """Of this number of samples, from the oldest to the youngest."""
    return [_AGEING**age for age in reversed(range(count))]


def _spread(expected: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]) -> float:
    """How far steps stray from what was expected of them, as a share of that; 1 at most."""
    if not len(expected):
        return 0.0
    strays = measured / np.maximum(expected, _SHORTEST) - 1
    return min(float(np.sqrt(np.mean(strays**2))), 1.0)


def _nonnegative_least_squares(
    table: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The `x` of least |table @ x - wanted|, where columns that would get less than 0 get 0."""
    solution = np.zeros(table.shape[1])
    used = np.flatnonzero(table.any(axis=0))
    while len(used):
        lengths = np.linalg.norm(table[:, used], axis=0)
        scaled = cast(
            "npt.NDArray[np.float64]",
            np.linalg.lstsq(table[:, used] / lengths, wanted, rcond=1e-3)[0],
        )
        if (scaled >= 0).all():
            solution[used] = scaled / lengths
            break
        used = np.delete(used, scaled.argmin())
    return solution
