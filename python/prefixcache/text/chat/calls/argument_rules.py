"""Grammars of arguments that are not written as JSON: from a tool's schema to rules of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from prefixcache.config.checked import is_mapping, shown
from prefixcache.exceptions import wrong
from prefixcache.text.chat.calls.schemas import Schema, kinds_of, resolved
from prefixcache.text.chat.grammars import SPACING, Markers, escaped, literal
from prefixcache.text.chat.tools import Tool
from prefixcache.text.grammar.json_schema import known_schema

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
# Of a text: what its grammar does not keep.
_UNKEPT_OF_TEXT = ("pattern", "format")
# Schemas of which no more is kept than that there is a value.
_COMPOSED = ("allOf", "if", "not", "patternProperties", "dependentSchemas")
_MOST_NESTED = 8
_MOST_VALUES = 4096  # of one tool: schemas may refer to themselves in many places


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentStyle:
    """How calls and their arguments are written.

    `opening` and `key` hold a name in place of `{}`. With `nested` lists and objects are written in
    the same style, else as JSON. With `in_order` names stand in the order of the alphabet. A text
    stands between `quote` and `end_quote`; with `escapes` in either of two kinds of quotes. Without
    a `quote` every value ends at `end_quote`. `words` are true, false and null in each spelling,
    the template's first.
    """

    opening: str
    closing: str
    key: str
    separator: str = ""
    after: str = ""
    quote: str = ""
    end_quote: str = ""
    escapes: bool = False
    words: tuple[Mapping[str, str], ...]
    nested: bool = False
    in_order: bool = False

    @property
    def equals(self) -> str:
        """What stands between a name and its value."""
        return self.key.removeprefix("{}")

    @property
    def quotes(self) -> tuple[str, ...]:
        """What a text may stand between."""
        return ("'", '"') if self.escapes else (self.quote,)

    def text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as it is written."""
        keys = sorted(arguments, key=str.lower) if self.in_order else arguments
        members = (self._member(self.key.format(key), arguments[key]) for key in keys)
        return f"{self.opening.format(name)}{self.separator.join(members)}{self.closing}"

    def _member(self, key: str, value: Any) -> str:
        end = "" if self.quote else self.end_quote
        return f"{key}{self.value_text(value)}{end}{self.after}"

    def value_text(self, value: Any) -> str:
        """A value as it is written."""
        if isinstance(value, bool) or value is None:
            return self.words[0][json.dumps(value)]
        if isinstance(value, str):
            inner = json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', '"')
            escaped_inner = inner.replace("'", "\\'")
            return f"'{escaped_inner}'" if self.escapes else f"{self.quote}{value}{self._end}"
        if self.nested and isinstance(value, list):
            return f"[{self.separator.join(map(self.value_text, cast('list[Any]', value)))}]"
        if self.nested and isinstance(value, dict):
            members = sorted(
                cast("dict[str, Any]", value).items(), key=lambda member: member[0].lower()
            )
            written = (f"{self.key.format(key)}{self.value_text(value)}" for key, value in members)
            return f"{{{self.separator.join(written)}}}"
        return json.dumps(value, ensure_ascii=False)

    @property
    def _end(self) -> str:
        return self.end_quote if self.quote else ""

    def rules(self, tools: Sequence[Tool], markers: Markers) -> str:
        """The rule `call`: one of the tools with its arguments.

        Raises `InvalidRequestError` where a tool is strict and its schema cannot be kept.
        """
        calls: list[str] = []
        rules: list[str] = []
        for tool in tools:
            writer = _Writer(self, tool, markers)
            opening = markers.terminal(self.opening.format(tool.name))
            calls.append(f"{opening} args_{tool.index} {markers.terminal(self.closing)}")
            writer.write_arguments()
            rules += writer.rules
        return "\n".join((f"call: {' | '.join(calls)}", *rules))


_WORDS_OF = {"boolean": ("true", "false"), "null": ("null",)}
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
LFM2_STYLE = ArgumentStyle(
    opening="{}(",
    closing=")",
    key="{}=",
    separator=", ",
    quote="'",
    end_quote="'",
    escapes=True,
    words=(_PYTHON_WORDS,),
)
OLMO3_STYLE = replace(LFM2_STYLE, words=(_JSON_WORDS,))
GEMMA_STYLE = ArgumentStyle(
    opening="call:{}{{",
    closing="}",
    key="{}:",
    separator=",",
    quote='<|"|>',
    end_quote='<|"|>',
    words=(_JSON_WORDS,),
    nested=True,
    in_order=True,
)
QWEN_STYLE = ArgumentStyle(
    opening="<function={}>\n",
    closing="</function>",
    key="<parameter={}>\n",
    end_quote="\n</parameter>",
    after="\n",
    words=(_PYTHON_WORDS, _JSON_WORDS),
)
SEED_STYLE = replace(QWEN_STYLE, key="<parameter={}>", end_quote="</parameter>")


class _Writer:
    """The rules of one tool's arguments."""

    def __init__(self, style: ArgumentStyle, tool: Tool, markers: Markers) -> None:
        self.rules: list[str] = []
        self._style = style
        self._tool = tool
        self._markers = markers
        self._name = f"args_{tool.index}"
        self._field = f"tools[{tool.index}].function.parameters"
        self._has_any = False
        self._num_values = 0

    def write_arguments(self) -> None:
        root = self._tool.parameters
        if self._is_kept(root):
            self._object(root, self._name, self._style.after)
        else:
            self._give_up("a schema of its kind")
            self.rules.append(f"{self._name}: {self._free_members(self._style.after)}")

    def _give_up(self, what: str) -> None:
        """Notes that something is not kept, which a strict tool refuses."""
        if self._tool.strict:
            raise wrong(self._field, f"has {what}, which this model's calls cannot be made to keep")

    def _is_kept(self, schema: Schema) -> bool:
        schema = resolved(schema, self._tool.parameters)
        return "properties" in schema and not any(name in schema for name in _COMPOSED)

    def _object(self, schema: Schema, name: str, after: str, depth: int = 0) -> None:
        """The rule `name`: members in a fixed order, those that are not required left out or not.

        `name` and a number is what may follow the first members, with `s` where one was written.
        """
        schema = resolved(schema, self._tool.parameters)
        listed: Any = schema.get("required")
        required = cast("list[Any]", listed) if isinstance(listed, list) else []
        members = [*self._properties(schema).items()]
        if self._style.in_order:
            members.sort(key=lambda member: member[0].lower())
        for place, (key, value) in enumerate(members):
            written = self._value(value, f"{name}_{place}", depth)
            member = f"{self._key(key)} {written} {self._markers.terminal(after)}"
            self._place(name, place, member, optional=key not in required)
        more, more_behind = '""', '""'
        if schema.get("additionalProperties") not in (None, False):
            more = self._free_members(after)
            more_behind = f"({literal(self._style.separator)} {self._free_member(after)})*"
        self.rules += [
            f"{name}_at_{len(members)}: {more}",
            f"{name}_at_{len(members)}s: {more_behind}",
            f"{name}: {name}_at_0",
        ]

    def _properties(self, schema: Schema) -> Mapping[str, Schema]:
        properties: Any = schema.get("properties")
        values = properties.items() if is_mapping(properties) else ()
        return {name: value if is_mapping(value) else {} for name, value in values}

    def _place(self, name: str, place: int, member: str, *, optional: bool) -> None:
        following = f"{name}_at_{place + 1}"
        for started in ("", "s"):
            separator = literal(self._style.separator) if started else ""
            without = f" | {following}{started}" if optional else ""
            self.rules.append(
                f"{name}_at_{place}{started}: {separator} {member} {following}s{without}"
            )

    def _key(self, key: str) -> str:
        return self._markers.terminal(self._style.key.format(key))

    def _free_members(self, after: str) -> str:
        """Any members of any values."""
        member, separator = self._free_member(after), literal(self._style.separator)
        return f"({member} ({separator} {member})*)?"

    def _free_member(self, after: str) -> str:
        before, _, behind = map(literal, self._style.key.partition("{}"))
        ends = self._markers.terminal(after)
        return f"{before} /[A-Za-z_][A-Za-z0-9_]*/ {behind} {self._any()} {ends}"

    def _value(self, schema: Schema, name: str, depth: int) -> str:
        """The terminals and rules that one value is made of."""
        schema = resolved(schema, self._tool.parameters)
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            depth = _MOST_NESTED
        if "const" in schema:
            return self._constant(schema["const"])
        values: Any = schema.get("enum")
        if isinstance(values, list) and values:
            return f"({' | '.join(map(self._constant, cast('list[Any]', values)))})"
        for union in ("anyOf", "oneOf"):
            parts: Any = schema.get(union)
            if isinstance(parts, list) and parts and depth < _MOST_NESTED:
                return self._union(cast("list[Any]", parts), name, depth)
        kinds: Any = schema.get("type")
        if isinstance(kinds, list) and kinds:
            parts = [{**schema, "type": kind} for kind in cast("list[Any]", kinds)]
            return self._union(parts, name, depth)
        if isinstance(kinds, str) and kinds not in _TYPES:
            raise wrong(self._field, f"has no known type: {shown(kinds)}")
        if (
            kinds not in _TYPES
            or depth >= _MOST_NESTED
            or any(keyword in schema for keyword in _COMPOSED)
        ):
            self._give_up("a value of no single type")
            return self._any()
        return self._of_kind(cast("str", kinds), schema, name, depth)

    def _union(self, parts: Sequence[Any], name: str, depth: int) -> str:
        schemas: list[Schema] = [part if is_mapping(part) else {} for part in parts]
        if not self._style.quote and any(
            "string" in _kinds(choice, self._tool) for choice in schemas
        ):
            return self._any()  # any value is a text
        written = [
            self._value(choice, f"{name}_{place}", depth + 1)
            for place, choice in enumerate(schemas)
        ]
        return f"({' | '.join(written)})"

    def _of_kind(self, kind: str, schema: Schema, name: str, depth: int) -> str:
        if kind in _WORDS_OF:
            words = (
                literal(kinds[word]) for word in _WORDS_OF[kind] for kinds in self._style.words
            )
            return self._ended(f"({' | '.join(words)})")
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number") or not self._style.nested:
            return self._ended(self._json(schema, name))
        if kind == "array":
            return self._array(schema, name, depth)
        if not self._is_kept(schema):
            return self._any()
        self._object(schema, name, "", depth + 1)
        return f'"{{" {name} "}}"'

    def _array(self, schema: Schema, name: str, depth: int) -> str:
        items: Any = schema.get("items")
        if isinstance(items, Mapping) and items:
            item = self._value(cast("Schema", items), f"{name}_item", depth + 1)
        else:
            item = self._any()
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = "*" if not isinstance(most, int) else f"{{0,{most - 1}}}"
        if isinstance(least, int) and least > 0:
            more = f"{{{least - 1},{'' if not isinstance(most, int) else most - 1}}}"
        separator = literal(self._style.separator)
        self.rules.append(f"{name}: {item} ({separator} {item}){more}")
        return f'"[" {name}{"" if least else "?"} "]"'

    def _json(self, schema: Schema, name: str) -> str:
        root = self._tool.parameters
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        lenient = not self._tool.strict
        guidance = {**SPACING, "lenient": lenient, "coerce_one_of": lenient}
        self_contained = known_schema({**shared, **schema, "x-guidance": guidance})
        self.rules.append(f"{name}: %json {json.dumps(self_contained, ensure_ascii=False)}")
        return name

    def _string(self, schema: Schema) -> str:
        style = self._style
        if any(keyword in schema for keyword in _UNKEPT_OF_TEXT):
            self._give_up("a pattern or a format")
        lengths = schema.get("minLength", 0), schema.get("maxLength", "")
        many = "*" if lengths == (0, "") else f"{{{lengths[0]},{lengths[1]}}}"
        if style.escapes:
            kinds = (rf"/{q}([^{q}\\\n]|\\[{q}\\nrt]){many}{q}/" for q in style.quotes)
            return f"({' | '.join(kinds)})"
        quote, end = map(self._markers.terminal, (style.quote, style.end_quote))
        text = f"text_{self._tool.index}_{len(self.rules)}"
        if self._markers.is_special(style.end_quote):
            self.rules += [f"{text}: {text.upper()} {end}", f"{text.upper()}: /(?s:.){many}/"]
        else:  # the first end is the end
            stop = escaped(re.escape(style.end_quote))
            self.rules.append(f"{text}[lazy]: /(?s:.){many}{stop}/")
        return f"{quote} {text}"

    def _ended(self, value: str) -> str:
        """A value that is no text."""
        style = self._style
        bare = style.end_quote and not style.quote
        return f"{value} {literal(style.end_quote)}" if bare else value

    def _constant(self, value: Any) -> str:
        return self._ended(self._text_of(value))

    def _text_of(self, value: Any) -> str:
        """One value as it is written."""
        style = self._style
        if not isinstance(value, str) or style.escapes:
            return literal(style.value_text(value))
        if not style.quote:
            return literal(value) or '""'
        quote, end = map(self._markers.terminal, (style.quote, style.end_quote))
        return f"{quote} {literal(value)} {end}"

    def _any(self) -> str:
        """Any value; the rule is written once."""
        name = f"{self._name}_any"
        if not self._has_any:
            self._has_any = True
            self.rules += self._any_rules(name)
        return name

    def _any_rules(self, name: str) -> Sequence[str]:
        style = self._style
        if not (style.quote or style.nested):
            return [f"{name}: {self._string({})}"]
        if not style.nested:
            text = self._string({})
            return [f"{name}: {text} | {name}_json", f"{name}_json: %json {{}}"]
        text, comma = self._string({}), literal(style.separator)
        member = f'/[^,:{{}}\\[\\]<]+/ ":" {name}'
        return [
            f'{name}: {text} | {name}_json | "[" {name}_list? "]" | "{{" {name}_members? "}}"',
            f'{name}_json: %json {{"type": ["number", "boolean", "null"]}}',
            f"{name}_list: {name} ({comma} {name})*",
            f"{name}_members: {member} ({comma} {member})*",
        ]


def _kinds(schema: Any, tool: Tool) -> frozenset[str]:
    return kinds_of(schema, tool.parameters) or frozenset(("string",))
