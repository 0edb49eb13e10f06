"""What the schemas of a request's tools say of arguments that are not written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefixcache.config.checked import is_list, is_mapping
from prefixcache.text.chat.tools import Tool

Schema = Mapping[str, Any]

# More references that lead to each other are a circle.
_MOST_REFERENCES = 32
_KINDS: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


class ToolSchemas:
    """The tools of a request by their names."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._roots = {tool.name: tool.parameters for tool in tools}

    def __contains__(self, name: object) -> bool:
        return name in self._roots

    def names(self, tool: str) -> list[str]:
        """The parameters of a tool in their order; none for an unknown tool."""
        return [*properties_of(self._roots.get(tool, {}))]

    def kinds(self, tool: str, parameter: str) -> frozenset[str]:
        """The types that a parameter may have; none where nothing is known."""
        root = self._roots.get(tool, {})
        return kinds_of(properties_of(root).get(parameter, {}), root)


def properties_of(root: Schema) -> Mapping[str, Schema]:
    """The properties of an object's schema that are objects themselves."""
    properties: object = resolved(root, root).get("properties")
    listed = properties.items() if is_mapping(properties) else ()
    return {name: value for name, value in listed if is_mapping(value)}


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema that a reference within `root` names, or an empty one where that is not found."""
    for _ in range(_MOST_REFERENCES):
        reference: object = schema.get("$ref")
        if reference is None:
            return schema
        if not isinstance(reference, str) or not reference.startswith("#"):
            return {}
        schema = _at(root, reference[1:].split("/")[1:])
    return {}


def _at(root: Schema, path: Sequence[str]) -> Schema:
    node: Any = root
    for key in path:
        key = key.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if is_mapping(node) else None
    return node if is_mapping(node) else {}


def kinds_of(schema: Schema, root: Schema, depth: int = 0) -> frozenset[str]:
    """The JSON types of values that fit; none where any may."""
    if depth > _MOST_REFERENCES:
        return frozenset()
    schema = resolved(schema, root)
    named: object = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if is_list(named):
        return frozenset(kind for kind in named if isinstance(kind, str))
    for name in ("anyOf", "oneOf"):
        parts: object = schema.get(name)
        if is_list(parts):
            return _together(parts, root, depth + 1)
    values: object = [schema["const"]] if "const" in schema else schema.get("enum")
    if is_list(values):
        return frozenset(kind_of(value) for value in values)
    return frozenset()


def _together(parts: Sequence[Any], root: Schema, depth: int) -> frozenset[str]:
    kinds = [kinds_of(part, root, depth) for part in parts if is_mapping(part)]
    return frozenset[str]().union(*kinds) if all(kinds) else frozenset()


def kind_of(value: object) -> str:
    """The JSON type of a value."""
    return _KINDS[type(value)]
