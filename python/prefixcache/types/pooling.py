"""What a request gets of its prompt's last token, in place of an answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Pooling:
    """Asks for the logits of `token_ids`, or, without any, for the prompt's embedding.

    That is the hidden state [E] after the last norm, of length 1.
    """

    token_ids: tuple[int, ...] = ()


def unit(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vector with length 1; one of zeros stays."""
    length = np.linalg.norm(vector)
    return np.divide(vector, length, dtype=np.float32) if length else vector
