"""What an answer says: content, reasoning and calls of tools, read out of its text as it comes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from pydantic_core import from_json

from prefixcache.types.request import TokenLogprobs


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


class CallDeltas:
    """The calls of an answer as they are read; with `most` no more than that are passed on."""

    def __init__(self, new_id: Callable[[], str], most: int | None) -> None:
        self.count = 0
        self._new_id = new_id
        self._most = most
        self._ids: set[str] = set()
        self._found: list[ToolCallDelta] = []

    def begin(self, name: str, call_id: str | None = None) -> int:
        """The index of a new call, which has this id unless another one has it."""
        index = self.count
        self.count += 1
        if self._is_passed_on(index):
            call_id = self._new_id() if call_id is None or call_id in self._ids else call_id
            self._ids.add(call_id)
            self._found.append(ToolCallDelta(index, call_id, name))
        return index

    def add(self, index: int, arguments: str) -> None:
        """Takes more of the arguments of a call."""
        if self._is_passed_on(index):
            self._found.append(ToolCallDelta(index, arguments=arguments))

    def taken(self) -> tuple[ToolCallDelta, ...]:
        """What came since this was last asked for, in one piece for neighbours of one call."""
        pieces, self._found = self._found, []
        if len(pieces) < 2:
            return tuple(pieces)
        calls = ([*of_one] for _, of_one in itertools.groupby(pieces, attrgetter("index")))
        return tuple(
            dataclasses.replace(call[0], arguments="".join(piece.arguments for piece in call))
            for call in calls
        )

    def _is_passed_on(self, index: int) -> bool:
        return self._most is None or index < self._most


class MessageParser(Protocol):
    """Reads one answer. How its text is split over calls makes no difference to the message."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        ...

    @property
    def in_markup(self) -> bool:
        """Whether the text so far ends in what says of what kind the following text is."""
        ...

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """What is certain after this text; with `finished`, which ends it, all is certain."""
        ...


class PlainParser:
    """Every text is content."""

    in_reasoning = False
    in_markup = False

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

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are JSON that has ended."""
        try:
            from_json(self.arguments)
        except ValueError:
            return False
        return True

    def add(self, arguments: str) -> None:
        """Takes more of the arguments."""
        self._arguments.append(arguments)


class Text:
    """A part of a message that is text: "content" or "reasoning"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []


class Message:
    """A message as far as it has come: its parts in their order, joined when they are asked for."""

    def __init__(self) -> None:
        self._parts: list[Text | ToolCall] = []
        self._pending: list[TokenLogprobs] = []
        self.tool_calls: list[ToolCall] = []

    @property
    def content(self) -> str:
        """The text without reasoning and calls."""
        return self._joined("content")

    @property
    def reasoning(self) -> str:
        """What was thought before the content."""
        return self._joined("reasoning")

    def add(
        self, delta: MessageDelta, logprobs: Sequence[TokenLogprobs] = (), *, finished: bool = False
    ) -> list[TokenLogprobs]:
        """Takes what was added by tokens with these log probabilities.

        Returns those of tokens that are content, which come with it or at the end: a token may
        have no text yet, or be a part of reasoning or of a call.
        """
        self._pending += logprobs
        if delta.reasoning:
            self._text("reasoning").pieces.append(delta.reasoning)
        released = list[TokenLogprobs]()
        if delta.content or (finished and self._pending and self._ends_in_content()):
            part = self._text("content")
            part.pieces.append(delta.content)
            released, self._pending = self._pending, []
            part.logprobs += released
        elif delta:
            self._pending = []
        for piece in delta.tool_calls:
            if piece.name is not None:
                self.tool_calls.append(ToolCall(piece.id or "", piece.name))
                self._parts.append(self.tool_calls[-1])
            self.tool_calls[piece.index].add(piece.arguments)
        return released

    def parts(self) -> Iterator[tuple[MessageDelta, Sequence[TokenLogprobs]]]:
        """Each part as if it had come at once, with the log probabilities of its tokens."""
        calls = itertools.count()
        for part in self._parts:
            if isinstance(part, ToolCall):
                call = ToolCallDelta(next(calls), part.id, part.name, part.arguments)
                yield MessageDelta(tool_calls=(call,)), ()
            elif part.kind == "reasoning":
                yield MessageDelta(reasoning="".join(part.pieces)), ()
            else:
                yield MessageDelta("".join(part.pieces)), part.logprobs

    def _ends_in_content(self) -> bool:
        """Whether tokens without a text belong to the content: an answer may have nothing else."""
        last = self._parts[-1] if self._parts else None
        return last is None or (isinstance(last, Text) and last.kind == "content")

    def _text(self, kind: str) -> Text:
        """The last part if it is of the kind, else a new one."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Text) and last.kind == kind:
            return last
        text = Text(kind)
        self._parts.append(text)
        return text

    def _joined(self, kind: str) -> str:
        texts = (part for part in self._parts if isinstance(part, Text) and part.kind == kind)
        return "".join(itertools.chain.from_iterable(text.pieces for text in texts))
