"""Calls written as in a program: `name(key='value', ...)`, or Gemma's `call:name{key:value}`.

Their arguments become JSON while they are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from prefixcache.text.chat.calls.argument_rules import LFM2_STYLE, QWEN_STYLE, ArgumentStyle
from prefixcache.text.chat.calls.call_parser import Call
from prefixcache.text.chat.calls.json_calls import JsonCallParser
from prefixcache.text.chat.text_stream import Reading, Sink, TextStream

_NAME_END = re.compile(r"[^A-Za-z0-9_.-]")
_WORD_END = re.compile(r"[,\[\](){}]")
_KEY_END = re.compile(r"[,:=\[\](){}]")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {word: name for words in QWEN_STYLE.words for name, word in words.items()}
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_HEX = re.compile(r"[0-9A-Fa-f]+")
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_MOST_NESTED = 48


class NotationCallParser(JsonCallParser):
    """Calls one after another, in brackets or not. An object or a list of them is read as JSON."""

    def _read_calls(self) -> Reading[None]:
        stream = self._stream
        if (yield from stream.skip_space()) == "[":
            stream.take(1)
            yield from stream.skip_space()
        if (yield from stream.starts("{")):
            yield from self._read_list()
            return
        while (yield from self._read_call()):
            while (yield from stream.skip_space()) in (",", ";"):
                stream.take(1)
            if (yield from stream.starts("]")):
                stream.take(1)
                return

    def _read_call(self) -> Reading[bool]:
        """One call; False where what comes next is none, or is cut off."""
        stream, style = self._stream, self._style
        assert style is not None
        before_name, _, opening = style.opening.format("{}").partition("{}")
        stream.mark()
        pieces: list[str] = []
        if before_name and not (yield from stream.skip(before_name)):
            return False
        yield from stream.before(_NAME_END, pieces.append)
        name = "".join(pieces)
        if not name or not (yield from stream.skip(opening)):
            return False
        call = Call()
        self._begin(call, name)
        values = ValueReader(stream, style, lambda text: self._add(call, text))
        return (yield from values.read_arguments(self._tools.names(name)))


class ValueReader:
    """Reads values of a style and passes them on as JSON, texts as they come.

    What is no value of the style is a text. Methods return whether a value is whole.
    """

    def __init__(self, stream: TextStream, style: ArgumentStyle, sink: Sink) -> None:
        self._stream = stream
        self._style = style
        self._sink = sink

    def read_arguments(self, names: list[str]) -> Reading[bool]:
        """Arguments up to the bracket that closes them; `names` are for those without a key."""
        self._sink("{")
        unused = [*names]

        def key() -> Reading[bool]:
            name = yield from self._argument_name()
            name = name or (unused[0] if unused else None)
            if name is None:
                return False
            if name in unused:
                unused.remove(name)
            self._sink(f"{json.dumps(name, ensure_ascii=False)}: ")
            return True

        return (yield from self._items(self._style.closing, "}", key, 0))

    def _argument_name(self) -> Reading[str]:
        """The name and the sign behind it; empty, and nothing read, where a value stands alone."""
        pieces: list[str] = []
        end = yield from self._stream.before(_KEY_END, pieces.append)
        name = "".join(pieces).strip()
        if name and end == self._style.equals and not name.startswith(self._style.quotes):
            self._stream.take(1)
            return name
        self._stream.unread("".join(pieces))
        return ""

    def read(self, depth: int = 0) -> Reading[bool]:
        """One value."""
        first = yield from self._stream.skip_space()
        if not first or depth > _MOST_NESTED:
            return False
        for quote in self._style.quotes:
            if (yield from self._stream.starts(quote)):
                return (yield from self._text(quote))
        if first in ("[", "("):
            self._sink("[")
            self._stream.take(1)
            return (yield from self._items("]" if first == "[" else ")", "]", None, depth))
        if first == "{":
            self._sink("{")
            self._stream.take(1)
            return (yield from self._items("}", "}", self._key, depth))
        return (yield from self._word())

    def _items(
        self, closing: str, written: str, key: Callable[[], Reading[bool]] | None, depth: int
    ) -> Reading[bool]:
        """Values, with a key each where `key` reads one, up to `closing`."""
        stream, many = self._stream, False
        while (following := (yield from stream.skip_space())) != closing:
            if following == "":
                return False
            if following == ",":
                stream.take(1)
                continue
            if many:
                self._sink(", ")
            many = True
            if key is not None and not (yield from key()):
                return False
            if not (yield from self.read(depth + 1)):
                return False
            if (yield from stream.skip_space()) not in (",", closing):
                return False
        stream.take(1)
        self._sink(written)
        return True

    def _key(self) -> Reading[bool]:
        """A member's name, quoted or not, and the colon."""
        yield from self._stream.skip_space()
        for quote in self._style.quotes:
            if (yield from self._stream.starts(quote)):
                if not (yield from self._text(quote)):
                    return False
                break
        else:
            pieces: list[str] = []
            yield from self._stream.before(_KEY_END, pieces.append)
            self._sink(json.dumps("".join(pieces).strip(), ensure_ascii=False))
        if not (yield from self._stream.skip(":")):
            return False
        self._sink(": ")
        return True

    def _word(self) -> Reading[bool]:
        """A number, a word that stands for a value, or a text without quotes."""
        pieces: list[str] = []
        end = yield from self._stream.before(_WORD_END, pieces.append)
        word = "".join(pieces).strip()
        if end or _NUMBER.fullmatch(word):
            self._sink(json_word(word))
        return end != ""

    def _text(self, quote: str) -> Reading[bool]:
        stream = self._stream
        stream.take(len(quote))
        self._sink('"')
        pattern = re.compile(f"[{re.escape(quote[0])}\\\\]" if self._style.escapes else quote[0])
        while (yield from stream.before(pattern, self._say)):
            if (yield from stream.starts("\\")):
                yield from self._escape()
            elif (yield from self._ends(quote)):
                stream.take(len(quote))
                self._sink('"')
                return True
            else:
                self._say(stream.take(1))
        return False

    def _ends(self, quote: str) -> Reading[bool]:
        """Whether a quote closes its text: templates write quotes within texts without escapes."""
        if not self._style.escapes:
            return (yield from self._stream.starts(quote))
        return (yield from self._stream.following(1)) in (",", ")", "]", "}", ":", "")

    def _escape(self) -> Reading[None]:
        """A backslash and what it stands for with the characters behind it."""
        stream = self._stream
        stream.take(1)
        following = yield from stream.ahead(1)
        if following in _SIMPLE:
            self._say(_SIMPLE[stream.take(1)])
        elif following in _HEX_LENGTHS:
            yield from self._escaped_character(_HEX_LENGTHS[following])
        elif following in ("'", '"', "\\"):
            self._say(stream.take(1))
        else:
            self._say("\\")

    def _escaped_character(self, length: int) -> Reading[None]:
        text = yield from self._stream.ahead(1 + length)
        digits = text[1:]
        if len(digits) == length and _HEX.fullmatch(digits) and int(digits, 16) < 0x110000:
            self._stream.take(len(text))
            self._sink(json.dumps(chr(int(digits, 16)))[1:-1])  # half of a pair stays an escape
        else:
            self._say("\\")

    def _say(self, text: str) -> None:
        self._sink(json.dumps(text, ensure_ascii=False)[1:-1])


def json_word(word: str) -> str:
    """A word without quotes as JSON: a number, true, false or null, or else a text."""
    if _NUMBER.fullmatch(word):
        return word
    return _WORDS.get(word) or json.dumps(word, ensure_ascii=False)


def json_of(text: str) -> str | None:
    """The JSON of a Python literal; None where `text` is none as a whole."""
    stream, pieces = TextStream(), list[str]()
    stream.push(text, finished=True)
    reading = ValueReader(stream, LFM2_STYLE, pieces.append).read()
    try:
        next(reading)
    except StopIteration as ended:
        rest = stream.rest()
        return "".join(pieces) if ended.value and not rest.strip() else None
    return None
