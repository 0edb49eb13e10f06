"""Attention backends by name. A backend is imported when it is made, never before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from prefixcache.exceptions import FieldError
from prefixcache.runner.torch.attention.base import AttentionBackend, AttentionGroup, AttentionSpec
from prefixcache.runner.torch.attention.grouped import GroupBackend, GroupedAttention
from prefixcache.runner.torch.attention.short_conv import ShortConvCache
from prefixcache.runner.torch.attention.states import StatePages

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Where a backend runs, on which type, and whether rows may depend on the batch."""

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    batch_invariant: bool = True


# Makes the backends of all groups at once, so that they can share what a step computes with.
_Factory = Callable[[Sequence[AttentionSpec], AttentionOptions], Sequence[AttentionBackend]]


def _torch(
    specs: Sequence[AttentionSpec], _options: AttentionOptions
) -> Sequence[AttentionBackend]:
    from prefixcache.runner.torch.attention.torch_attention import TorchAttention

    return [TorchAttention(spec) for spec in specs]


def _flashinfer(
    specs: Sequence[AttentionSpec], options: AttentionOptions
) -> Sequence[AttentionBackend]:
    from prefixcache.runner.torch.attention.flashinfer import make_flashinfer

    return make_flashinfer(
        specs,
        dtype=options.dtype,
        device=options.device,
        batch_invariant=options.batch_invariant,
    )


_FACTORIES: dict[str, _Factory] = {"torch": _torch, "flashinfer": _flashinfer}


def attention_names() -> tuple[str, ...]:
    """Names that `make_attention` knows, in addition to "auto"."""
    return tuple(_FACTORIES)


def make_attention(
    name: str, groups: Sequence[AttentionGroup], options: AttentionOptions | None = None
) -> GroupedAttention:
    """Makes a backend for each group of layers; "auto" is the best one for the device.

    Raises `ConfigError` for an unknown name, listing the known ones, and for a backend whose
    package or device is missing.
    """
    options = options or AttentionOptions()
    best = "flashinfer" if options.device.type == "cuda" else "torch"
    factory = _FACTORIES.get(best if name == "auto" else name)
    if factory is None:
        raise FieldError(
            "attention", f"must be one of auto, {', '.join(_FACTORIES)}, got {name!r}."
        )
    made = iter(factory([group.spec for group in groups if group.attends], options))
    backends = [next(made) if group.attends else _kept(group) for group in groups]
    return GroupedAttention(groups, backends)


def _kept(group: AttentionGroup) -> GroupBackend:
    if group.kv.conv_width:
        return ShortConvCache(group.spec, group.kv)
    return StatePages(group.spec)
