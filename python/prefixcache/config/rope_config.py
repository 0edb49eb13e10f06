"""Rotary position embedding, and how a config.json spells it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixcache.config.checked import Checked, Count, PositiveFloat
from prefixcache.config.family import Family, RopeKind
from prefixcache.config.hf_fields import HFFields
from prefixcache.exceptions import FieldError, UnsupportedModelError

# How fields of a rope are called in a config.json; the others have one name.
_HF_NAMES = {
    "theta": "rope_theta",
    "kind": "rope_type",
    "original_max_position": "original_max_position_embeddings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig(Checked):
    """Rotary position embedding: base frequency and how it is scaled to longer contexts.

    Scaling kinds and field names are those of Hugging Face's `rope_parameters`. Fields that a kind
    does not use stay at their defaults. `original_max_position` is in tokens; None of
    `attention_factor` lets YaRN derive it from `factor` and the two `mscale` values, LongRoPE from
    `factor`. LongRoPE divides a pair's frequency by its `short_factor`, or by its `long_factor`
    where there are no short ones: `ModelConfig.for_length` leaves those of one kind. Of a head the
    first `partial_rotary_factor` are turned; of a proportional one all, but the slowest pairs by
    nothing.
    """

    theta: PositiveFloat = 10_000.0
    kind: RopeKind = "default"
    factor: PositiveFloat = 1.0
    original_max_position: Count = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[PositiveFloat, ...] = ()
    long_factor: tuple[PositiveFloat, ...] = ()
    partial_rotary_factor: PositiveFloat = 1.0

    def rotated_of(self, head_dim: int) -> int:
        """Numbers of a head that are turned: the first ones."""
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * self.partial_rotary_factor)

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.kind in ("llama3", "yarn", "longrope") and not self.original_max_position:
            raise FieldError("original_max_position", f"is needed for rope {self.kind}.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise FieldError(
                "high_freq_factor",
                f"({self.high_freq_factor}) of the rope must exceed low_freq_factor "
                f"({self.low_freq_factor}).",
            )


def rope_of(values: Mapping[str, Any], family: Family, fields: HFFields) -> RopeConfig:
    """A rope of a config.json. Raises `UnsupportedModelError` for a part that it does not turn."""
    rotated = values.get("partial_rotary_factor", 1.0)
    if rotated != 1.0 and not family.rotates_partly and values["rope_type"] != "proportional":
        raise UnsupportedModelError(
            f"partial_rotary_factor {rotated} is not supported. Supported: 1.0."
        )
    parts = dataclasses.fields(RopeConfig)
    names = {part.name: _HF_NAMES.get(part.name, part.name) for part in parts}
    rope = {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
    factors = {name: tuple(rope.pop(name, ())) for name in ("short_factor", "long_factor")}
    if rope.get("kind") == "longrope":
        rope |= factors
        # Without a factor it is that of the contexts.
        if rope.get("factor") is None:
            rope["factor"] = fields.max_position_embeddings / rope["original_max_position"]
    return RopeConfig(**rope)
