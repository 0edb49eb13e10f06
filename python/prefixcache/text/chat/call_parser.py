"""Calls of tools in the text of an answer, read as they come.

One parser reads all the formats that hold calls as JSON: they differ by the markers around.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from prefixcache.text.chat.message import MessageDelta, ToolCallDelta
from prefixcache.text.chat.text_stream import Reading, TextStream

_ARGUMENTS = ("arguments", "parameters")
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How calls stand in text: after `opening` one JSON object or a list of them, then `closing`.

    With `bare` the text may also begin with an object that calls a known tool, and `;` and another
    object may follow. With `named` a call may be written as its name and its arguments.
    """

    opening: str
    closing: str = ""
    bare: bool = False
    named: bool = False


class CallParser:
    """Content and calls. What only looks like a call until its name is known is content.

    `known` are the names of tools. With `most` no more calls than that are passed on.
    """

    in_reasoning = False

    def __init__(
        self,
        syntax: CallSyntax,
        known: Collection[str],
        new_id: Callable[[], str],
        most: int | None = None,
    ) -> None:
        self._syntax = syntax
        self._known = known
        self._new_id = new_id
        self._most = most
        self._stream = TextStream()
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._num_calls = 0
        self._reading = self._read()

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """What is certain after this text."""
        self._stream.push(text, finished=finished)
        next(self._reading, None)
        delta = MessageDelta("".join(self._content), tool_calls=tuple(_joined(self._deltas)))
        self._content.clear()
        self._deltas.clear()
        return delta

    def _read(self) -> Reading[None]:
        if self._syntax.bare:
            self._stream.mark()
            begins = (yield from self._stream.skip_space()) == "{"
            self._stream.rewind()
            if begins:
                yield from self._read_section()
        while (yield from self._stream.until(self._syntax.opening, self._say)):
            self._stream.mark()
            yield from self._stream.skip(self._syntax.opening)
            yield from self._read_section()

    def _read_section(self) -> Reading[None]:
        """The calls after an opening; anything else is content, as it is written."""
        stream = self._stream
        stream.mark()
        before, first = self._num_calls, (yield from stream.skip_space())
        if first == "[" and not self._syntax.bare:
            yield from self._read_list()
        elif first == "{":
            yield from self._read_objects()
        elif self._syntax.named:
            yield from self._read_named()
        self._content.append(stream.unmark())
        if self._syntax.closing and self._num_calls > before:
            yield from stream.skip(self._syntax.closing)

    def _read_list(self) -> Reading[None]:
        self._stream.take(1)
        while (following := (yield from self._stream.skip_space())) in ("{", ",", "]"):
            if following == "{":
                if not (yield from self._read_object()):
                    return
                continue
            self._stream.take(1)
            if following == "]":
                return

    def _read_objects(self) -> Reading[None]:
        while (yield from self._read_object()) and self._syntax.bare:
            if not (yield from self._stream.skip(";")):
                return
            if (yield from self._stream.skip_space()) != "{":
                return

    def _read_object(self) -> Reading[bool]:
        """One object with a name and arguments; False where it is none."""
        stream, call = self._stream, _Call()
        stream.mark()
        stream.take(1)
        while (following := (yield from stream.skip_space())) in ('"', ","):
            if following == ",":
                stream.take(1)
            elif not (yield from self._read_field(call)):
                return False
        if following != "}" or not call.is_named:
            return False
        stream.take(1)
        if not call.has_arguments:
            self._add(call, "{}")
        return True

    def _read_field(self, call: _Call) -> Reading[bool]:
        key = yield from self._whole_value()
        if (yield from self._stream.skip_space()) != ":":
            return False
        self._stream.take(1)
        first = yield from self._stream.skip_space()
        if key in _ARGUMENTS:
            return (yield from self._read_arguments(call, first))
        value = yield from self._whole_value()
        if key == "name" and not call.is_named:
            if not isinstance(value, str) or not value:
                return False
            # Only a marker says that what names an unknown tool is a call.
            if self._syntax.bare and value not in self._known:
                return False
            self._begin(call, value)
        return value is not _CUT

    def _read_arguments(self, call: _Call, first: str) -> Reading[bool]:
        """An object is passed on as it is written; text that holds one, when it is whole."""
        call.has_arguments = True
        if call.is_named and first == "{":
            return (yield from self._stream.value(lambda text: self._add(call, text)))
        pieces: list[str] = []
        whole = yield from self._stream.value(pieces.append)
        self._add(call, _object_text("".join(pieces)) if whole else "".join(pieces))
        return whole

    def _read_named(self) -> Reading[None]:
        """A name and its arguments, as `name[ARGS]{...}`."""
        head: list[str] = []
        if not (yield from self._stream.until("{", head.append)):
            return
        named = _NAMED.fullmatch("".join(head))
        if named is not None:
            call = _Call()
            self._begin(call, named.group(1))
            yield from self._stream.skip_space()
            yield from self._stream.value(lambda text: self._add(call, text))

    def _whole_value(self) -> Reading[Any]:
        """A value that is short; `_CUT` where it is cut off or no JSON."""
        pieces: list[str] = []
        if not (yield from self._stream.value(pieces.append)):
            return _CUT
        try:
            return json.loads("".join(pieces))
        except (ValueError, RecursionError):
            return _CUT

    def _say(self, text: str) -> None:
        if text and not (self._num_calls and text.isspace()):
            self._content.append(text)

    def _begin(self, call: _Call, name: str) -> None:
        call.is_named, call.index = True, self._num_calls
        self._num_calls += 1
        self._stream.unmark()
        if self._is_passed_on(call):
            early, call.early = call.early, ""
            self._deltas.append(ToolCallDelta(call.index, self._new_id(), name, early))

    def _add(self, call: _Call, arguments: str) -> None:
        if not call.is_named:
            call.early += arguments
        elif self._is_passed_on(call):
            self._deltas.append(ToolCallDelta(call.index, arguments=arguments))

    def _is_passed_on(self, call: _Call) -> bool:
        return self._most is None or call.index < self._most


class _Call:
    """A call while it is read. `early` are arguments that came before the name."""

    def __init__(self) -> None:
        self.index = 0
        self.is_named = False
        self.has_arguments = False
        self.early = ""


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


def _joined(deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Neighbours of one call as one."""
    joined: list[ToolCallDelta] = []
    for one in deltas:
        last = joined[-1] if joined else None
        if last is not None and last.index == one.index:
            text = last.arguments + one.arguments
            joined[-1] = ToolCallDelta(last.index, last.id, last.name, text)
        else:
            joined.append(one)
    return joined
