"""Tables of embeddings: a row of numbers for each token, which a tied head multiplies by too.

Letters of shapes: T tokens in the step, V vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from prefixcache.ops.linear import dtype_name
from prefixcache.ops.quantized import QuantizedTensor


class Embedding(Protocol):
    """One table. It is undefined until it was written; writing it writes the head tied to it."""

    @property
    def num_bytes(self) -> int:
        """Memory of the table as it is kept, without that of a head."""
        ...

    def kept_format(self) -> str:
        """How the table is kept: a type, or a quantized format."""
        ...

    def write(self, weight_VE: Tensor | QuantizedTensor) -> None:
        """Writes all of the table, converting an unquantized one to the type of the ops.

        Raises `ValueError` where a scale is not a finite number.
        """
        ...

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Returns the rows [T, E] of these tokens, in memory of their own."""
        ...


class TorchEmbedding:
    """An unquantized table, which a tied head may have as its weight."""

    def __init__(self, weight_VE: Tensor, *, is_tied: bool) -> None:
        self._weight_VE = weight_VE
        self._is_tied = is_tied

    @property
    def num_bytes(self) -> int:
        """Memory of the table, if it is its own."""
        return 0 if self._is_tied else self._weight_VE.nbytes

    def kept_format(self) -> str:
        """The type of the table."""
        return dtype_name(self._weight_VE.dtype)

    def write(self, weight_VE: Tensor | QuantizedTensor) -> None:
        """Writes all of the table, dequantized where it is quantized."""
        if isinstance(weight_VE, QuantizedTensor):
            weight_VE.dequantize_into(self._weight_VE)
        else:
            self._weight_VE.copy_(weight_VE)

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Returns the rows [T, E] of these tokens."""
        return F.embedding(ids_T, self._weight_VE)
