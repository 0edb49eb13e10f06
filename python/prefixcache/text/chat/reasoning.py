"""Reasoning in the text of an answer: what stands between `<think>` and `</think>`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefixcache.text.chat.message import MessageDelta, MessageParser
from prefixcache.text.chat.text_stream import Reading, TextStream

OPENING = "<think>"
CLOSING = "</think>"

# Where an answer begins: within reasoning, outside, or where it says so itself.
Begin = Literal["inside", "outside", "either"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family reasons. With `assumed` an answer begins so, with or without an opening tag."""

    name: str
    assumed: bool = False

    def begin(self, prompt: str, *, continued: bool) -> Begin:
        """Where the answer to `prompt` begins, which may go on with a message."""
        end = prompt.rstrip()
        if end.endswith(OPENING):
            return "inside"
        if continued or end.endswith(CLOSING):
            return "outside"
        return "inside" if self.assumed else "either"


REASONING_FORMATS = {
    one.name: one for one in (ReasoningFormat("qwen3"), ReasoningFormat("deepseek_r1", True))
}


def detected_reasoning(template: str) -> ReasoningFormat | None:
    """The format of a model whose chat template is this."""
    return REASONING_FORMATS["qwen3"] if CLOSING in template else None


class ReasoningParser:
    """Reasoning up to its end, without the white space around it; then `inner` reads the rest."""

    def __init__(self, inner: MessageParser, begin: Begin) -> None:
        self.in_reasoning = begin == "inside"
        self._inner = inner
        self._stream = TextStream()
        self._reasoning: list[str] = []
        self._reading = self._read(begin)
        self._done = False

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """What is certain after this text."""
        if self._done:
            return self._inner.push(text, finished=finished)
        self._stream.push(text, finished=finished)
        next(self._reading, None)
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        if not self._done:
            return MessageDelta(reasoning=reasoning)
        rest = self._inner.push(self._stream.rest(), finished=finished)
        return MessageDelta(rest.content, reasoning, rest.tool_calls)

    def _read(self, begin: Begin) -> Reading[None]:
        stream = self._stream
        stream.mark()
        opened = yield from stream.skip(OPENING)
        if opened or begin == "inside":
            stream.unmark()
            self.in_reasoning = True
            yield from stream.skip_space()
            if (yield from stream.until(CLOSING, self._reasoning.append)):
                yield from stream.skip(CLOSING)
                self.in_reasoning = False
                yield from stream.skip_space()
        else:
            stream.rewind()
        self._done = True
