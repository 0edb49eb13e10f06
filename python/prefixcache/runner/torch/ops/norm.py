"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.runner.torch.ops.cuda import fused_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Normalises the last dimension, in float32, and scales it by `weight + offset`.

    Without an offset the result is rounded to the type of `x` before the scaling, as Llama does;
    with one, once and after it, as Gemma does.
    """
    if (fused := fused_kernels(x)) is not None:
        return fused.rms_norm(x, weight, eps, offset=offset)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (weight.float() + offset)).to(x.dtype)
    return wide.to(x.dtype) * weight
