"""KV cache groups: layers that share one block table, derived from a model's config alone."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV lives under the same block ids. `sliding_window` None is full attention."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Bytes of one block over all layers of the group: keys and values."""
        return len(self.layers) * 2 * block_size * self.num_kv_heads * self.head_dim * itemsize


def kv_groups(model: ModelConfig) -> tuple[KVGroup, ...]:
    """The groups of a model, in the order of their group ids."""
    return (KVGroup(tuple(range(model.num_layers)), model.num_kv_heads, model.head_dim),)
