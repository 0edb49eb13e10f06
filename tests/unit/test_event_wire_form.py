"""Events have the form that llm-d's vLLM adapter reads, field by field.

What it reads was taken from its engine adapter: the event maps of vLLM since 0.24, the topic, and which
types a field may have. The frames and the order of fields are those of vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from prefixcache.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode_batch,
    encode_sequence,
)

Check = Callable[[Any], bool]


def is_uint(bits: int) -> Check:
    return lambda value: type(value) is int and 0 <= value < 2**bits


def is_list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def is_text(value: object) -> bool:
    return isinstance(value, str)


KINDS = ("full_attention", "sliding_window")
# What must be there, then what may be left out. Other keys are read by nobody.
FORM: dict[str, tuple[dict[str, Check], dict[str, Check]]] = {
    "BlockStored": (
        {
            "block_hashes": is_list(is_uint(64)),
            "parent_block_hash": or_none(is_uint(64)),
            "token_ids": is_list(is_uint(32)),
            "block_size": is_uint(31),
        },
        {
            "lora_id": or_none(is_uint(31)),
            "medium": is_text,
            "lora_name": or_none(is_text),
            "group_idx": is_uint(31),
            "kv_cache_spec_kind": KINDS.__contains__,
            "kv_cache_spec_sliding_window": is_uint(31),
        },
    ),
    "BlockRemoved": (
        {"block_hashes": is_list(is_uint(64))},
        {"medium": is_text, "group_idx": is_uint(31)},
    ),
    "AllBlocksCleared": ({}, {}),
}
TOP = 2**64 - 1
STORED = BlockStored([TOP, 1], None, [0, 2**32 - 1, 5, 6], 2, None, "GPU", None)
WINDOW = BlockStored([TOP], 3, [5, 6], 2, None, "GPU", None, 1, "sliding_window", 128)


@pytest.mark.parametrize(
    "event", [STORED, WINDOW, BlockRemoved([TOP], "GPU", 1), AllBlocksCleared()]
)
def test_an_event_is_a_map_of_these_fields(event: BlockStored | BlockRemoved) -> None:
    payload = encode_batch(EventBatch(1.5, [event], 0))
    ts, (fields,), rank = msgpack.unpackb(payload)
    assert (ts, rank) == (1.5, 0)
    needed, optional = FORM[fields.pop("type")]
    assert needed.keys() <= fields.keys() <= needed.keys() | optional.keys()
    for name, value in fields.items():
        assert (needed | optional)[name](value), (name, value)


def test_a_sequence_is_eight_bytes_in_network_order() -> None:
    assert encode_sequence(258) == b"\0\0\0\0\0\0\x01\x02"
    assert encode_sequence(-1) == b"\xff" * 8
