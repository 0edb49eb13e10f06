"""Rules of which grammars of answers are made, in Lark's notation as llguidance reads it.

JSON is written as chat templates write it, with a blank after commas and colons: the next prompt
shows the calls of the last answer, and its blocks are hits where the text is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property

from prefixcache.text.chat.tools import Tool
from prefixcache.text.grammar.json_schema import known_schema
from prefixcache.text.tokenization.tokenizer import Tokenizer

# Schemas made of others: closing one part of them may leave nothing that fits all.
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties")
SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}

# llguidance tells line and column, and shows the lines around on lines of their own.
_PLACE = re.compile(r"\bat (\d+)\(\d+\): ((?:.|\n)*?)(?=\n *\d+ \| |\Z)")
_SCHEMA_RULE = re.compile(r"args_(\d+)\w*: ")
_ENDS_REGEX = re.compile(r"\\.|/|\n", re.DOTALL)
_ESCAPES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}

FREE = "/(?s:.*)/"


def literal(text: str) -> str:
    """A terminal that is this text; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


class Markers:
    """The markers of calls and of reasoning, in one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._added = tokenizer.added_token_ids
        self._special = tokenizer.special_token_ids

    def terminal(self, marker: str) -> str:
        """By the tokens of its own that it has: models know it by those alone."""
        return " ".join(filter(None, map(self._piece, self._pieces(marker))))

    def is_special(self, marker: str) -> bool:
        """Whether a part of it is a token that stands for no text."""
        return any(self._added.get(piece) in self._special for piece in self._pieces(marker))

    def _pieces(self, marker: str) -> list[str]:
        return self._tokens.split(marker) if self._added else [marker]

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self._added), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _piece(self, text: str) -> str:
        token_id = self._added.get(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def head(self, name: str, marker: str, unlike: str = "") -> str:
        """Rules: `name` is free text up to and with the marker, not like the expression `unlike`.

        The first marker ends it, whatever tokens spell it.
        """
        free = f"{name.upper()}: {FREE}{unlike}"
        if self.is_special(marker):
            return f"{name}: {name.upper()} {self.terminal(marker)}\n{free}"
        ending = f"{name.upper()}: /(?s:.*){escaped(re.escape(marker))}/{unlike}"
        return f"{name}[lazy]: {name.upper()}\n{ending}"


def call_rules(tools: Sequence[Tool], begin: Callable[[str], str], end: str = "") -> str:
    """The rule `call`: one of the tools, its arguments between what `begin` makes of its name and
    `end`. Each schema is a document of its own, so that its references find what they name.
    """
    calls = (f"{begin(tool.name)} args_{tool.index} {end}" for tool in tools)
    schemas = (f"args_{tool.index}: %json {_schema(tool)}" for tool in tools)
    return "\n".join((f"call: {' | '.join(calls)}", *schemas))


def _schema(tool: Tool) -> str:
    schema = dict(tool.parameters)
    schema.setdefault("type", "object")
    if "properties" in schema and not any(key in schema for key in _COMPOSED):
        schema.setdefault("additionalProperties", False)
    lenient = not tool.strict
    schema["x-guidance"] = {**SPACING, "lenient": lenient, "coerce_one_of": lenient}
    return json.dumps(known_schema(schema), ensure_ascii=False)


def schema_problem(grammar: str, error: str) -> tuple[str, str] | None:
    """Which field of the request an error of llguidance is about, and what it says of its schema.

    None where it is about another part of the grammar.
    """
    place = _PLACE.search(error)
    lines = grammar.splitlines()
    if place is None or int(place[1]) > len(lines):
        return None
    rule = _SCHEMA_RULE.match(lines[int(place[1]) - 1])
    return None if rule is None else (f"tools[{rule[1]}].function.parameters", place[2])


def escaped(regex: str) -> str:
    """Without what would end the expression in Lark: a slash, a line break."""
    return _ENDS_REGEX.sub(lambda escape: _ESCAPES.get(escape.group(), escape.group()), regex)
