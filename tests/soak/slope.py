"""Whether memory grows: a line through what an idle server holds, and how sure that line is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Of the looks at a process: caches of the interpreter and the allocator fill until then.
WARM_UP = 0.25
_LEAST_POINTS, _LEAST_HOURS = 6, 0.1
_NUM_RESAMPLES = 4000
# Growth below this is not distinguished from pages that come and go.
_NOISE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Slope:
    """Bytes an hour: the line of least squares, and between what 95 % of resampled ones lie.

    `growth` is what the line grew by in the time that was measured, `level` what it began with.
    """

    num_points: int
    hours: float
    per_hour: float
    low: float
    high: float
    growth: float
    level: float

    @property
    def is_flat(self) -> bool:
        """Whether growth is not certain, or too small to be distinguished from noise."""
        return self.low <= 0 or self.growth <= _NOISE_BYTES


def memory_slope(seconds: Sequence[float], resident: Sequence[float]) -> Slope | None:
    """The slope after the warm-up, or None of too few points or minutes.

    Neighbouring points resemble each other, so whole runs of residuals are resampled, not points.
    """
    first = int(len(seconds) * WARM_UP)
    hours = np.array(seconds[first:]) / 3600
    values = np.array(resident[first:], dtype=np.float64)
    if len(values) < _LEAST_POINTS or hours[-1] - hours[0] < _LEAST_HOURS:
        return None
    per_hour, level = np.polyfit(hours - hours[0], values, 1)
    residuals = values - (level + per_hour * (hours - hours[0]))
    slopes = _resampled(hours - hours[0], level, per_hour, residuals)
    low, high = np.percentile(slopes, [2.5, 97.5])
    span = float(hours[-1] - hours[0])
    return Slope(
        num_points=len(values),
        hours=span,
        per_hour=float(per_hour),
        low=float(low),
        high=float(high),
        growth=float(per_hour) * span,
        level=float(level),
    )


def _resampled(
    hours: np.ndarray, level: float, per_hour: float, residuals: np.ndarray
) -> list[float]:
    choose = np.random.default_rng(0)
    count = len(residuals)
    run = max(round(count ** (1 / 3)), 2)
    slopes: list[float] = []
    for _ in range(_NUM_RESAMPLES):
        starts = choose.integers(0, count, size=-(-count // run))
        picked = (starts[:, None] + np.arange(run)).ravel()[:count] % count
        values = level + per_hour * hours + residuals[picked]
        slopes.append(float(np.polyfit(hours, values, 1)[0]))
    return slopes
