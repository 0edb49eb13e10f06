"""Reasoning, content and calls in the messages of an answer in the harmony format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prefixcache.text.chat.message import CallDeltas, MessageDelta
from prefixcache.text.chat.text_stream import Reading, TextStream
from prefixcache.text.chat.tools import ToolUse

_MESSAGE, _CHANNEL, _CONSTRAIN = "<|message|>", "<|channel|>", "<|constrain|>"
_START = "<|start|>"
_ENDINGS = ("<|end|>", "<|return|>", "<|call|>")
_WITHIN_HEADER = (_MESSAGE, _CHANNEL, _CONSTRAIN, _START)
TOKENS = (*_WITHIN_HEADER, *_ENDINGS)
# Of a part of a header; more text is none.
_LONGEST_PART = 256
_RECIPIENT = re.compile(r"\bto=(\S+)")
_FUNCTIONS = "functions."
_NO_TOOLS = ("", "assistant", "user", "all")


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str = ""
    recipient: str = ""


class HarmonyParser:
    """The channel says what a message is: analysis is reasoning, all others are content.

    A message to a recipient is a call where tools may be called. Headers and special tokens are
    never passed on; text without a header is content. The answer begins with a header, or
    within its final message. Messages of one kind are joined by a line break.
    """

    def __init__(self, use: ToolUse, new_id: Callable[[], str], *, in_final: bool) -> None:
        self.in_reasoning = False
        self.in_markup = not in_final
        self._calls_tools = use.mode != "none"
        self._calls = CallDeltas(new_id, None if use.parallel else 1)
        self._stream = TextStream()
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._said: set[str] = set()
        self._part = ""  # of the header that comes next, by the token before it
        self._seen_token = False
        self._reading = self._read(in_final=in_final)

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """What is certain after this text."""
        self._stream.push(text, finished=finished)
        next(self._reading, None)
        content, reasoning = ("".join(texts) for texts in self._texts.values())
        delta = MessageDelta(content, reasoning, self._calls.taken())
        for texts in self._texts.values():
            texts.clear()
        return delta

    def _read(self, *, in_final: bool) -> Reading[None]:
        header = _Header() if in_final else (yield from self._read_header())
        while header is not None:
            self.in_markup = False
            yield from self._read_message(header)
            self.in_reasoning, self.in_markup = False, True
            header = yield from self._read_header()

    def _read_header(self) -> Reading[_Header | None]:
        """The next header; None at the end of the answer."""
        parts: dict[str, str] = {}
        while True:
            text, token = yield from self._read_part()
            if token is None:  # no header
                self._stream.unread(text)
                return _Header()
            if not token:
                if not self._seen_token:
                    self._say("content", text, first=True)
                return None
            self._seen_token = True
            parts[self._part] = text
            if token == _MESSAGE:
                return _header(parts)
            self._part = token
            if token not in (_CHANNEL, _CONSTRAIN):
                parts.clear()

    def _read_part(self) -> Reading[tuple[str, str | None]]:
        """Text up to the next token, and the token.

        The token is empty at the end, and None where the text is no part of a header.
        """
        text, is_role = "", self._part not in _WITHIN_HEADER
        while True:
            piece, token = self._stream.take_before(TOKENS)
            text += piece
            if len(text) > _LONGEST_PART or (is_role and not _may_be_role(text)):
                self._stream.unread(token)
                return text, None
            if token or not (yield from self._stream.more()):
                return text, token

    def _read_message(self, header: _Header) -> Reading[None]:
        say = self._new_message(header)
        while True:
            piece, token = self._stream.take_before(TOKENS)
            if piece:
                say(piece)
            if token not in ("", _MESSAGE, _CONSTRAIN):
                self._part, self._seen_token = token, True
                return
            if not token and not (yield from self._stream.more()):
                return

    def _new_message(self, header: _Header) -> Callable[[str], None]:
        """Begins a message; returns what takes its text."""
        name = header.recipient.removeprefix(_FUNCTIONS)
        if self._calls_tools and name not in _NO_TOOLS:
            return partial(self._calls.add, self._calls.begin(name))
        kind = "reasoning" if header.channel == "analysis" else "content"
        self.in_reasoning = kind == "reasoning"
        first = True

        def say(text: str) -> None:
            nonlocal first
            self._say(kind, text, first=first)
            first = False

        return say

    def _say(self, kind: str, text: str, *, first: bool) -> None:
        if text:
            self._texts[kind].append(f"\n{text}" if first and kind in self._said else text)
            self._said.add(kind)


def _header(parts: dict[str, str]) -> _Header:
    """What the parts of a header say, which come behind a role or a token."""
    channel = parts.get(_CHANNEL, "").split()
    recipient = _RECIPIENT.search(" ".join(parts.values()))
    named = channel[0] if channel and not channel[0].startswith("to=") else ""
    return _Header(named, recipient.group(1) if recipient else "")


def _may_be_role(text: str) -> bool:
    """Whether a header may begin so where none was announced: the assistant, and a recipient."""
    rest = text.lstrip()
    if "assistant".startswith(rest):
        return True
    rest = rest.removeprefix("assistant").lstrip()
    return "to=".startswith(rest) or (rest.startswith("to=") and len(rest.split()) == 1)
