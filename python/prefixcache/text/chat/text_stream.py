"""Text that is read while it comes: readers are generators that yield where they need more.

A reader returns what it found. Texts are passed on as soon as nothing that follows can change what
they mean, so how they were split makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], object]

_STRUCTURE = re.compile(r'["\\{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class TextStream:
    """What has come and is not read yet. `ended` says that no more comes."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._taken: list[str] | None = None

    def push(self, text: str, *, finished: bool) -> None:
        """Adds text at the end."""
        self._text += text
        self.ended = finished

    def mark(self) -> None:
        """From here on, or from an earlier mark, what is read is remembered."""
        if self._taken is None:
            self._taken = []

    def unmark(self) -> str:
        """All that was read since the mark, which ends; empty without one."""
        taken, self._taken = self._taken, None
        return "".join(taken or ())

    def rewind(self) -> None:
        """Makes what was read since the mark unread."""
        self._text = self.unmark() + self._text

    def take(self, length: int) -> str:
        """Reads that many characters, which must be there."""
        text, self._text = self._text[:length], self._text[length:]
        if self._taken is not None:
            self._taken.append(text)
        return text

    def unread(self, text: str) -> None:
        """Makes `text`, which was read last, unread."""
        self._text = text + self._text
        if self._taken is not None and text:
            taken = "".join(self._taken)
            self._taken = [taken[: len(taken) - len(text)]]

    def take_before(self, markers: Sequence[str]) -> tuple[str, str]:
        """Reads what has come before the first of the markers, and the marker; else an empty one.

        What may become a marker stays.
        """
        places = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        if places:
            at, marker = min(places)
            return self.take(at), self.take(len(marker))
        held = 0 if self.ended else max(_overlap(self._text, marker) for marker in markers)
        return self.take(len(self._text) - held), ""

    def rest(self) -> str:
        """Reads all that has come."""
        return self.take(len(self._text))

    def more(self) -> Reading[bool]:
        """Waits for more text; False at the end."""
        if self.ended:
            return False
        yield
        return True

    def skip_space(self) -> Reading[str]:
        """The next character that is no white space, not read yet; empty at the end."""
        while True:
            self.take(len(self._text) - len(self._text.lstrip()))
            if self._text:
                return self._text[0]
            if not (yield from self.more()):
                return ""

    def skip(self, literal: str) -> Reading[bool]:
        """Reads `literal`, and white space before it, if they come next."""
        while True:
            rest = self._text.lstrip()
            if rest.startswith(literal):
                self.take(len(self._text) - len(rest) + len(literal))
                return True
            if not literal.startswith(rest) or not (yield from self.more()):
                return False

    def starts(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next; it is not read."""
        while not self._text.startswith(literal):
            if not literal.startswith(self._text) or not (yield from self.more()):
                return False
        return True

    def ahead(self, length: int) -> Reading[str]:
        """The next `length` characters, not read yet; fewer at the end."""
        while len(self._text) < length:
            if not (yield from self.more()):
                break
        return self._text[:length]

    def following(self, length: int) -> Reading[str]:
        """The first character that is no white space behind the next `length`; empty at the end."""
        while not (rest := self._text[length:].lstrip()):
            if not (yield from self.more()):
                return ""
        return rest[0]

    def before(self, pattern: re.Pattern[str], sink: Sink) -> Reading[str]:
        """Passes on what comes before one of the characters `pattern`, which is returned, unread.

        At the end it is empty.
        """
        while (match := pattern.search(self._text)) is None:
            if self._text:
                sink(self.take(len(self._text)))
            if not (yield from self.more()):
                return ""
        if match.start():
            sink(self.take(match.start()))
        return match.group()

    def line_before(self, marker: str, sink: Sink) -> Reading[bool]:
        """Passes on what comes before `marker`, less one line break there; False if it never comes.

        Neither is read.
        """
        while (index := self._text.find(marker)) < 0:
            held = max(_overlap(self._text, marker), _overlap(self._text, f"\n{marker}"))
            if held < len(self._text):
                sink(self.take(len(self._text) - held))
            if not (yield from self.more()):
                sink(self.take(len(self._text)))
                return False
        sink(self.take(index - self._text.endswith("\n", 0, index)))
        return True

    def until(self, marker: str, sink: Sink) -> Reading[bool]:
        """Passes on what comes before `marker` and white space before it; False if it never comes.

        Neither is read. What may become them is held back.
        """
        while True:
            index = self._text.find(marker)
            end = index if index >= 0 else len(self._text) - _overlap(self._text, marker)
            length = len(self._text[:end].rstrip())
            if length:
                sink(self.take(length))
            if index >= 0:
                return True
            if not (yield from self.more()):
                sink(self.take(len(self._text)))
                return False

    def value(self, sink: Sink) -> Reading[bool]:
        """Passes on one JSON value, found by its brackets and quotes; False when it is cut off."""
        if self._text[:1] in ("{", "[", '"'):
            return (yield from self._enclosed(sink))
        return (yield from self.before(_SCALAR_END, sink)) != ""

    def _enclosed(self, sink: Sink) -> Reading[bool]:
        nesting = _Nesting()
        while True:
            length = nesting.scan(self._text)
            if length:
                sink(self.take(length))
            if nesting.closed:
                return True
            if not (yield from self.more()):
                sink(self.take(len(self._text)))
                return False


class _Nesting:
    """Where in a JSON value a text is: how deep, and whether within a string."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._in_string = False

    def scan(self, text: str) -> int:
        """How much of `text` belongs to the value; less an escape whose end is missing."""
        position = 0
        while not self.closed:
            pattern = _IN_STRING if self._in_string else _STRUCTURE
            match = pattern.search(text, position)
            if match is None:
                return len(text)
            if match.group() == "\\":
                if match.end() == len(text):
                    return match.start()
                position = match.end() + 1
            else:
                self._pass(match.group())
                position = match.end()
        return position

    def _pass(self, character: str) -> None:
        if character == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if character in "{[" else -1
        self.closed = not self._in_string and self._depth <= 0


def _overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that `marker` begins with."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
