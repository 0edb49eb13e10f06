"""Reasoning in the text of an answer: what stands between two markers before the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefixcache.text.chat.message import MessageDelta, MessageParser
from prefixcache.text.chat.text_stream import Reading, TextStream

# Where an answer begins: within reasoning, outside, or where it says so itself.
Begin = Literal["inside", "outside", "either"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family reasons: between two markers.

    With `assumed` an answer begins so, with or without the opening one. `behind` is what a prompt
    may end with behind the opening one.
    """

    name: str
    opening: str = "<think>"
    closing: str = "</think>"
    assumed: bool = False
    behind: str = ""

    def begin(self, prompt: str, *, continued: bool) -> Begin:
        """Where the answer to `prompt` begins, which may go on with a message."""
        end = prompt.rstrip()
        if end.removesuffix(self.behind).rstrip().endswith(self.opening):
            return "inside"
        if continued or end.endswith(self.closing):
            return "outside"
        return "inside" if self.assumed else "either"


QWEN3 = ReasoningFormat("qwen3")
REASONING_FORMATS = {
    one.name: one
    for one in (
        QWEN3,
        ReasoningFormat("deepseek_r1", assumed=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat(
            "seed_oss", "<seed:think>", "</seed:think>", behind="<seed:cot_budget_reflect>"
        ),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
    )
}


def detected_reasoning(template: str) -> ReasoningFormat | None:
    """The format of a model whose chat template is this."""
    found = (one for one in REASONING_FORMATS.values() if one.closing in template)
    return next(found, None)


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """How one answer begins, by the format of its reasoning."""

    begin: Begin = "outside"
    reasoning: ReasoningFormat = QWEN3


class ReasoningParser:
    """Reasoning up to its end, without the white space around it; then `inner` reads the rest."""

    in_markup = False

    def __init__(self, inner: MessageParser, start: ReasoningStart) -> None:
        self.in_reasoning = start.begin == "inside"
        self._inner = inner
        self._stream = TextStream()
        self._reasoning: list[str] = []
        self._reading = self._read(start.begin, start.reasoning)
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

    def _read(self, begin: Begin, reasoning: ReasoningFormat) -> Reading[None]:
        stream = self._stream
        stream.mark()
        opened = yield from stream.skip(reasoning.opening)
        if opened or begin == "inside":
            stream.unmark()
            self.in_reasoning = True
            yield from stream.skip_space()
            if (yield from stream.until(reasoning.closing, self._reasoning.append)):
                yield from stream.skip(reasoning.closing)
                self.in_reasoning = False
                yield from stream.skip_space()
        else:
            stream.rewind()
        self._done = True
