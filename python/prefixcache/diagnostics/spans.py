"""Which part of a request each part of its prompt's text came from.

A chat template may put anything anywhere. So the texts of messages and tools are looked for in the
rendered prompt, in their order; where one does not stand as it was sent, since the template wrote
it otherwise, it has the gap between its neighbours. Found only when somebody asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

# Characters looked at for texts that the prompt does not show, in lengths of the prompt.
_MOST_SCANS = 32

_ROLES = ("system", "developer", "user", "assistant", "tool")

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Where a part of a prompt's text came from.

    `start` and `end` are characters of the rendered text. `message` and `role` are None for what is
    of no message; `field` is named as in the body: "content", "content[2].text",
    "tool_calls[0].function.arguments", "tools[3].function.name".
    """

    start: int
    end: int
    message: int | None
    role: str | None
    field: str


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A prompt's text, and the messages and tools that it was rendered of; none for a plain text.

    Messages and tools have the form of OpenAI's chats, and are those of the request: whoever keeps
    a source keeps them: about `size` bytes besides the text.
    """

    text: str
    messages: Sequence[Values] = ()
    tools: Sequence[Values] = ()
    size: int = 0

    @property
    def num_bytes(self) -> int:
        """The memory, roughly; a character takes 1, 2 or 4 bytes, by the widest of the text."""
        return self.text.__sizeof__() + self.size

    def spans(self) -> tuple[PromptSpan, ...]:
        """The parts found, by where they begin, an outer one before those within it.

        Takes time that grows with the text, about that of rendering it once more.
        """
        if not self.messages:
            return (PromptSpan(0, len(self.text), None, None, "prompt"),)
        search = _Search(self.text)
        spans = [*_message_spans(search, self.messages), *_tool_spans(search, self.tools)]
        return tuple(sorted(spans, key=lambda span: (span.start, -span.end)))

    def role_spans(self) -> list[tuple[str, int, int]]:
        """Who wrote which characters of the text: role, start and end of each message found."""
        messages: dict[int, tuple[str, int, int]] = {}
        for span in self.spans():
            if span.message is None:
                continue
            role = span.role if span.role in _ROLES else "other"
            _, start, end = messages.get(span.message, (role, span.start, span.end))
            messages[span.message] = role, min(start, span.start), max(end, span.end)
        return sorted(messages.values(), key=lambda pair: pair[1])

    def tool_names(self) -> list[str]:
        """Names of the tools, in the order in which they were sent."""
        return [str(_function(tool).get("name")) for tool in self.tools]


def span_at(spans: Sequence[PromptSpan], character: int) -> PromptSpan | None:
    """The innermost span that holds the character, or ends before it where no other begins."""
    within = [span for span in spans if span.start <= character <= span.end]
    inside = [span for span in within if character < span.end]
    return (inside or within or [None])[-1]


class _Part(NamedTuple):
    """A part of a message, and how a template may have written it."""

    message: int
    role: str | None
    field: str
    texts: tuple[str, ...]


class _Search:
    """Looks for texts in the prompt, with a bound on what misses may cost."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._left = _MOST_SCANS * len(text)

    def find(self, texts: Sequence[str], begin: int, end: int | None = None) -> slice | None:
        """The first of the texts that stands between `begin` and `end`."""
        end = len(self.text) if end is None else end
        for text in texts:
            at = self.text.find(text, begin, end) if text and self._left > 0 else -1
            if at >= 0:
                return slice(at, at + len(text))
            self._left -= end - begin
        return None


def _message_spans(search: _Search, messages: Sequence[Values]) -> list[PromptSpan]:
    spans: list[PromptSpan] = []
    missing: list[_Part] = []
    end = 0
    for part in _parts(messages):
        place = search.find(part.texts, end)
        if place is None:
            missing.append(part)
            continue
        spans += _gap(missing, end, place.start)
        spans.append(_span(part, place.start, place.stop))
        missing, end = [], place.stop
    return [*spans, *_gap(missing, end, len(search.text))]


def _span(part: _Part, start: int, end: int) -> PromptSpan:
    return PromptSpan(start, end, part.message, part.role, part.field)


def _gap(missing: Sequence[_Part], start: int, end: int) -> Iterator[PromptSpan]:
    """Text of parts that do not stand there as they were sent."""
    if not missing or start == end:
        return
    first, last = missing[0], missing[-1]
    if first.message == last.message:
        yield _span(first, start, end)
    else:
        yield PromptSpan(start, end, None, None, f"messages[{first.message}:{last.message + 1}]")


def _parts(messages: Sequence[Values]) -> Iterator[_Part]:
    for index, message in enumerate(messages):
        role = message.get("role")
        for field, texts in _fields(message):
            yield _Part(index, role, field, texts)


def _fields(message: Values) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Fields in the order in which templates write them, each with the forms of its text."""
    content = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        yield "reasoning_content", (reasoning, reasoning.strip())
    if isinstance(content, str) and content.strip():
        yield "content", (content, content.strip())
    elif isinstance(content, list):
        for place, part in enumerate(cast("list[Values]", content)):
            text = str(part.get("text") or "")
            if text.strip():
                yield f"content[{place}].text", (text, text.strip())
    for place, call in enumerate(message.get("tool_calls") or ()):
        function = _function(call)
        field = f"tool_calls[{place}].function"
        yield f"{field}.name", (str(function.get("name")),)
        yield f"{field}.arguments", _arguments(function.get("arguments"))


def _arguments(value: object) -> tuple[str, ...]:
    """As sent, and as JSON of the object that it spells."""
    if not isinstance(value, str):
        return _json(value)
    try:
        return (*_json(json.loads(value)), value)
    except (ValueError, RecursionError):
        return (value,)


def _tool_spans(search: _Search, tools: Sequence[Values]) -> Iterator[PromptSpan]:
    end = 0
    for index, tool in enumerate(tools):
        function = _function(tool)
        place = search.find((*_json(tool), *_json(function)), end)
        place = place or search.find(_json(function.get("name")), end)
        if place is None:
            continue
        yield PromptSpan(place.start, place.stop, None, None, f"tools[{index}]")
        yield from _function_spans(search, function, place, f"tools[{index}].function")
        end = place.stop


def _function_spans(
    search: _Search, function: Values, within: slice, field: str
) -> Iterator[PromptSpan]:
    begin = within.start
    for name, value in function.items():
        key = json.dumps(name)
        texts = [f"{key}: {text}" for text in _json(value)]
        place = search.find(texts, begin, within.stop)
        if place is not None:
            quote = isinstance(value, str)
            start = place.start + len(key) + 2 + quote
            yield PromptSpan(start, place.stop - quote, None, None, f"{field}.{name}")
            begin = place.stop


def _function(value: Values) -> Values:
    """What a tool or a call says of its function."""
    function = value.get("function")
    return cast("Values", function) if isinstance(function, Mapping) else value


def _json(value: object) -> tuple[str, ...]:
    """As templates' filters write it: in one line, or indented."""
    return tuple(json.dumps(value, ensure_ascii=False, indent=indent) for indent in (None, 4))
