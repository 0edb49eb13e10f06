"""Attention backends by name. A backend is imported when it is made, never before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from prefixcache._core import Cpu
from prefixcache.attention.base import AttentionBackend, AttentionSpec
from prefixcache.exceptions import ConfigError

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Where a backend runs, on which type, and whether rows may depend on the batch.

    `cpu` are the threads of the CPU's kernels; None makes some of the backend's own.
    """

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    batch_invariant: bool = True
    cpu: Cpu | None = None


_Factory = Callable[[AttentionSpec, AttentionOptions], AttentionBackend]


def _torch(spec: AttentionSpec, _options: AttentionOptions) -> AttentionBackend:
    from prefixcache.attention.torch_attention import TorchAttention

    return TorchAttention(spec)


def _cpu(spec: AttentionSpec, options: AttentionOptions) -> AttentionBackend:
    from prefixcache.attention.cpu import CpuAttention

    return CpuAttention(spec, options.cpu or Cpu(torch.get_num_threads()), options.dtype)


def _flashinfer(spec: AttentionSpec, options: AttentionOptions) -> AttentionBackend:
    from prefixcache.attention.flashinfer import make_flashinfer

    invariance = "unified" if options.batch_invariant else "off"
    return make_flashinfer(spec, dtype=options.dtype, device=options.device, invariance=invariance)


def _flashinfer_split(spec: AttentionSpec, options: AttentionOptions) -> AttentionBackend:
    from prefixcache.attention.flashinfer import make_flashinfer

    return make_flashinfer(spec, dtype=options.dtype, device=options.device, invariance="split")


def _flashinfer_packed(spec: AttentionSpec, options: AttentionOptions) -> AttentionBackend:
    from prefixcache.attention.flashinfer import make_flashinfer

    return make_flashinfer(
        spec, dtype=options.dtype, device=options.device, invariance="unified", packs_heads=True
    )


_FACTORIES: dict[str, _Factory] = {
    "torch": _torch,
    "cpu": _cpu,
    "flashinfer": _flashinfer,
    "flashinfer-split": _flashinfer_split,
    "flashinfer-packed": _flashinfer_packed,
}


def attention_names() -> tuple[str, ...]:
    """Names that `make_attention` knows, beside "auto"."""
    return tuple(_FACTORIES)


def make_attention(
    name: str, spec: AttentionSpec, options: AttentionOptions | None = None
) -> AttentionBackend:
    """Makes the backend for one group of layers; "auto" is the best one for the device.

    Raises `ConfigError` for an unknown name, listing the known ones, and for a backend whose
    package or device is missing.
    """
    options = options or AttentionOptions()
    if name == "auto":
        return _best(spec, options)
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigError(f"attention must be one of auto, {', '.join(_FACTORIES)}, got {name!r}.")
    return factory(spec, options)


def _best(spec: AttentionSpec, options: AttentionOptions) -> AttentionBackend:
    """On a CPU our kernel; torch where no promise asks for ours, or it refuses the model."""
    if options.device.type == "cuda":
        return _flashinfer(spec, options)
    if options.batch_invariant:
        return _cpu(spec, options)
    try:
        return _torch(spec, options) if options.cpu is None else _cpu(spec, options)
    except ConfigError:
        return _torch(spec, options)
