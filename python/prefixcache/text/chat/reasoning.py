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
    may end with behind the opening one. The content that follows may stand between
    `content_opening` and `content_closing`.
    """

    name: str
    opening: str = "<think>"
    closing: str = "</think>"
    assumed: bool = False
    behind: str = ""
    content_opening: str = ""
    content_closing: str = ""

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
    form.name: form
    for form in (
        ReasoningFormat(
            "granite_thinking", content_opening="<response>", content_closing="</response>"
        ),
        QWEN3,
        ReasoningFormat("deepseek_r1", assumed=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat(
            "seed_oss", "<seed:think>", "</seed:think>", behind="<seed:cot_budget_reflect>"
        ),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat(
            "apriel",
            "Here are my reasoning steps:",
            "[BEGIN FINAL RESPONSE]",
            content_closing="[END FINAL RESPONSE]",
        ),
        ReasoningFormat("reka", "<reasoning>", "</reasoning>"),
    )
}


def detected_reasoning(template: str) -> ReasoningFormat | None:
    """The format of a model whose chat template is this."""
    # Granite's template names both markers of content together.
    signs = (
        (form, form.content_opening and f"{form.content_opening}{form.content_closing}")
        for form in REASONING_FORMATS.values()
    )
    matching = (form for form, content in signs if form.closing in template and content in template)
    return next(matching, None)


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """How one answer begins, by the format of its reasoning."""

    begin: Begin = "outside"
    reasoning: ReasoningFormat = QWEN3


class ReasoningParser:
    """Reasoning up to its end, without the white space around it; then `inner` reads the rest.

    What stands around the content behind reasoning is left out.
    """

    in_markup = False

    def __init__(self, inner: MessageParser, start: ReasoningStart) -> None:
        self.in_reasoning = start.begin == "inside"
        self._inner = inner
        self._stream = TextStream()
        self._reasoning: list[str] = []
        self._rest: list[str] | None = None
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
        if self._rest is None:
            return MessageDelta(reasoning=reasoning)
        if self._done:
            self._rest.append(self._stream.rest())
        rest = self._inner.push("".join(self._rest), finished=finished)
        self._rest.clear()
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
                yield from self._read_content(reasoning)
        else:
            stream.rewind()
        self._rest = self._rest or []
        self._done = True

    def _read_content(self, reasoning: ReasoningFormat) -> Reading[None]:
        """Content that stands between markers, less these."""
        stream = self._stream
        if not reasoning.content_closing or not (yield from stream.skip(reasoning.content_opening)):
            return
        yield from stream.skip_space()
        self._rest = []
        while (yield from stream.until(reasoning.content_closing, self._rest.append)):
            yield from stream.skip(reasoning.content_closing)
            yield from stream.skip_space()
