"""The shape of the KV cache: groups of layers that share a block table, and its size in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prefixcache.config.model_config import ModelConfig

GroupKind: TypeAlias = Literal["full"] | tuple[Literal["sliding_window"], int]
"""What a group's layers need: all tokens before, or a window of tokens, itself counted."""

# Above the fewest layers of a kind, groups are made as large as the most only up to this factor:
# padding then costs less than a group more.
_MOST_BY_FEWEST = 1.25
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV lives under the same block ids. `sliding_window` None is full attention.

    Where `conv_width` is given they are short convolutions over the window, of that many channels:
    a block keeps the inputs of its last `kept_tokens` tokens. `layers_per_tensor` of them share a
    block's part of one tensor, each an equal share of it.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None
    conv_width: int | None = None
    layers_per_tensor: int = 1

    @property
    def kind(self) -> GroupKind:
        """What the group's layers need."""
        return "full" if self.sliding_window is None else ("sliding_window", self.sliding_window)

    @property
    def num_tensors(self) -> int:
        """Tensors of which a block of the group uses its part."""
        return -(-len(self.layers) // self.layers_per_tensor)

    def kept_tokens(self, block_size: int) -> int:
        """Tokens of a block that a convolution of the group keeps: those that later ones need."""
        return min(max((self.sliding_window or 1) - 1, 1), block_size)

    def conv_numbers(self, block_size: int) -> int:
        """Numbers that a convolution takes of a block; 0 where layers attend."""
        return (self.conv_width or 0) * self.kept_tokens(block_size)

    def place(self, number: int) -> tuple[int, int]:
        """The tensor of the group's layer of that number, and its place among those that share it."""
        return divmod(number, self.layers_per_tensor)

    def most_pages(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """The most pages that a step lists of a sequence of up to `num_tokens`.

        At most `chunk` tokens of it are computed in the step.
        """
        pages = -(-num_tokens // block_size)
        if self.sliding_window is None:
            return pages
        # Tokens in a row may begin at a page's last one.
        tokens = self.sliding_window - 1 + chunk
        return min(pages, (tokens - 2) // block_size + 2)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A model's groups, in the order of their ids, and what is the same for all of attention.

    Tensor j serves the j-th layers of every group, so any block can serve any group.
    """

    groups: tuple[KVGroup, ...]
    num_kv_heads: int
    head_dim: int

    @property
    def num_tensors(self) -> int:
        """Those of the largest group."""
        return max(group.num_tensors for group in self.groups)

    @property
    def num_padded(self) -> int:
        """Tensors of which a group's block uses nothing, over all groups."""
        return sum(self.num_tensors - group.num_tensors for group in self.groups)

    @property
    def kinds(self) -> tuple[GroupKind, ...]:
        """What the layers of each group need."""
        return tuple(group.kind for group in self.groups)

    @property
    def least_block_size(self) -> int:
        """Tokens that a block must have for the convolutions that share a tensor to fit into it."""
        taken = [
            group.layers_per_tensor * group.conv_numbers(group.sliding_window or 1)
            for group in self.groups
        ]
        return max(1, -(-max(taken) // (2 * self.num_kv_heads * self.head_dim)))

    def numbers_per_tensor_block(self, block_size: int) -> int:
        """Numbers of a block in each tensor: keys and values, whichever group holds it."""
        return 2 * block_size * self.num_kv_heads * self.head_dim

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Bytes of one block over all tensors."""
        return self.num_tensors * self.numbers_per_tensor_block(block_size) * itemsize

    def most_pages(self, num_tokens: int, chunk: int, block_size: int) -> tuple[int, ...]:
        """`KVGroup.most_pages` of each group."""
        return tuple(group.most_pages(num_tokens, chunk, block_size) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """How large the pool is and may become, in blocks, the null block included.

    It has `start` blocks at first, `ceiling` at most and `floor` at least; each is of
    `block_bytes`. Shares are of `free_bytes`, what was free at the start.
    """

    start: int
    ceiling: int
    floor: int
    block_bytes: int
    free_bytes: int

    def blocks_of(self, memory: int | float) -> int:
        """Blocks that `memory` bytes hold, or a share of what was free at the start."""
        asked = int(memory * self.free_bytes) if isinstance(memory, float) else memory
        return asked // self.block_bytes

    def describe(self) -> str:
        """The range of sizes, for errors."""
        low, high = (size * self.block_bytes / _MIB for size in (self.floor, self.ceiling))
        return f"{self.floor} to {self.ceiling} blocks ({low:,.1f} to {high:,.1f} MiB)"


def kv_layout(model: ModelConfig) -> KVLayout:
    """The groups of a model: one for each kind of attention, or several of equal size as in vLLM.

    Full attention comes first, then windows in the order of their first layers. Convolutions are
    one group more, and take no more tensors than attention does.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(model.layer_windows or (None,) * model.num_layers):
        if layer not in model.conv_layers:
            kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < _MOST_BY_FEWEST * min(counts) else min(counts)
    in_order = sorted(kinds.items(), key=lambda kind: kind[0] is not None)
    groups = tuple(
        KVGroup(layers, window) for window, all_of in in_order for layers in _deal(all_of, size)
    )
    return KVLayout(groups + _convolutions(model, size), model.num_kv_heads, model.head_dim)


def _convolutions(model: ModelConfig, num_tensors: int) -> tuple[KVGroup, ...]:
    if not model.conv_layers:
        return ()
    per_tensor = -(-len(model.conv_layers) // num_tensors)
    return (KVGroup(model.conv_layers, model.conv_taps, model.hidden_size, per_tensor),)


def layer_places(groups: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """For each layer of a model its group, and its number in that group; `groups` are layers."""
    places = {
        layer: (index, number)
        for index, layers in enumerate(groups)
        for number, layer in enumerate(layers)
    }
    return [places[layer] for layer in range(len(places))]


def _deal(layers: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Layers of one kind in turns to as few groups as hold them, `most` each."""
    num_groups = -(-len(layers) // most)
    return (tuple(layers[first::num_groups]) for first in range(num_groups))
