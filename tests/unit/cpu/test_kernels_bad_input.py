"""Sizes and addresses that the kernels refuse: a Python error, never a crash of the process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixcache._core import (
    AttentionMixer,
    Cpu,
    DecoderLayer,
    DecoderStack,
    DeltaMixer,
    DenseFeedForward,
    ExpertsFeedForward,
    OwnInput,
    PackedLinear,
    PagedAttention,
    RowOps,
    ShortConvMixer,
)

CPU = Cpu(2)


def zeros(*shape: int) -> tuple[np.ndarray[Any, Any], int]:
    array = np.zeros(shape, np.float32)
    return array, array.ctypes.data


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (4, 2**60),  # 2**64 bytes, which count as none where a product wraps around
        (4, 2**46),  # more than an address can name
        (2**60, 4),
        (2**62, 2**62),
        (2**64 - 2, 2**64 - 1),
        (2, 2**64 - 1),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_larger_than_memory(inputs: int, outputs: int, dtype: Any, bias: bool) -> None:
    with pytest.raises(MemoryError, match="more memory than there is"):
        PackedLinear(CPU, inputs, outputs, dtype, bias=bias)


def test_rows_that_a_layer_does_not_have() -> None:
    layer, (_, weight) = PackedLinear(CPU, 4, 8, "float32"), zeros(8, 4)
    for start, count in [(0, 9), (8, 1), (2**64 - 1, 1), (1, 2**64 - 1), (2**63, 2**63)]:
        with pytest.raises(ValueError, match="start must leave room"):
            layer.copy_rows(start, weight, count)
        with pytest.raises(ValueError, match="start must leave room"):
            layer.copy_bias(start, weight, count)
    with pytest.raises(ValueError, match="the layer has none"):
        layer.copy_bias(0, weight, 8)


@pytest.mark.parametrize(
    ("rows", "stride"), [(2**60, 4), (2**62, 4), (2**63, 4), (2, 2**61), (3, 2**63)]
)
def test_matrices_larger_than_memory(rows: int, stride: int) -> None:
    layer, (_, address) = PackedLinear(CPU, 4, 4, "float32"), zeros(4, 4)
    for offset in (0, 2**63 - 64):
        with pytest.raises(ValueError, match="x must not have more numbers than memory has"):
            layer.forward(address + offset, rows, stride, address)
    ops = RowOps(CPU, "float32")
    with pytest.raises(ValueError, match="x must not have more numbers"):
        ops.rms_norm(address, rows, 4, stride, address, 4, 4, 1e-5, address)
    with pytest.raises(ValueError, match="x must not have more numbers"):
        ops.gated("silu", address, rows, 2, stride, address)
    with pytest.raises(ValueError, match="must not have more numbers"):
        ops.rotate(address, address, 2, address, rows, 4, stride, address)


def test_widths_that_cannot_be_doubled() -> None:
    ops, (_, address) = RowOps(CPU, "float32"), zeros(4)
    with pytest.raises(ValueError, match="width"):
        ops.gated("silu", address, 1, 2**63, 0, address)
    with pytest.raises(ValueError, match="half"):
        ops.rotate(address, address, 2**63, address, 1, 4, 4, address)


def test_addresses_that_are_none() -> None:
    layer, (_, address) = PackedLinear(CPU, 4, 4, "float32"), zeros(4, 4)
    for bad in (0, address + 2):
        with pytest.raises(ValueError, match="x must be the address of its numbers"):
            layer.forward(bad, 1, 4, address)
    with pytest.raises(ValueError, match="x must not have rows that overlap"):
        layer.forward(address, 2, 3, address)


ARRAYS = {
    "qo_indptr": np.array([0, 1], np.int32),
    "kv_indptr": np.array([0, 2], np.int32),
    "kv_indices": np.array([1, 1], np.int32),
    "last_page_len": np.array([1], np.int32),
    "slot_mapping": np.array([16], np.int64),
}


def attention() -> PagedAttention:
    return PagedAttention(CPU, "float32", 2, 1, 16, 1.0)


@pytest.mark.parametrize(
    ("num_pages", "block_size"), [(4, 2**60), (2**60, 16), (1, 2**63), (2**64 - 1, 2**64 - 1)]
)
def test_a_cache_larger_than_memory(num_pages: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="num_pages times block_size"):
        attention().plan(num_pages, block_size, **ARRAYS)


def test_a_step_is_checked_before_memory_is_taken_for_its_queries() -> None:
    tables = ARRAYS | {"qo_indptr": np.array([0, 2**31 - 1], np.int32)}
    with pytest.raises(ValueError, match="slot_mapping must have 2147483647 slots"):
        attention().plan(4, 2**40, **tables)


def test_slots_outside_the_cache() -> None:
    for slot in (-1, 64, 2**62):
        tables = ARRAYS | {"slot_mapping": np.array([slot])}
        with pytest.raises(ValueError, match="slot_mapping must be from 0 to 63"):
            attention().plan(4, 16, **tables)


@pytest.mark.parametrize(
    ("first_pages", "match"),
    [
        (np.array([-1], np.int32), "first_pages holds -1"),
        (np.array([1], np.int32), r"first_pages leaves out 1 .* see keys from position 0 on"),
        (np.array([2**31 - 1], np.int32), "first_pages leaves out 2147483647"),
        (np.zeros(0, np.int32), "first_pages has the wrong length"),
        (np.zeros(2, np.int32), "first_pages has the wrong length"),
    ],
)
def test_pages_that_may_not_be_left_out(first_pages: np.ndarray, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        attention().plan(4, 16, **ARRAYS, first_pages=first_pages)


@pytest.mark.parametrize("heads", [2**16 + 1, 2**60, 2**64 - 1])
def test_more_heads_than_any_model(heads: int) -> None:
    with pytest.raises(ValueError, match="num_heads"):
        PagedAttention(CPU, "float32", heads, 1, 16, 1.0)


def planned(**changed: Any) -> PagedAttention:
    attention = PagedAttention(CPU, "float32", 4, 2, 16, 1.0)
    attention.plan(4, 16, **ARRAYS | changed)
    return attention


def test_a_stream_wider_than_memory() -> None:
    _, address = zeros(1, 16)
    stack = DecoderStack(CPU, "float32", 2**62, 1e-5, [])
    with pytest.raises(ValueError, match="x must not have more numbers"):
        stack.forward([planned()], [], [], [(address, address)], address)


def linear(inputs: int, outputs: int, dtype: Any = "float32") -> PackedLinear:
    return PackedLinear(CPU, inputs, outputs, dtype)


_, NUMBERS = zeros(4 * 2 * 2 * 16 * 16)


_OF_ATTENTION = ("gated", "qk_norm", "query_rope", "sinks", "makes", "value_norm")


def decoder_layer(**changed: Any) -> DecoderLayer:
    """A layer over a stream of 4, for 4 heads of 16 and 2 of keys and values."""
    mixer: dict[str, Any] = {"qkv": linear(4, 128), "out": linear(64, 4), "rope": 0}
    dense: dict[str, Any] = {
        "gate_up": linear(4, 12),
        "gate": "gelu_tanh",
        "down": linear(6, 4),
    }
    sound: dict[str, Any] = {
        "input_norm": NUMBERS,
        "mixer": AttentionMixer(**_changed(mixer, changed, *_OF_ATTENTION)),
        "mlp_norm": NUMBERS,
        "feed_forward": DenseFeedForward(**_changed(dense, changed)),
        "norm_offset": 1.0,
    }
    return DecoderLayer(**sound | changed)


def experts(**changed: Any) -> ExpertsFeedForward:
    """Three experts of 6 over a stream of 4."""
    sound: dict[str, Any] = {
        "router": linear(4, 3),
        "scores": "softmax",
        "top_k": 2,
        "gate_up": parted(4, [6] * 6),
        "gate": "silu",
        "down": parted(6, [4] * 3),
    }
    return ExpertsFeedForward(**sound | changed)


def parted(inputs: int, parts: list[int], dtype: Any = "float32") -> PackedLinear:
    return PackedLinear(CPU, inputs, sum(parts), dtype, parts=parts)


def conv_layer(**changed: Any) -> DecoderLayer:
    """A convolution over the last three tokens, in the place of attention."""
    conv: dict[str, Any] = {
        "in_proj": linear(4, 12),
        "taps": 3,
        "weight": NUMBERS,
        "out": linear(4, 4),
    }
    return decoder_layer(mixer=ShortConvMixer(**_changed(conv, changed, "bias")), **changed)


def _changed(sound: dict[str, Any], changed: dict[str, Any], *more: str) -> dict[str, Any]:
    """The arguments of a part, with the changes of it, which are taken out of `changed`."""
    names = [name for name in (*sound, *more) if name in changed]
    return sound | {name: changed.pop(name) for name in names}


def forward(layers: list[DecoderLayer], **changed: Any) -> None:
    sound: dict[str, Any] = {
        "attentions": [planned()],
        "layer_groups": [0] * len(layers),
        "caches": [NUMBERS] * len(layers),
        "rotations": [(NUMBERS, NUMBERS)] * 2,
        "x": NUMBERS,
    }
    DecoderStack(CPU, "float32", 4, 1e-5, layers).forward(**sound | changed)


@pytest.mark.parametrize("rotated", [0, 3, 18, 2**63])
def test_more_of_a_head_is_turned_than_there_is(rotated: int) -> None:
    with pytest.raises(ValueError, match=f"rotated must be even, and from 2 to 16, not {rotated}"):
        forward([decoder_layer()], rotated=[rotated, 16])


def test_what_is_turned_is_said_for_each_rotation() -> None:
    with pytest.raises(ValueError, match="rotated must have one for each of 2 rotations"):
        forward([decoder_layer()], rotated=[16])


def test_a_sound_stack_is_computed() -> None:
    forward([decoder_layer(), decoder_layer(gate="silu")])


@pytest.mark.parametrize(
    ("changed", "kept_tokens", "error", "message"),
    [
        ({"taps": 0}, 3, ValueError, "taps must be from 1 to 8, not 0"),
        ({"taps": 9}, 9, ValueError, "taps must be from 1 to 8, not 9"),
        ({"taps": 4}, 3, ValueError, r"attentions\[0\] must have"),
        ({"in_proj": linear(4, 8)}, 3, ValueError, r"layers\[0\] must have linears that fit"),
        ({"out": linear(6, 4)}, 3, ValueError, r"layers\[0\] must have linears that fit"),
        ({"out": linear(4, 4, "bfloat16")}, 3, ValueError, r"layers\[0\] must have linears"),
        ({"weight": 0}, 3, ValueError, "weight must be the address of its numbers"),
        ({"bias": NUMBERS + 2}, 3, ValueError, "bias must be the address of its numbers"),
        ({}, None, ValueError, "kept_tokens must be at least 2 for a convolution"),
        ({}, 1, ValueError, "kept_tokens must be at least 2 for a convolution"),
        ({}, 2.5, TypeError, "kept_tokens must be a whole number"),
        # A page of this attention has 1,024 numbers.
        ({}, 257, ValueError, "caches must not have rows that overlap"),
        ({}, 2**63, ValueError, "caches must not have rows that overlap"),
    ],
)
def test_arguments_of_a_convolution(
    changed: dict[str, Any], kept_tokens: Any, error: type, message: str
) -> None:
    window = PagedAttention(CPU, "float32", 4, 2, 16, 1.0, window_left=2)
    window.plan(4, 16, **ARRAYS)
    with pytest.raises(error, match=message):
        forward([conv_layer(**changed)], attentions=[window], kept_tokens=kept_tokens)


def test_a_convolution_next_to_attention_is_computed() -> None:
    forward([decoder_layer(), conv_layer(), conv_layer(bias=NUMBERS)], kept_tokens=2)


def delta_layer(**changed: Any) -> DecoderLayer:
    """One head of the delta rule, whose state are 304 numbers."""
    delta: dict[str, Any] = {
        "in_proj": linear(4, 66),
        **dict.fromkeys(("key_heads", "value_heads"), 1),
        **dict.fromkeys(("key_dim", "value_dim"), 16),
        "taps": 2,
        **dict.fromkeys(("conv", "decay", "time_bias", "norm"), NUMBERS),
        "eps": 1e-6,
        "out": linear(16, 4),
    }
    delta = _changed(delta, changed, "alike", "conv_bias", "skip")
    return decoder_layer(mixer=DeltaMixer(**delta), **changed)


STATE = [(0, 0, NUMBERS, 100), (0, 0, NUMBERS + 400, 204)]


@pytest.mark.parametrize(
    ("changed", "states", "error", "message"),
    [
        ({"value_dim": 8}, STATE, ValueError, "value_heads must be a multiple of key_heads and"),
        ({"key_heads": 2}, STATE, ValueError, "value_heads must be a multiple of key_heads"),
        ({"taps": 0}, STATE, ValueError, "taps from 1 to 8"),
        ({"key_dim": 2**40}, STATE, ValueError, "value_heads must be"),
        ({"in_proj": linear(4, 65)}, STATE, ValueError, r"layers\[0\] must have linears that fit"),
        ({"out": linear(16, 6)}, STATE, ValueError, r"layers\[0\] must have linears that fit"),
        ({"conv": 0}, STATE, ValueError, "conv must be the address of its numbers"),
        ({"conv_bias": 2}, STATE, ValueError, "conv_bias must be the address of its numbers"),
        ({"skip": NUMBERS}, STATE, ValueError, r"layers\[0\] must have linears that fit"),
        ({"alike": 2}, STATE, ValueError, "and these of alike"),
        ({"eps": "a"}, STATE, TypeError, "eps must be a number"),
        ({}, None, ValueError, "states must have all numbers of the state of layer 0"),
        ({}, STATE[:1], ValueError, "states must have all numbers of the state of layer 0"),
        ({}, [*STATE, (0, 0, NUMBERS, 1)], ValueError, r"states\[2\] must have no more numbers"),
        ({}, [(1, 0, NUMBERS, 304)], ValueError, r"states\[0\] must be of a layer and of a group"),
        ({}, [(0, 1, NUMBERS, 304)], ValueError, r"states\[0\] must be of a layer and of a group"),
        ({}, [(0, 0, NUMBERS + 2, 304)], ValueError, "states must be the address of its numbers"),
        ({}, [(0, 0, NUMBERS)], TypeError, r"states\[0\] must be a layer, a group, an address"),
        ({}, [(0, 0, NUMBERS, -1)], ValueError, r"states\[0\] must be from 0"),
        ({}, 3, TypeError, "states"),
    ],
)
def test_arguments_of_a_delta_rule(
    changed: dict[str, Any], states: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        forward([delta_layer(**changed)], states=states)


@pytest.mark.parametrize("change", [{"kv_indices": [1, 1]}, {"window_left": 0}], ids=str)
def test_states_need_pages_of_their_own_and_the_token_before(change: dict[str, Any]) -> None:
    window = PagedAttention(CPU, "float32", 4, 2, 16, 1.0, window_left=change.get("window_left", 1))
    pages = np.array(change.get("kv_indices", [1, 2]), np.int32)
    arrays = {
        "qo_indptr": np.array([0, 1, 2], np.int32),
        "kv_indptr": np.array([0, 1, 2], np.int32),
        "kv_indices": pages,
        "last_page_len": np.ones(2, np.int32),
        "slot_mapping": np.array([16, 32], np.int64),
    }
    window.plan(4, 16, **arrays)
    reason = "pages for the sequences" if "kv_indices" in change else "(window is 2|attentions)"
    with pytest.raises(ValueError, match=reason):
        forward([delta_layer()], attentions=[window], states=STATE)


def test_a_delta_rule_next_to_attention_is_computed() -> None:
    states = [(1, *rest) for _, *rest in STATE]
    forward([decoder_layer(), delta_layer()], states=states)


def test_mamba_2_next_to_attention_is_computed() -> None:
    numbers = {"skip": NUMBERS, "conv_bias": NUMBERS, "in_proj": linear(4, 65)}
    forward([decoder_layer(), delta_layer(**numbers)], states=[(1, *rest) for _, *rest in STATE])


def forward_and_accept(guesses: Any, accepted: Any) -> None:
    """Of a sequence of one row."""
    stack, attentions = DecoderStack(CPU, "float32", 4, 1e-5, [delta_layer()]), [planned()]
    rotations = [(NUMBERS, NUMBERS)] * 2
    stack.forward(attentions, [0], [NUMBERS], rotations, NUMBERS, states=STATE, guesses=guesses)
    stack.keep_accepted(attentions, STATE, accepted)


@pytest.mark.parametrize(
    ("guesses", "accepted", "name"),
    [
        ([1, 1], [1], "guesses"),
        ([2], [1], "guesses"),
        ([1], [2], "accepted"),
        ([1], [], "accepted"),
        ([], [1], "accepted"),
    ],
)
def test_guesses_that_there_are_not(guesses: Any, accepted: Any, name: str) -> None:
    forward_and_accept([1], [1])
    with pytest.raises(ValueError, match=f"{name} must have a number for each sequence"):
        forward_and_accept(guesses, accepted)


@pytest.mark.parametrize(
    "changed",
    [
        {"qkv": linear(6, 128)},
        {"out": linear(64, 6)},
        {"gate_up": linear(4, 14)},
        {"down": linear(6, 6)},
        {"qkv": linear(4, 128, "bfloat16")},
        {"gate": "squared_relu"},
    ],
)
def test_layers_that_do_not_fit(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"layers\[1\] must have linears that fit"):
        forward([decoder_layer(), decoder_layer(**changed)])


@pytest.mark.parametrize(
    "changed",
    [
        {"gate_up": linear(4, 24), "down": linear(12, 4)},
        {"qk_norm": NUMBERS, "input_norm": None, "mlp_norm": None},
        {"mixer_out_norm": NUMBERS},
        {"mlp_out_norm": NUMBERS},
        {"qkv": linear(4, 192), "gated": True},
        {"gate_up": linear(4, 6), "gate": "squared_relu"},
        {"feed_forward": None, "mlp_norm": None},
    ],
)
def test_layers_may_differ(changed: dict[str, Any]) -> None:
    forward([decoder_layer(), decoder_layer(**changed)])


def shared() -> DenseFeedForward:
    return DenseFeedForward(gate_up=linear(4, 20), gate="silu", down=linear(10, 4))


def own_input(**changed: Any) -> OwnInput:
    """Two numbers of a token, which go into a stream of 4."""
    sound: dict[str, Any] = {
        "gate": linear(4, 2),
        "activation": "gelu_tanh",
        "out": linear(2, 4),
        "norm": NUMBERS,
    }
    return OwnInput(**sound | changed)


def test_layers_read_the_keys_of_others_in_their_place() -> None:
    """With values that are keys, inputs of their own, and heads of two sizes in one tensor."""
    large = PagedAttention(CPU, "float32", 2, 1, 32, 1.0)
    large.plan(2, 16, **ARRAYS)
    layers = [
        decoder_layer(value_norm=NUMBERS, own_input=own_input(), stream_scale=NUMBERS),
        decoder_layer(qkv=linear(4, 64), makes="queries"),
        decoder_layer(qkv=linear(4, 96), makes="queries_and_keys", rope=1, own_input=own_input()),
    ]
    small = PagedAttention(CPU, "float32", 4, 2, 16, 1.0)
    small.plan(2, 16, **ARRAYS)
    forward(
        layers,
        attentions=[small, large],
        layer_groups=[0, 0, 1],
        rotated=[16, 32],
        page_stride=2048,
        own_inputs=NUMBERS,
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"makes": "queries"}, r"attentions\[0\] must have"),
        ({"makes": "queries_and_keys"}, r"attentions\[0\] must have"),
        ({"qkv": linear(4, 96)}, r"attentions\[0\] must have"),
        ({"makes": "keys"}, 'makes must be "all" or "queries_and_keys" or "queries"'),
        ({"value_norm": 0}, "value_norm must be the address of its numbers"),
        ({"stream_scale": 0}, "stream_scale must be the address of its numbers"),
        ({"own_input": own_input(norm=0)}, "norm must be the address of its numbers"),
        ({"own_input": own_input(gate=linear(6, 2))}, r"layers\[0\] must have linears that fit"),
        ({"own_input": own_input(out=linear(2, 6))}, r"layers\[0\] must have linears that fit"),
        ({"own_input": own_input(out=linear(4, 4))}, r"layers\[0\] must have linears that fit"),
        *(
            ({"own_input": own_input(activation="squared_relu", gate=linear(4, size))}, "that fit")
            for size in (1, 2)
        ),
    ],
)
def test_layers_that_have_less_or_more(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward([decoder_layer(**changed)], own_inputs=NUMBERS)


def test_a_layer_may_have_experts() -> None:
    biased = experts(scores="sigmoid", selection_bias=NUMBERS, renormalise=1e-6, scale=2.0)
    fused = experts(gate_up=parted(4, [12] * 3), shared=shared())
    weighed = experts(shared=shared(), shared_weight=linear(4, 1))
    layers = [decoder_layer(feed_forward=one) for one in (experts(), biased, fused, weighed)]
    forward([decoder_layer(), *layers])


@pytest.mark.parametrize(
    "changed",
    [
        {"router": linear(6, 3)},
        {"router": linear(4, 2)},
        {"gate": "squared_relu"},
        {"gate_up": parted(4, [6] * 4)},
        {"gate_up": linear(4, 36)},
        {"gate_up": parted(4, [6, 12, 6, 12])},
        {"gate_up": parted(4, [4, 8, 12, 6, 5, 1])},
        {"gate_up": parted(4, [6] * 6, "bfloat16")},
        {"down": parted(6, [4] * 4)},
        {"down": parted(6, [6, 6])},
        {"down": parted(8, [4] * 3)},
        {"shared": DenseFeedForward(gate_up=linear(4, 20), gate="silu", down=linear(8, 4))},
        {"shared": shared(), "shared_weight": linear(4, 2)},
        {"shared": shared(), "shared_weight": linear(6, 1)},
        {"shared": shared(), "shared_weight": linear(4, 1, "bfloat16")},
    ],
)
def test_experts_that_do_not_fit(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"layers\[0\] must have linears that fit"):
        forward([decoder_layer(feed_forward=experts(**changed))])


@pytest.mark.parametrize("changed", [{"qkv": linear(4, 160)}, {"gated": True}])
def test_a_layer_that_has_other_heads_than_its_attention(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"attentions\[0\] must have the type and the heads"):
        forward([decoder_layer(), decoder_layer(**changed)])


OTHER_HEADS = PagedAttention(CPU, "float32", 4, 1, 16, 1.0)
OTHER_TYPE = PagedAttention(CPU, "bfloat16", 4, 2, 16, 1.0)
NO_STEP = PagedAttention(CPU, "float32", 4, 2, 16, 1.0)
TWO_ROWS = {"qo_indptr": np.array([0, 2], np.int32), "slot_mapping": np.array([0, 1])}
TWICE = planned()
TWO_GROUPS: dict[str, Any] = {"layer_groups": [0, 1]}
OTHERS = r"attentions\[1\] must have"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"attentions": []}, ValueError, "attentions must have one for each group"),
        ({"attentions": [planned(), 1]}, TypeError, r"attentions\[1\] must be a PagedAttention"),
        (TWO_GROUPS | {"attentions": [planned(), OTHER_HEADS]}, ValueError, OTHERS),
        (TWO_GROUPS | {"attentions": [planned(), OTHER_TYPE]}, ValueError, OTHERS),
        ({"attentions": [planned(), NO_STEP]}, RuntimeError, "no step is planned"),
        ({"attentions": [TWICE, TWICE]}, RuntimeError, "the attention is in use"),
        ({"attentions": [planned(), planned(**TWO_ROWS)]}, ValueError, r"attentions\[1\] .*1 rows"),
        ({"layer_groups": [0]}, ValueError, "layer_groups must have one for each of 2 layers"),
        ({"layer_groups": [0, 1]}, ValueError, r"layer_groups\[1\] must be below 1"),
        ({"layer_groups": [0, 2**63]}, ValueError, r"layer_groups\[1\] must be below 1"),
        ({"layer_groups": [0, "full"]}, TypeError, r"layer_groups\[1\] must be a whole number"),
        ({"caches": [NUMBERS] * 3}, ValueError, "caches must have one for each of 2 layers, not 3"),
        ({"caches": [NUMBERS, 0]}, ValueError, "caches must be the address"),
        ({"page_stride": 1023}, ValueError, "caches must not have rows that overlap"),
        ({"page_stride": 2**62}, ValueError, "caches must not have more numbers than memory"),
        ({"rotations": []}, ValueError, "rotations must have one for rope 0"),
        ({"rotations": [(NUMBERS, NUMBERS)]}, ValueError, "rotations must have one for rope 1"),
        ({"rotations": [NUMBERS]}, TypeError, r"rotations\[0\] must be a pair of the addresses"),
        ({"rotations": [(NUMBERS, -1)]}, ValueError, r"rotations\[0\] must be from 0"),
        ({"rotations": [(NUMBERS, 0)] * 2}, ValueError, "rotations must be the address"),
    ],
)
def test_arguments_of_a_step(changed: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        forward([decoder_layer(), decoder_layer(rope=1)], **changed)
