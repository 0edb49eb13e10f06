"""Answers written in pieces say what is written in one go."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixcache.server.http.json_text import Written, json_text, object_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@settings(max_examples=60, deadline=None)
@given(values, values)
@example('"\\\n中🦙' * 2**16, ["x" * 2**16, {}])
def test_pieces_make_the_same_text(first: Any, second: Any) -> None:
    assert json.loads(object_json(first)) == first
    reported = {"a": Written(first), "b": [second, Written(second)], "c": second}
    expected = {"a": first, "b": [second, second], "c": second}
    assert json.loads(json_text(reported)) == json.loads(object_json(reported)) == expected
    assert json.loads(object_json({"a": iter([first, second])})) == {"a": [first, second]}


def test_neither_items_nor_pieces_of_a_long_text_are_there_at_once() -> None:
    tracemalloc.start()
    try:
        text = object_json({"a": ({"number": number} for number in range(20_000))})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(text)
