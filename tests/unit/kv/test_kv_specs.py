"""KV cache groups: which layers share a block table, and what their blocks and tables take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fakes.fake_cache import make_cache
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.core import PrefixCache
from prefixcache.exceptions import FieldError
from prefixcache.kv.cache_settings import fitting_tokens
from prefixcache.kv.specs import GroupKind, KVGroup, kv_layout, layer_places
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.runner.sizing import MemorySize, choose_num_blocks
from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.registry import make_attention
from prefixcache.runner.torch.kv_tensors import attention_groups
from support.public_shapes import SHAPES
from support.tiny_models import STATE_SHAPES

CPU = torch.device("cpu")
GEMMA_3_1B = tuple(None if layer % 6 == 5 else 512 for layer in range(26))


def model_of(windows: tuple[int | None, ...], num_layers: int | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=96,
        num_layers=num_layers or len(windows),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        layer_windows=windows,
    )


def test_gemma_3_1b_has_one_full_and_six_window_groups_of_four_with_two_places_padded() -> None:
    layout = kv_layout(model_of(GEMMA_3_1B))
    assert layout.groups[0] == KVGroup((5, 11, 17, 23))
    assert [len(group.layers) for group in layout.groups] == [4, 4, 4, 4, 4, 3, 3]
    assert layout.kinds == ("full", *[("sliding_window", 512)] * 6)
    assert (layout.num_tensors, layout.num_padded) == (4, 2)


@pytest.mark.parametrize(
    ("windows", "group"),
    [
        ((), KVGroup((0, 1, 2))),
        ((None, None, None), KVGroup((0, 1, 2))),
        ((9, 9, 9), KVGroup((0, 1, 2), 9)),
    ],
)
def test_layers_of_one_kind_are_one_group(windows: tuple[int | None, ...], group: KVGroup) -> None:
    layout = kv_layout(model_of(windows, 3))
    assert layout.groups == (group,)
    assert (layout.num_tensors, layout.num_padded) == (3, 0)


def test_one_full_group_has_the_hashes_of_a_cache_without_groups() -> None:
    cache = make_cache(2, 16, groups=kv_layout(model_of((), 3)).kinds, model="m")
    assert cache.core.root_hash() == PrefixCache(2, 16, model="m").root_hash()


layers = st.lists(st.sampled_from([None, None, 1, 16, 512]), min_size=1, max_size=40).map(tuple)


@given(windows=layers)
@example(windows=(None,) * 4 + (7,) * 5)  # 5 is not less than 1.25 times 4: groups of 4
@example(windows=(None,) * 5 + (7,) * 6)  # groups of 6, one place padded
def test_every_layer_is_in_one_group_of_its_kind_and_groups_are_as_large_as_vllm_makes_them(
    windows: tuple[int | None, ...],
) -> None:
    layout = kv_layout(model_of(windows))
    assert sorted(layer for group in layout.groups for layer in group.layers) == [
        *range(len(windows))
    ]
    for group in layout.groups:
        assert {windows[layer] for layer in group.layers} == {group.sliding_window}
        assert list(group.layers) == sorted(group.layers)
    counts = Counter(windows)
    fewest, most = min(counts.values()), max(counts.values())
    assert layout.num_tensors == (most if 4 * most < 5 * fewest else fewest)
    assert Counter(group.sliding_window for group in layout.groups) == {
        window: -(-count // layout.num_tensors) for window, count in counts.items()
    }
    assert layout.num_padded == len(layout.groups) * layout.num_tensors - len(windows)
    places = [group.sliding_window is not None for group in layout.groups]
    assert places == sorted(places), "full attention comes first"


def test_the_pool_takes_the_bytes_of_one_group() -> None:
    """Not the sum over the groups: any block serves any of them."""
    layout = kv_layout(model_of(GEMMA_3_1B))
    a_layer = 2 * 16 * 2 * 16 * 4  # keys and values, tokens, heads, numbers, bytes
    assert layout.bytes_per_block(16, 4) == 4 * a_layer
    kv = KVMemory(
        layout=layout, num_blocks=10, block_size=16, itemsize=4, free_memory=lambda: 1 << 30
    )
    kv.allocate()
    assert [rows.nbytes for rows in kv.rows()] == [10 * a_layer] * 4
    assert kv.num_bytes == 10 * 4 * a_layer
    cache = CacheConfig(kv_cache_memory=10 * 4 * a_layer)
    assert choose_num_blocks(cache, layout, 4, MemorySize(0, 0)) == 10


def test_tensor_j_serves_layer_j_of_every_group() -> None:
    layout = kv_layout(model_of((None, 5, 5, None, 5)))
    assert [group.layers for group in layout.groups] == [(0, 3), (1, 4), (2,)]
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=16, scale=1.0)
    attention = make_attention("torch", attention_groups(layout, spec))
    tensors = [torch.zeros(attention.kv_shape(3, 16, 2, 16)) for _ in range(layout.num_tensors)]
    attention.bind(tensors)
    bound = [backend._kv_layers for backend in attention.backends]
    assert [len(each) for each in bound] == [2, 2, 1]
    assert all(kv is tensors[j] for each in bound for j, kv in enumerate(each))
    assert [backend._spec.sliding_window for backend in attention.backends] == [None, 5, 5]


def lfm2_of(num_layers: int, attention: list[int], hidden_size: int = 2048) -> ModelConfig:
    return ModelConfig(
        architecture="Lfm2ForCausalLM",
        vocab_size=8,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        conv_layers=tuple(i for i in range(num_layers) if i not in attention),
        conv_taps=3,
    )


# LFM2-350M, 700M, 1.2B and 2.6B: what a kept position of all convolutions takes of its blocks.
@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "attention", "groups", "kept"),
    [
        (1024, 16, [2, 5, 8, 10, 12, 14], [10], 61_440),
        (1536, 16, [2, 5, 8, 10, 12, 14], [10], 92_160),
        (2048, 16, [2, 5, 8, 10, 12, 14], [10], 122_880),
        (2048, 30, [2, 6, 10, 14, 17, 21, 24, 27], [11, 11], 270_336),
    ],
)
def test_convolutions_share_blocks_and_take_no_more_tensors_than_attention(
    hidden_size: int, num_layers: int, attention: list[int], groups: list[int], kept: int
) -> None:
    layout = kv_layout(lfm2_of(num_layers, attention, hidden_size))
    full, *convs = layout.groups
    assert (full.layers, full.kind) == (tuple(attention), "full")
    assert {group.kind for group in convs} == {("sliding_window", 3)}
    assert [len(group.layers) for group in convs] == groups
    assert layout.num_tensors == len(attention)
    # Bfloat16; two inputs, and one more as the last token may be computed again.
    assert sum(groups) * 3 * hidden_size * 2 == kept
    assert kept < len(groups) * layout.bytes_per_block(16, 2)
    assert layout.bytes_per_block(16, 2) == len(attention) * 2 * 16 * 8 * 64 * 2


@pytest.mark.parametrize(("block_size", "most_refused"), [(6, 1), (8, 1), (16, 1), (16, 5)])
def test_no_two_convolutions_share_a_number_and_all_lie_in_their_block(
    block_size: int, most_refused: int
) -> None:
    model = lfm2_of(30, [2, 6, 10, 14, 17, 21, 24, 27])
    layout = kv_layout(model, block_size, most_refused)
    whole = range(2 * block_size * 8 * 64)
    convs = layout.groups[1:]
    assert sorted(layer for group in convs for layer in group.layers) == [*model.conv_layers]
    for group in convs:
        taken = [group.part(number) for number in range(len(group.layers))]
        places = [(tensor, place) for tensor, part in taken for place in whole[part]]
        kept = min(2 + most_refused, block_size) * 2048
        assert len(places) == len(set(places)) == len(group.layers) * kept
        assert {tensor for tensor, _ in taken} <= {*range(layout.num_tensors)}


# Bfloat16, blocks of 16 tokens: what a block takes, layers of each group, what is not used.
@pytest.mark.parametrize(
    ("shape", "block_bytes", "groups", "unused"),
    [
        ("E2B", 98_304, [3, 6, 6], 0),
        ("E4B", 262_144, [4, 7, 7, 6], 1 / 8),
        ("31B", 1_310_720, [10, *[5] * 10], 0),
        ("26B-A4B", 327_680, [5, *[2] * 12, 1], 15 / 70),
    ],
)
def test_layers_of_two_sizes_share_blocks(
    shape: str, block_bytes: int, groups: list[int], unused: float
) -> None:
    model = ModelConfig.from_hf(SHAPES[f"Gemma 4 {shape}"])
    layout = kv_layout(model)
    assert [len(group.layers) for group in layout.groups] == groups
    assert layout.num_tensors == 1
    assert layout.bytes_per_block(16, 2) == block_bytes
    assert layout.unused_share == pytest.approx(unused)
    assert layout.groups[0].kind == "full"
    places = layer_places(layout.groups)
    for layer in range(model.num_layers):
        group, number = places[layer]
        assert layout.groups[group].layers[number] == model.kv_owner(layer)
    for group in layout.groups:
        parts = [group.part(number) for number in range(len(group.layers))]
        ends = [0, *(part.stop for _, part in parts)]
        assert [(tensor, part.start) for tensor, part in parts] == [(0, end) for end in ends[:-1]]
        assert 2 * ends[-1] <= block_bytes


def test_layers_that_read_the_kv_of_others_take_no_blocks() -> None:
    model = replace(model_of((5, None, 5, 5, None, 5)), num_kv_readers=3)
    layout = kv_layout(model)
    assert [group.layers for group in layout.groups] == [(1,), (0,), (2,)]
    assert [group.readers for group in layout.groups] == [((4, 1),), (), ((3, 2), (5, 2))]
    assert layer_places(layout.groups) == [(1, 0), (0, 0), (2, 0), (2, 0), (0, 0), (2, 0)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_layer_that_reads_needs_one_of_its_kind_before(count: int) -> None:
    with pytest.raises(FieldError, match="num_kv_readers must leave a layer before them"):
        replace(model_of((None, None, 5)), num_kv_readers=count)


def test_blocks_too_small_for_a_convolution_are_refused_by_name() -> None:
    with pytest.raises(FieldError, match=r"block_size must be at least 6 for .* convolutions"):
        kv_layout(lfm2_of(16, [2, 5, 8, 10, 12, 14]), 5)


@given(
    window=st.none() | st.integers(1, 70),
    chunk=st.integers(1, 40),
    num_tokens=st.integers(1, 120),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_tables_have_room_for_what_any_step_lists_and_no_more(
    window: int | None, chunk: int, num_tokens: int, block_size: int
) -> None:
    def listed(start: int, stop: int) -> int:
        seen = range(0 if window is None else max(start + 1 - window, 0), stop)
        return len({position // block_size for position in seen})

    most = max(listed(start, min(start + chunk, num_tokens)) for start in range(num_tokens))
    group = KVGroup((0,), window)
    room = group.most_pages(num_tokens, chunk, block_size)
    assert most <= room <= most + 1


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5, 5)])
@pytest.mark.parametrize("num_blocks", [2, 3, 7, 40])
def test_the_longest_sequence_is_the_last_that_the_pool_holds(
    windows: tuple[int | None, ...], num_blocks: int
) -> None:
    groups = kv_layout(model_of(windows)).kinds
    cache = make_cache(2, 4, groups=groups, model="m")
    fits = [n for n in range(1, 201) if cache.core.most_blocks(n, 8) <= num_blocks - 1]
    assert fits == [*range(1, len(fits) + 1)], "what is shorter fits too"
    assert fitting_tokens(num_blocks, 4, groups, chunk=8, most=200) == len(fits)
    if windows == (None,):
        assert len(fits) == min(200, 4 * (num_blocks - 1))


def test_a_long_prompt_needs_its_window_and_a_chunk_in_each_window_group() -> None:
    """28k tokens: 1,750 blocks of full attention, and 193 in each of six groups."""
    groups: list[GroupKind] = ["full", *[("sliding_window", 1024)] * 6]
    need = 1750 + 6 * (1024 // 16 + 1 + 2048 // 16 + 1)
    assert fitting_tokens(need + 1, 16, groups, chunk=2048, most=32_768) >= 28_000
    assert fitting_tokens(7 * 1750 // 2, 16, groups, chunk=2048, most=40_000) > 28_000
    assert fitting_tokens(1750, 16, groups, chunk=2048, most=32_768) < 28_000


# The bytes of a snapshot.
SNAPSHOTS = {
    "Qwen3.5-0.8B": 20_201_472,
    "Qwen3.5-4B": 52_690_944,
    "Qwen3.5-27B": 156_893_184,
    "granite-4.0-h-micro": 78_151_680,
}


@pytest.mark.parametrize(("name", "snapshot"), SNAPSHOTS.items())
@pytest.mark.parametrize(("block_size", "itemsize"), [(16, 2), (64, 2), (64, 4), (256, 2)])
def test_a_snapshot_of_states_takes_as_many_blocks_as_hold_it(
    name: str, snapshot: int, block_size: int, itemsize: int
) -> None:
    model = ModelConfig.from_hf((SHAPES | STATE_SHAPES)[name])
    layout = kv_layout(model, block_size, itemsize=itemsize)
    full, *states = layout.groups
    assert full.layers == tuple(sorted({*range(model.num_layers)} - {*model.state_layers}))
    assert layout.num_tensors == len(full.layers)
    assert {group.kind for group in states} == {"state"}
    assert [layer for group in states for layer in group.layers] == [*model.state_layers]
    assert len(states) == -(-snapshot // layout.bytes_per_block(block_size, itemsize))
    assert sum(part.numbers for part in layout.states) * 4 == snapshot


@pytest.mark.parametrize(("block_size", "itemsize"), [(1, 2), (16, 2), (64, 4)])
def test_no_two_parts_of_states_share_a_number_and_each_layer_has_its_own(
    block_size: int, itemsize: int
) -> None:
    model = ModelConfig.from_hf(SHAPES["Qwen3.5-0.8B"])
    layout = kv_layout(model, block_size, itemsize=itemsize)
    part_numbers = 2 * block_size * 2 * 256 * itemsize // 4
    num_tensors = [group.num_tensors for group in layout.groups]
    assert max(num_tensors) == layout.num_tensors
    ends = dict[tuple[int, int], int]()
    for part in layout.states:
        place = (part.group, part.tensor)
        assert part.start == ends.get(place, 0)
        assert part.tensor < num_tensors[part.group]
        ends[place] = part.start + part.numbers
        assert ends[place] <= part_numbers
    assert model.states is not None
    for layer in model.state_layers:
        parts = [part for part in layout.states if part.layer == layer]
        assert sum(part.numbers for part in parts) == model.states.state_numbers
        places = [(part.group, part.tensor) for part in parts]
        assert places == sorted(places)
