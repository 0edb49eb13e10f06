"""Events have the form that llm-d's vLLM adapter reads, field by field.

What it reads was taken from that adapter: maps, as vLLM sends them since 0.24, and types of fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from fakes.fake_engine import make_engine, make_request
from prefixcache.events.form import WireForm
from prefixcache.events.wire import EventBatch, encode

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


def events_of(groups: tuple[Any, ...]) -> list[dict[str, Any]]:
    """What a small engine publishes of prompts that share beginnings, until it clears its cache."""
    engine, _, _ = make_engine(num_blocks=24, groups=groups)
    events = engine.control.keep_events()
    form = WireForm(events.block_size, events.groups)
    for number in range(12):
        prompt = [number % 3] * 10 + list(range(20 + number, 40 + number))
        request = make_request(str(number), prompt)
        engine.add_request(request)
        while engine.has_unfinished():
            engine.step()
    engine.control.reset_prefix_cache()
    batch = EventBatch(1.5, [form.event(event) for event in events.take(10_000)], 0)
    ts, found, rank = msgpack.unpackb(encode(batch))
    assert (ts, rank) == (1.5, 0)
    return found


@pytest.mark.parametrize("groups", [("full",), ("full", ("sliding_window", 8))], ids=len)
def test_events_are_maps_of_these_fields(groups: tuple[Any, ...]) -> None:
    seen = set[str]()
    for fields in events_of(groups):
        seen.add(kind := fields.pop("type"))
        needed, optional = FORM[kind]
        assert needed.keys() <= fields.keys() <= needed.keys() | optional.keys()
        for name, value in fields.items():
            assert (needed | optional)[name](value), (name, value)
        if kind == "BlockStored":
            assert len(fields["token_ids"]) == len(fields["block_hashes"]) * fields["block_size"]
        assert ("group_idx" in fields) == (len(groups) > 1 and kind != "AllBlocksCleared")
    assert seen == FORM.keys()
