"""Content and calls of an answer, read as they come; each format reads its own calls."""

from __future__ import annotations

from collections.abc import Callable

from prefixcache.text.chat.calls.argument_rules import ArgumentStyle
from prefixcache.text.chat.calls.schemas import ToolSchemas
from prefixcache.text.chat.message import MessageDelta, ToolCallDelta
from prefixcache.text.chat.text_stream import Reading, TextStream


class CallParser:
    """What only looks like a call until its name is known is content.

    Calls stand between `opening` and `closing`; without that they end by themselves. With `most` no
    more calls than that are passed on. `bare` and `style` are as in `ToolFormat`.
    """

    in_reasoning = False
    in_markup = False

    def __init__(
        self,
        tools: ToolSchemas,
        new_id: Callable[[], str],
        *,
        opening: str,
        closing: str = "",
        most: int | None = None,
        bare: bool = False,
        style: ArgumentStyle | None = None,
    ) -> None:
        self._tools = tools
        self._new_id = new_id
        self._opening = opening
        self._closing = closing
        self._most = most
        self._bare = bare
        self._style = style
        self._stream = TextStream()
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._num_calls = 0
        self._ids: set[str] = set()
        self._reading = self._read()

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """What is certain after this text."""
        self._stream.push(text, finished=finished)
        next(self._reading, None)
        delta = MessageDelta("".join(self._content), tool_calls=tuple(joined(self._deltas)))
        self._content.clear()
        self._deltas.clear()
        return delta

    def _read(self) -> Reading[None]:
        while (yield from self._stream.until(self._opening, self._say)):
            self._stream.mark()
            yield from self._stream.skip(self._opening)
            yield from self._read_section()

    def _read_section(self) -> Reading[None]:
        """The calls after an opening; anything else is content, as it is written."""
        self._stream.mark()
        before = self._num_calls
        yield from self._read_calls()
        self._content.append(self._stream.unmark())
        if self._closing and self._num_calls > before:
            yield from self._stream.skip(self._closing)

    def _read_calls(self) -> Reading[None]:
        """The calls that come next, in the format's own notation."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        if text and not (self._num_calls and text.isspace()):
            self._content.append(text)

    def _begin(self, call: Call, name: str) -> None:
        """The name is known: from here on what is read belongs to the call."""
        call.name, call.index = name, self._num_calls
        self._num_calls += 1
        self._stream.unmark()
        if self._is_passed_on(call):
            early, call.early = call.early, ""
            call_id = self._new_id() if call.id is None or call.id in self._ids else call.id
            self._ids.add(call_id)
            self._deltas.append(ToolCallDelta(call.index, call_id, name, early))

    def _add(self, call: Call, arguments: str) -> None:
        if call.name is None:
            call.early += arguments
        elif self._is_passed_on(call):
            self._deltas.append(ToolCallDelta(call.index, arguments=arguments))

    def _is_passed_on(self, call: Call) -> bool:
        return self._most is None or call.index < self._most


class Call:
    """A call while it is read. `early` are arguments that came before the name.

    `call_id` is what the answer names it, if it does.
    """

    def __init__(self, call_id: str | None = None) -> None:
        self.id = call_id
        self.name: str | None = None
        self.index = 0
        self.has_arguments = False
        self.early = ""


def joined(deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Neighbours of one call as one."""
    found: list[ToolCallDelta] = []
    for one in deltas:
        last = found[-1] if found else None
        if last is not None and last.index == one.index:
            text = last.arguments + one.arguments
            found[-1] = ToolCallDelta(last.index, last.id, last.name, text)
        else:
            found.append(one)
    return found
