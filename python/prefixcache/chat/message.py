"""What an answer says: content, reasoning and calls of tools, read out of its text as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What was added to the call number `index`. Its `id` and `name` come once, and first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What was added to a message. All the deltas of a text joined are the whole message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything was added."""
        return bool(self.content or self.reasoning or self.tool_calls)


class MessageParser(Protocol):
    """Reads one answer. How its text is split over calls makes no difference to the message."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        ...

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """What is certain after this text; with `finished` no more comes, and all is told."""
        ...


class PlainParser:
    """Every text is content."""

    in_reasoning = False

    def push(self, text: str, *, finished: bool) -> MessageDelta:  # noqa: ARG002
        """The text, as content."""
        return MessageDelta(text)


class ToolCall:
    """A call as far as it has come."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self._arguments: list[str] = []

    @property
    def arguments(self) -> str:
        """JSON text."""
        return "".join(self._arguments)

    def add(self, arguments: str) -> None:
        """Takes more of the arguments."""
        self._arguments.append(arguments)


class Message:
    """A message as far as it has come. Parts are joined when they are asked for."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.tool_calls: list[ToolCall] = []

    @property
    def content(self) -> str:
        """What is said beside reasoning and calls."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """What was thought before the content."""
        return "".join(self._reasoning)

    def add(self, delta: MessageDelta) -> None:
        """Takes what was added."""
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for one in delta.tool_calls:
            if one.name is not None:
                self.tool_calls.append(ToolCall(one.id or "", one.name))
            self.tool_calls[one.index].add(one.arguments)
