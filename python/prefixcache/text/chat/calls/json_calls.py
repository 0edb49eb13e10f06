"""Calls whose name and arguments are JSON: the formats differ by what stands around."""

from __future__ import annotations

import json
import re
from typing import Any

from prefixcache.text.chat.calls.call_parser import Call, CallParser
from prefixcache.text.chat.text_stream import Reading

_ARGUMENTS = ("arguments", "parameters")
# Templates refuse ids of other lengths.
_CALL_ID = r"(?:\[CALL_ID\]\s*(?:(?P<id>[A-Za-z0-9]{9})|\w+)\s*)?"
_NAME = "(?P<name>[A-Za-z0-9_.-]{1,128})"


class JsonCallParser(CallParser):
    """After the opening comes one object or a list of them.

    With `bare` the text may also begin with an object that calls a known tool, and `;` and another
    object may follow.
    """

    def _read(self) -> Reading[None]:
        if self._bare:
            self._stream.mark()
            begins = (yield from self._stream.skip_space()) == "{"
            self._stream.rewind()
            if begins:
                yield from self._read_section()
        yield from super()._read()

    def _read_calls(self) -> Reading[None]:
        first = yield from self._stream.skip_space()
        if first == "[" and not self._bare:
            self._stream.take(1)
            yield from self._read_list()
        elif first == "{":
            yield from self._read_objects()

    def _read_list(self) -> Reading[None]:
        """What follows the bracket that opens a list."""
        while (following := (yield from self._stream.skip_space())) in ("{", ",", "]"):
            if following == "{":
                if not (yield from self._read_object()):
                    return
                continue
            self._stream.take(1)
            if following == "]":
                return

    def _read_objects(self) -> Reading[None]:
        while (yield from self._read_object()) and self._bare:
            if not (yield from self._stream.skip(";")):
                return
            if (yield from self._stream.skip_space()) != "{":
                return

    def _read_object(self) -> Reading[bool]:
        """One object with a name and arguments; False where it is none."""
        stream, call = self._stream, Call()
        stream.mark()
        stream.take(1)
        while (following := (yield from stream.skip_space())) in ('"', ","):
            if following == ",":
                stream.take(1)
            elif not (yield from self._read_field(call)):
                return False
        if following != "}" or call.name is None:
            return False
        stream.take(1)
        if not call.has_arguments:
            self._add(call, "{}")
        return True

    def _read_field(self, call: Call) -> Reading[bool]:
        key = yield from self._whole_value()
        if (yield from self._stream.skip_space()) != ":":
            return False
        self._stream.take(1)
        first = yield from self._stream.skip_space()
        if key in _ARGUMENTS:
            return (yield from self._read_arguments(call, first))
        value = yield from self._whole_value()
        if key == "name" and call.name is None:
            if not isinstance(value, str) or not value:
                return False
            # Only a marker says that what names an unknown tool is a call.
            if self._bare and value not in self._tools:
                return False
            self._begin(call, value)
        return value is not _CUT

    def _read_arguments(self, call: Call, first: str) -> Reading[bool]:
        """An object is passed on as it is written; text that holds one, when it is whole."""
        call.has_arguments = True
        if call.name is not None and first == "{":
            return (yield from self._stream.value(lambda text: self._add(call, text)))
        pieces: list[str] = []
        is_complete = yield from self._stream.value(pieces.append)
        self._add(call, _object_text("".join(pieces)) if is_complete else "".join(pieces))
        return is_complete

    def _whole_value(self) -> Reading[Any]:
        """A value that is short; `_CUT` where it is cut off or no JSON."""
        pieces: list[str] = []
        if not (yield from self._stream.value(pieces.append)):
            return _CUT
        try:
            return json.loads("".join(pieces))
        except (ValueError, RecursionError):
            return _CUT


class NamedCallParser(JsonCallParser):
    """A call may also be written as its name and its arguments, as `name[ARGS]{...}`."""

    # What stands before the arguments: the call's name, and an id where there is one.
    head = re.compile(rf"\s*{_NAME}\s*{_CALL_ID}(?:\[ARGS\]\s*)?")

    def _read_calls(self) -> Reading[None]:
        if (yield from self._stream.skip_space()) in ("[", "{"):
            yield from super()._read_calls()
        else:
            yield from self._read_named()

    def _read_named(self) -> Reading[bool]:
        """Whether a whole call comes next."""
        read: list[str] = []
        if not (yield from self._stream.until("{", read.append)):
            return False
        match = self.head.fullmatch("".join(read))
        if match is None:
            return False
        call = Call(match.groupdict().get("id"))
        self._begin(call, match["name"])
        yield from self._stream.skip_space()
        return (yield from self._stream.value(lambda text: self._add(call, text)))


class DeepseekCallParser(NamedCallParser):
    """Each call between markers of its own: the word function, its name and its arguments.

    The word, and what shows the arguments as a code block, may be missing.
    """

    head = re.compile(
        rf"\s*(?:function<｜tool▁sep｜>)?{_NAME}\s*(?:<｜tool▁sep｜>)?\s*(?:```json\s*)?"
    )

    def _read_calls(self) -> Reading[None]:
        stream = self._stream
        while (yield from stream.skip("<｜tool▁call▁begin｜>")):
            if not (yield from self._read_named()):
                return
            yield from stream.skip("```")
            yield from stream.skip("<｜tool▁call▁end｜>")
            stream.mark()


_CUT = object()


def _object_text(text: str) -> str:
    """The arguments that some models write as a string which holds the object, or as null."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if value is None:
        return "{}"
    return value if isinstance(value, str) else text
