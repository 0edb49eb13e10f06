"""Tables of embeddings: a row of numbers for each token, which a tied head multiplies by too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixcache.models.arrays import Array
from prefixcache.models.quantized import QuantizedTensor
from prefixcache.runner.cuda.ops.arrays import dtype_name, tensor_of


class Embedding:
    """An unquantized table [V, E], which a tied head may have as its weight.

    It is undefined until it was written; writing it writes the head tied to it.
    """

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

    @torch.inference_mode()
    def write(self, weight_VE: Array | Tensor | QuantizedTensor) -> None:
        """Writes all of the table, dequantized where it is quantized.

        Raises `ValueError` where a scale is not a finite number.
        """
        if isinstance(weight_VE, QuantizedTensor):
            for first, rows in weight_VE.float32_rows():
                self._weight_VE[first : first + len(rows)].copy_(tensor_of(rows))
        else:
            self._weight_VE.copy_(tensor_of(weight_VE))

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Returns the rows [T, E] of these tokens, in memory of their own."""
        return F.embedding(ids_T, self._weight_VE)
