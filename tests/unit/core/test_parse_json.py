"""`parse_json` next to the standard library's parser, which is the oracle of what JSON means."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache._core import parse_json

_MANY = {"max_numbers": 10_000, "max_others": 10_000}

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)
# Pieces of JSON, so that what they join to is often nearly valid.
_pieces = st.lists(
    st.sampled_from(
        [
            *'{}[],:"a\\1-0. \n\x00eE+',
            *("\\u00e4", "\\ud83e\\udd99", "\\ud800", "ä", "9" * 20),
            *("true", "null", "NaN", "Infinity", '"k":', '"k":1', '""', "//"),
        ]
    ),
    max_size=12,
)


def _refuse(_: object) -> None:
    raise ValueError


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError
    return value


def _plain(text: str) -> object:
    """The standard library's, as strict as ours."""
    value = json.loads(
        text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_without_duplicates
    )
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate fails
    return value


def _outcome(parse: object, text: object) -> object:
    try:
        return repr(parse(text))  # repr tells 1 from 1.0 and from True, and 0.0 from -0.0
    except ValueError:
        return ValueError


@given(value=_values, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_what_was_written_is_read(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert repr(parse_json(text.encode(), **_MANY)) == repr(json.loads(text))


@given(pieces=_pieces)
def test_it_accepts_what_the_standard_library_does(pieces):
    text = "".join(pieces)
    found = _outcome(lambda body: parse_json(body, **_MANY), text.encode())
    assert found == _outcome(_plain, text)


@given(body=st.binary(max_size=12))
def test_bytes_that_are_no_text_are_refused(body):
    try:
        text = body.decode()
    except UnicodeDecodeError:
        with pytest.raises(ValueError, match="invalid"):
            parse_json(b'"' + body + b'"', **_MANY)
    else:
        assert _outcome(lambda b: parse_json(b, **_MANY), body) == _outcome(_plain, text)


@pytest.mark.parametrize(
    ("text", "kind", "field"),
    [
        (b"[1, 2, 3]", "numbers", None),
        (b'{"a": 1, "b": [2, 3, "and no JSON', "numbers", "b"),
        (b'{"a": {}, "b": {}, "c": {}, "d": {}}', "others", "d"),
        (b'{"a": 1, "a": 2}', "twice", "a"),
        (b"[1", "invalid", None),
        (b'{"a": {"b": -1e999}}', "invalid", "a"),
    ],
)
def test_a_refusal_tells_why_and_where(text, kind, field):
    with pytest.raises(ValueError, match=kind) as caught:
        parse_json(text, max_numbers=2, max_others=7)
    assert (caught.value.args[0], caught.value.args[2]) == (kind, field)


@pytest.mark.parametrize("count", [8191, 8192, 8193, 20_000])
def test_long_arrays_come_whole_though_they_are_made_in_slices(count):
    numbers = list(range(count))
    text = json.dumps({"a": numbers, "b": [[str(n)] for n in numbers]}).encode()
    value = parse_json(text, max_numbers=count, max_others=3 * count)
    assert value == {"a": numbers, "b": [[str(n)] for n in numbers]}
