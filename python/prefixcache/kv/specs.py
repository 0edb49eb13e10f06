"""The shape of the KV cache: groups of layers that share a block table, and its size in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal, Protocol, TypeAlias

from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import FieldError

GroupKind: TypeAlias = Literal["full", "state"] | tuple[Literal["sliding_window"], int]
"""What a group's layers need: all tokens before, a window of tokens, itself counted, or the state
after the token before."""

STATE_BYTES = 4
"""Of a number of a state, which is float32 whatever keys and values are."""

SCALE_BYTES = 4
"""Of the scale of a head's keys, or values, of a token, where they are codes of eight bits."""

# Above the fewest layers of a kind, groups are made as large as the most only up to this factor:
# padding then costs less than a group more.
_MOST_BY_FEWEST = 1.25
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV lives under the same block ids. `sliding_window` None is full attention.

    Where `conv_width` is given they are short convolutions over the window, of that many channels:
    a block keeps the inputs of its last `kept_tokens` tokens. `layers_per_tensor` layers share a
    block's part of one tensor. Where `state_tensors` is given a block keeps states, in its parts of
    that many tensors: where those of a layer lie is said by the layout, and the layers are those
    whose states begin here. `heads`, key-value heads and the numbers of one, are given where groups
    differ in them: a layer then has the bytes of `part_numbers` numbers of a block. `readers` are
    pairs, a layer that has no KV and the layer of the group whose KV it reads.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None
    conv_width: int = 0
    kept_tokens: int = 0
    layers_per_tensor: int = 1
    state_tensors: int = 0
    heads: tuple[int, int] | None = None
    part_numbers: int = 0
    readers: tuple[tuple[int, int], ...] = ()

    @property
    def kind(self) -> GroupKind:
        """What the group's layers need."""
        if self.state_tensors:
            return "state"
        return "full" if self.sliding_window is None else ("sliding_window", self.sliding_window)

    @property
    def num_tensors(self) -> int:
        """Tensors of which a block of the group uses its part."""
        return self.state_tensors or -(-len(self.layers) // self.layers_per_tensor)

    def part(self, number: int) -> tuple[int, slice]:
        """The tensor of the group's layer of that number, and which of a block's numbers there."""
        tensor, place = divmod(number, self.layers_per_tensor)
        size = self.conv_width * self.kept_tokens or self.part_numbers
        return tensor, slice(place * size, (place + 1) * size) if size else slice(None)

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
class StatePart:
    """Where float32 numbers of a layer's state lie: in a block's part of a tensor, for a group.

    `numbers` of them, with `start` others before them.
    """

    layer: int
    group: int
    tensor: int
    start: int
    numbers: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A model's groups, in the order of their ids, and what is the same for all of attention.

    Tensor j serves the j-th layers of every group, so any block can serve any group. Where layers
    differ in their heads there is one tensor, of which a block has `num_kv_heads` times `head_dim`
    keys and values a token for all of a group's layers. `states` are the parts of layers' states,
    in the order of their numbers. Where keys and values are codes of eight bits, `code_bytes` are
    what a token's keys take of a tensor, with their scales, and its values too; else it is 0.
    """

    groups: tuple[KVGroup, ...]
    num_kv_heads: int
    head_dim: int
    states: tuple[StatePart, ...] = ()
    code_bytes: int = 0

    @property
    def num_tensors(self) -> int:
        """Those of the largest group."""
        return max(group.num_tensors for group in self.groups)

    @property
    def num_padded(self) -> int:
        """Tensors of which a group's block uses nothing, over all groups."""
        return sum(self.num_tensors - group.num_tensors for group in self.groups)

    @property
    def unused_share(self) -> float:
        """Of a block of every group, the share of the bytes that no layer of attention uses."""
        groups = [group for group in self.groups if not (group.conv_width or group.state_tensors)]
        own = (self.num_kv_heads, self.head_dim)
        used = [len(group.layers) * prod(group.heads or own) for group in groups]
        return 1 - sum(used) / (len(groups) * self.num_tensors * prod(own))

    @property
    def kinds(self) -> tuple[GroupKind, ...]:
        """What the layers of each group need."""
        return tuple(group.kind for group in self.groups)

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Bytes of one block over all tensors: keys and values, whichever group holds it.

        `itemsize` is that of a number, where they are numbers.
        """
        row_bytes = self.code_bytes or self.num_kv_heads * self.head_dim * itemsize
        return self.num_tensors * 2 * block_size * row_bytes

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


@dataclass(frozen=True, slots=True)
class _Kept:
    """How blocks of `block_size` tokens keep keys and values: as numbers or codes."""

    block_size: int
    itemsize: int
    has_codes: bool

    def row_bytes(self, heads: tuple[int, int]) -> int:
        """Of a token's keys in these heads, or of its values."""
        kv_heads, head_dim = heads
        of_head = head_dim + SCALE_BYTES if self.has_codes else head_dim * self.itemsize
        return kv_heads * of_head

    def block_bytes(self, heads: tuple[int, int]) -> int:
        """Of a layer's part of a block."""
        return 2 * self.block_size * self.row_bytes(heads)


def kv_layout(
    model: ModelConfig,
    block_size: int = 16,
    most_refused: int = 1,
    itemsize: int = 4,
    *,
    has_codes: bool = False,
) -> KVLayout:
    """The groups of a model: one for each kind of attention, or several of equal size as in vLLM.

    Full attention comes first, then windows in the order of their first layers, then convolutions,
    which take no more tensors than attention does: as many share one as fit into its blocks. States
    come last: they fill blocks one after the other, cut anywhere. `most_refused` tokens at the end
    of a sequence may have to be computed again. Numbers have `itemsize` bytes; with `has_codes`
    keys and values are kept in eight bits. Raises `FieldError` where not even one convolution fits.
    """
    kept = _Kept(block_size, itemsize, has_codes)
    kinds: dict[int | None, list[int]] = {}
    others = {*model.conv_layers, *model.state_layers}
    for layer in range(model.num_layers):
        if layer not in others and model.kv_owner(layer) == layer:
            kinds.setdefault(model.window_of(layer), []).append(layer)
    in_order = dict(sorted(kinds.items(), key=lambda kind: kind[0] is not None))
    if len({model.heads_of(window) for window in kinds}) > 1:
        return _layout_of_parts(model, in_order, kept)
    size = _group_size([len(layers) for layers in kinds.values()])
    groups = tuple(
        KVGroup(layers, window, readers=_readers(model, layers))
        for window, all_of in in_order.items()
        for layers in _deal(all_of, size)
    )
    if model.conv_layers:
        tokens = min(model.conv_taps - 1 + most_refused, block_size)
        groups += tuple(_convolutions(model, size, kept, tokens))
    heads = model.heads_of(next(iter(kinds)))
    states = tuple(_states(model, len(groups), size, kept.block_bytes(heads) // STATE_BYTES))
    groups += tuple(_state_groups(states, len(groups)))
    return KVLayout(groups, *heads, states, kept.row_bytes(heads) if has_codes else 0)


def _group_size(kinds: Sequence[int]) -> int:
    """What groups of all kinds have at most, of these sizes of all that is of one kind."""
    return max(kinds) if max(kinds) < _MOST_BY_FEWEST * min(kinds) else min(kinds)


def _layout_of_parts(
    model: ModelConfig, kinds: Mapping[int | None, Sequence[int]], kept: _Kept
) -> KVLayout:
    """Groups of layers whose heads differ: a block is cut into the parts of a group's layers.

    As many layers share a block as make groups of all kinds of about the same bytes.
    """
    heads = {window: model.heads_of(window) for window in kinds}
    row_bytes = {window: kept.row_bytes(of_layer) for window, of_layer in heads.items()}
    size = _group_size([len(layers) * row_bytes[window] for window, layers in kinds.items()])
    size = max(size, *row_bytes.values())
    groups = tuple(
        KVGroup(
            layers,
            window,
            layers_per_tensor=len(layers),
            heads=heads[window],
            part_numbers=kept.block_bytes(heads[window]) // kept.itemsize,
            readers=_readers(model, layers),
        )
        for window, all_of in kinds.items()
        for layers in _deal(all_of, size // row_bytes[window])
    )
    head_dim = gcd(*(dims for _, dims in heads.values()))
    most = max(len(group.layers) * prod(heads[group.sliding_window]) for group in groups)
    code_bytes = max(len(group.layers) * row_bytes[group.sliding_window] for group in groups)
    return KVLayout(
        groups, most // head_dim, head_dim, code_bytes=code_bytes if kept.has_codes else 0
    )


def _readers(model: ModelConfig, layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The layers that read the KV of these, each with the one that it reads."""
    owners = ((layer, model.kv_owner(layer)) for layer in range(model.num_layers))
    return tuple((layer, owner) for layer, owner in owners if owner != layer and owner in layers)


def _states(model: ModelConfig, group: int, num_tensors: int, most: int) -> Iterator[StatePart]:
    """The states of all layers one after the other, `most` numbers a tensor, from `group` on."""
    tensor = start = 0
    for layer in model.state_layers:
        assert model.states is not None
        left = model.states.state_numbers
        while left:
            numbers = min(left, most - start)
            yield StatePart(layer, group, tensor, start, numbers)
            left, start = left - numbers, start + numbers
            if start == most:
                tensor, start = tensor + 1, 0
            if tensor == num_tensors:
                group, tensor = group + 1, 0


def _state_groups(states: Sequence[StatePart], first: int) -> Iterator[KVGroup]:
    begins = dict[int, int]()
    for part in states:
        begins.setdefault(part.layer, part.group)
    # What a token needs is the state after the one before.
    for group in range(first, max((part.group + 1 for part in states), default=first)):
        layers = tuple(layer for layer, begin in begins.items() if begin == group)
        tensors = 1 + max(part.tensor for part in states if part.group == group)
        yield KVGroup(layers, 2, state_tensors=tensors)


def _convolutions(
    model: ModelConfig, num_tensors: int, kept: _Kept, kept_tokens: int
) -> Iterator[KVGroup]:
    numbers = kept.block_bytes((model.num_kv_heads, model.head_dim)) // kept.itemsize
    needed = model.hidden_size * kept_tokens
    if numbers < needed:
        least = -(-needed * kept.block_size // numbers)
        raise FieldError(
            "block_size",
            f"must be at least {least} for this model's convolutions, which keep the inputs of "
            f"{kept_tokens} tokens (--speculate-tokens adds to them).",
        )
    for layers in _deal(model.conv_layers, numbers // needed * num_tensors):
        per_tensor = -(-len(layers) // num_tensors)
        yield KVGroup(layers, model.conv_taps, model.hidden_size, kept_tokens, per_tensor)


class LayerGroup(Protocol):
    """Layers that share a block table, and those that read their KV: see `KVGroup`."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Those with KV."""
        ...

    @property
    def readers(self) -> tuple[tuple[int, int], ...]:
        """Those without."""
        ...


def layer_places(groups: Iterable[LayerGroup]) -> list[tuple[int, int]]:
    """For each layer of a model the group of its KV, and the number of that in the group."""
    places: dict[int, tuple[int, int]] = {}
    for index, group in enumerate(groups):
        places |= {layer: (index, number) for number, layer in enumerate(group.layers)}
        places |= {reader: places[owner] for reader, owner in group.readers}
    return [places[layer] for layer in range(len(places))]


def _deal(layers: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Layers of one kind in turns to as few groups as hold them, `most` each."""
    num_groups = -(-len(layers) // most)
    return (tuple(layers[first::num_groups]) for first in range(num_groups))
