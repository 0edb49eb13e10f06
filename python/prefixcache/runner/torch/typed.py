"""What torch's own types leave open, with types."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def from_numpy(array: npt.NDArray[Any]) -> Tensor:
    """A tensor over the array's memory."""
    return torch.from_numpy(array)


def split(x: Tensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Views of parts of these sizes, one after the other."""
    return x.split(sizes, dim)


def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """A view in which several dimensions stand for one."""
    return x.unflatten(dim, sizes)


def integers(x_N: Tensor) -> list[int]:
    """The numbers of a tensor of integers."""
    return x_N.tolist()


def distinct(x: Tensor) -> list[int]:
    """The numbers that stand anywhere in a tensor of integers, in ascending order."""
    return x.unique().tolist()
