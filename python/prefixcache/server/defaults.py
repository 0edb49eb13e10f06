"""Values a request leaves out."""

from __future__ import annotations

from typing import Any

from prefixcache.config import GenerationDefaults

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def usual_values(generation: GenerationDefaults) -> dict[str, Any]:
    """Sampling options that the model's authors recommend."""
    values = {name: getattr(generation, name) for name in _NAMES}
    return {name: value for name, value in values.items() if value is not None}
