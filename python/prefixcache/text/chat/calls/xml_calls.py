"""Calls written with tags: `<function=name>`, then `<parameter=key>` and a value for each."""

from __future__ import annotations

import json
import re

from prefixcache.text.chat.calls.call_parser import Call
from prefixcache.text.chat.calls.json_calls import JsonCallParser
from prefixcache.text.chat.calls.notation_calls import json_of, json_word
from prefixcache.text.chat.calls.schemas import kind_of
from prefixcache.text.chat.text_stream import Reading

_TAG_END = re.compile("[>\n]")
_FUNCTION = "<function="
_PARAMETER = "<parameter="
_END = "</function>"
_VALUE_END = "</parameter>"
_TEXT = frozenset(("string",))


class XmlCallParser(JsonCallParser):
    """One function between two markers. An object in its place is read as JSON.

    A value is text: what it stands for depends on its parameter's schema. One line break on either
    side of it is no part of it.
    """

    def _read_calls(self) -> Reading[None]:
        yield from self._stream.skip_space()
        if (yield from self._stream.starts(_FUNCTION)):
            yield from self._read_function()
        else:
            yield from super()._read_calls()

    def _read_function(self) -> Reading[None]:
        name = yield from self._tag(_FUNCTION)
        if not name:
            return
        call = Call()
        self._begin(call, name)
        self._add(call, "{")
        many = False
        while (yield from self._starts_parameter()):
            key = yield from self._tag(_PARAMETER)
            self._add(call, f"{', ' if many else ''}{json.dumps(key, ensure_ascii=False)}: ")
            many = True
            if not (yield from self._read_value(call, self._tools.kinds(name, key))):
                return
        if (yield from self._stream.skip_space()):
            self._add(call, "}")
        yield from self._stream.skip(_END)

    def _starts_parameter(self) -> Reading[bool]:
        yield from self._stream.skip_space()
        return (yield from self._stream.starts(_PARAMETER))

    def _tag(self, opening: str) -> Reading[str]:
        """What a tag names, up to its end; empty where it has none."""
        self._stream.take(len(opening))
        pieces: list[str] = []
        if (yield from self._stream.before(_TAG_END, pieces.append)) != ">":
            return ""
        self._stream.take(1)
        return "".join(pieces).strip()

    def _read_value(self, call: Call, kinds: frozenset[str]) -> Reading[bool]:
        """A text is passed on as it comes, another value when it is whole."""
        if (yield from self._stream.starts("\n")):
            self._stream.take(1)
        if kinds == _TEXT:
            self._add(call, '"')
            is_complete = yield from self._stream.line_before(
                _VALUE_END, lambda text: self._add(call, _inner(text))
            )
            if is_complete:
                self._add(call, '"')
        else:
            pieces: list[str] = []
            is_complete = yield from self._stream.line_before(_VALUE_END, pieces.append)
            if is_complete:
                self._add(call, _json_value("".join(pieces), kinds))
        if is_complete:
            yield from self._stream.skip(_VALUE_END)
        return is_complete


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_value(text: str, kinds: frozenset[str]) -> str:
    """The value that a text stands for among these types; the text itself where it fits none."""
    stripped = text.strip()
    for candidate in (stripped, json_word(stripped), json_of(stripped)):
        try:
            kind = kind_of(json.loads(candidate or "", parse_constant=_refuse))
        except (ValueError, RecursionError):
            continue
        if kind != "string" and (not kinds or kinds & _LIKE.get(kind, {kind})):
            return candidate or ""
    return json.dumps(text, ensure_ascii=False)


_NUMBERS = frozenset(("integer", "number"))
_LIKE = {"integer": _NUMBERS, "number": _NUMBERS}


def _refuse(constant: str) -> None:
    raise ValueError(constant)
