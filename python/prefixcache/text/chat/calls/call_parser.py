"""Content and calls of an answer, read as they come; each format reads its own calls."""

from __future__ import annotations

from collections.abc import Callable

from prefixcache.text.chat.calls.argument_rules import ArgumentStyle
from prefixcache.text.chat.calls.schemas import ToolSchemas
from prefixcache.text.chat.message import CallDeltas, MessageDelta
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
        self._opening = opening
        self._closing = closing
        self._bare = bare
        self._style = style
        self._stream = TextStream()
        self._content: list[str] = []
        self._calls = CallDeltas(new_id, most)
        self._reading = self._read()

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """What is certain after this text."""
        self._stream.push(text, finished=finished)
        next(self._reading, None)
        delta = MessageDelta("".join(self._content), tool_calls=self._calls.taken())
        self._content.clear()
        return delta

    def _read(self) -> Reading[None]:
        while (yield from self._stream.until(self._opening, self._say)):
            self._stream.mark()
            yield from self._stream.skip(self._opening)
            yield from self._read_section()

    def _read_section(self) -> Reading[None]:
        """The calls after an opening; anything else is content, as it is written."""
        self._stream.mark()
        before = self._calls.count
        yield from self._read_calls()
        self._content.append(self._stream.unmark())
        if self._closing and self._calls.count > before:
            yield from self._stream.skip(self._closing)

    def _read_calls(self) -> Reading[None]:
        """The calls that come next, in the format's own notation."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        if text and not (self._calls.count and text.isspace()):
            self._content.append(text)

    def _begin(self, call: Call, name: str) -> None:
        """The name is known: from here on what is read belongs to the call."""
        call.name, call.index = name, self._calls.begin(name, call.id)
        self._stream.unmark()
        self._calls.add(call.index, call.early)

    def _add(self, call: Call, arguments: str) -> None:
        if call.name is None:
            call.early += arguments
        else:
            self._calls.add(call.index, arguments)


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
