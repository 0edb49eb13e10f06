"""Where the rows of a step's sequences stand, in CSR and one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def indptr_of(counts: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Where the rows of each sequence begin, and the last ones end: [S + 1]."""
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def ranges(
    starts: npt.NDArray[np.integer], counts: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """As many numbers from each start on as its count says, side by side."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
