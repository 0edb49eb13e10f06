"""JSON schemas in the words that llguidance knows.

What it refuses is written otherwise where the very same values fit: lists of different items from a
short enumeration, exclusions of types and of enumerated texts, and what is not evaluated where no
other schema evaluates anything. The rest stays, and is refused with its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, cast

from prefixcache.config.checked import is_list

Schema = dict[str, Any]

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_SINGLE = (
    *("additionalProperties", "additionalItems", "contains", "propertyNames", "not"),
    *("items", *_UNEVALUATED),
)
# What may evaluate properties and items in addition to the schema's own words.
_EVALUATING = (
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"),
    "contains",
)
# Six different items in any order make 1,957 lists.
_MOST_DIFFERENT = 5


def known_schema(schema: Mapping[str, Any]) -> Schema:
    """The schema, and all that stand in it, written otherwise where that is needed."""
    supported = {name: _inner(name, value) for name, value in schema.items()}
    return _without_not(_without_unique_items(_without_unevaluated(supported)))


def _without_unevaluated(schema: Schema) -> Schema:
    left = {name: value for name, value in schema.items() if name not in _UNEVALUATED}
    if any(name in schema for name in _EVALUATING) or isinstance(schema.get("items"), list):
        return schema
    unevaluated = schema.keys() & _UNEVALUATED
    return {**{_UNEVALUATED[name]: schema[name] for name in unevaluated}, **left}


def _inner(name: str, value: Any) -> Any:
    if name in _NAMED and isinstance(value, dict):
        return {key: _known(inner) for key, inner in cast("Schema", value).items()}
    if name in _LISTED and isinstance(value, list):
        return [_known(item) for item in cast("list[Any]", value)]
    return _known(value) if name in _SINGLE else value


def _known(value: Any) -> Any:
    return known_schema(cast("Schema", value)) if isinstance(value, dict) else value


def _without_unique_items(schema: Schema) -> Schema:
    unique = schema.get("uniqueItems")
    rest = {name: value for name, value in schema.items() if name != "uniqueItems"}
    if unique is False or (unique is True and _most(schema) <= 1):
        return rest
    choices = _texts(schema.get("items")) if unique is True else None
    if choices is None or schema.get("type") != "array" or "prefixItems" in schema:
        return schema
    least, most = schema.get("minItems", 0), min(_most(schema), len(choices))
    if len(choices) > _MOST_DIFFERENT or not isinstance(least, int):
        return schema
    lengths = range(least, most + 1)
    lists = [[*arrangement] for n in lengths for arrangement in itertools.permutations(choices, n)]
    others = {"type", "items", "minItems", "maxItems"}
    return {**{name: rest[name] for name in rest.keys() - others}, "enum": lists}


def _most(schema: Schema) -> int:
    most = schema.get("maxItems")
    return most if isinstance(most, int) else _MOST_DIFFERENT


def _texts(schema: object) -> list[str] | None:
    """The different texts that a schema allows, where it is an enumeration of such alone."""
    if not isinstance(schema, dict) or schema.keys() - {"type", "enum", "const", "title"}:
        return None
    given = cast("Schema", schema)
    if given.get("type", "string") != "string":
        return None
    values = given.get("enum", [given["const"]] if "const" in given else None)
    if not _all_texts(values) or ("const" in given and "enum" in given):
        return None
    return [*dict.fromkeys(cast("list[str]", values))]


def _without_not(schema: Schema) -> Schema:
    if "not" not in schema:
        return schema
    excluded: object = schema["not"]
    rest = {name: value for name, value in schema.items() if name != "not"}
    if excluded is False:
        return rest
    if not isinstance(excluded, dict) or len(cast("Schema", excluded)) != 1:
        return schema
    ((kind, value),) = cast("Schema", excluded).items()
    if kind == "type":
        return _of_other_type(schema, rest, [value] if isinstance(value, str) else value)
    if kind in ("const", "enum"):
        return _of_other_text(schema, rest, [value] if kind == "const" else value)
    return schema


def _of_other_type(schema: Schema, rest: Schema, excluded: object) -> Schema:
    types: object = rest.get("type", [*_TYPES])
    types = [types] if isinstance(types, str) else types
    if not _all_texts(types) or not _all_texts(excluded):
        return schema
    allowed, gone = cast("list[str]", types), cast("list[str]", excluded)
    if "integer" in gone and "number" in allowed and "number" not in gone:
        return schema  # numbers that are no integers
    gone = [*gone, "integer"] if "number" in gone else gone
    left = [choice for choice in allowed if choice not in gone]
    return {**rest, "type": left} if left else schema


def _of_other_text(schema: Schema, rest: Schema, excluded: object) -> Schema:
    values = rest.get("enum")
    if not _all_texts(values) or not _all_texts(excluded):
        return schema
    gone = set(cast("list[str]", excluded))
    left = [choice for choice in cast("list[str]", values) if choice not in gone]
    return {**rest, "enum": left} if left else schema


def _all_texts(values: object) -> bool:
    return is_list(values) and bool(values) and all(isinstance(entry, str) for entry in values)
