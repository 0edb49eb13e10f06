"""Schemas that llguidance knows in other words alone: the same values fit as by jsonschema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from prefixcache.text.grammar.json_schema import known_schema

SET = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}
# Values of every kind, among them those at which the schemas below part.
VALUES: list[Any] = [
    *(None, True, 0, 1.5, "", "a", "b", {}, {"a": "a"}, {"a": None}, {"a": ["a", "a"]}),
    *([], ["a"], ["b", "a"], ["a", "a"], ["a", "b", "c"], ["c", "a", "b"], ["d"], [1], [["a"]]),
]
KNOWN: list[Any] = [
    SET,
    {**SET, "minItems": 1, "maxItems": 2},
    {**SET, "items": {"const": "a"}},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "object", "properties": {"a": SET}, "required": ["a"]},
    {"anyOf": [{"type": "null"}, SET]},
    {"not": {"type": "null"}},
    {"not": {"type": ["null", "number"]}},
    {"type": ["string", "integer"], "not": {"type": "string"}},
    {"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
    {"enum": ["a", "b"], "not": {"const": "a"}},
    {"enum": ["a", "b"], "not": {"enum": ["b", "c"]}},
    {"type": "string", "not": False},
    {"$ref": "#/$defs/s", "$defs": {"s": SET}},
    {"enum": [{"not": {"type": "null"}}, "a"]},
    {"type": "object", "properties": {"b": {}}, "unevaluatedProperties": False},
    {"properties": {"a": {}}, "additionalProperties": True, "unevaluatedProperties": False},
    {"patternProperties": {"^b": {}}, "unevaluatedProperties": SET},
    {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": True},
    {"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": False},
]
LEFT: list[Any] = [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "array", "items": {"enum": ["a", 1]}, "uniqueItems": True},
    {"type": "array", "items": {"enum": [*"abcdef"]}, "uniqueItems": True},
    {"type": "string", "not": {"const": "a"}},
    {"type": "number", "not": {"type": "integer"}},
    {"type": "null", "not": {"type": "null"}},
    {"not": {"required": ["a"]}},
    {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}], "unevaluatedProperties": False},
    {"type": "array", "contains": {"const": "a"}, "unevaluatedItems": False},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Every byte is a token."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


@pytest.mark.parametrize("schema", KNOWN, ids=range(len(KNOWN)))
def test_the_same_values_fit(schema: Any, tokenizer: Any) -> None:
    source = LLMatcher.grammar_from_json_schema(json.dumps(known_schema(schema)))
    start, validator = LLMatcher(tokenizer, source), Draft202012Validator(schema)
    assert not start.is_error(), start.get_error()
    for value in VALUES:
        ids, matcher = tokenizer.tokenize_str(json.dumps(value)), start.deep_copy()
        fits = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert fits == validator.is_valid(value), value


@pytest.mark.parametrize("schema", LEFT, ids=range(len(LEFT)))
def test_the_rest_is_left_to_be_refused(schema: Any) -> None:
    assert known_schema(schema) == schema
