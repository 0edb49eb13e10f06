"""Where a prompt leaves an earlier one: in tokens, in characters, and in fields of the request."""

from __future__ import annotations

import bisect
import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from prefixcache.diagnostics.history import shared_tokens
from prefixcache.diagnostics.spans import PromptSource, PromptSpan, span_at
from prefixcache.types.token_ids import TokenIds

# Characters of a word that are shown on each side of the difference.
_MOST_SHOWN = 40
_WORD_BEFORE = re.compile(r"\S*\Z")
_WORD_BEHIND = re.compile(r"\s*\S*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place at which two prompts differ.

    `token` and `character` count from the beginning of the rendered prompt, `field_character` from
    that of the message's or tool's field as the prompt shows it. Without texts all but `token` is
    None; `field` is "template" for what comes of no field, and "prompt" for one that is no chat.
    `text` is the word there, `earlier_text` that of the earlier prompt where it may be shown.
    """

    token: int
    character: int | None = None
    message: int | None = None
    role: str | None = None
    field: str | None = None
    field_character: int | None = None
    text: str | None = None
    earlier_text: str | None = None

    def __str__(self) -> str:
        """One line, as: message 0, system, differs at character 18: `14:05:11` was `14:04:37`."""
        if self.field_character is None:
            return f"the prompt differs at token {self.token}"
        was = "" if self.earlier_text is None else f" was {_quoted(self.earlier_text)}"
        text = _quoted(self.text or "")
        return f"{self.place} differs at character {self.field_character}: {text}{was}"

    @property
    def place(self) -> str:
        """The message and field, in words."""
        if self.message is None:
            return self.field or "the prompt"
        inner = "" if self.field == "content" else f" {self.field},"
        return f"message {self.message}, {self.role},{inner}"

    def as_json(self) -> dict[str, Any]:
        """For clients, with the line that describes it."""
        return {**dataclasses.asdict(self), "description": str(self)}


def _quoted(text: str) -> str:
    """As terminals and logs may show it."""
    shown = (character if character.isprintable() else repr(character)[1:-1] for character in text)
    return f"`{''.join(shown)}`"


def find_difference(
    token_ids: TokenIds,
    source: PromptSource | None,
    earlier_ids: TokenIds,
    earlier: PromptSource | None,
    *,
    shows_earlier: bool,
) -> Difference | None:
    """Where the prompt leaves the earlier one; None where one of them goes on from the other.

    `shows_earlier` is for the key that sent the earlier prompt, and for administrators: nobody else
    may read its text. Takes time that grows with the texts.
    """
    token = shared_tokens(token_ids, earlier_ids)
    if token == min(len(token_ids), len(earlier_ids)):
        return None
    if source is None or earlier is None:
        return Difference(token=token)
    character = shared_characters(source.text, earlier.text)
    if character == len(source.text):
        return Difference(token=token)
    span = _span(source, character)
    was = _word(earlier.text, character, _span(earlier, character)) if shows_earlier else None
    return Difference(
        token=token,
        character=character,
        message=None if span is None else span.message,
        role=None if span is None else span.role,
        field="template" if span is None else span.field,
        field_character=character - (0 if span is None else span.start),
        text=_word(source.text, character, span),
        earlier_text=was,
    )


def _span(source: PromptSource, character: int) -> PromptSpan | None:
    return span_at(source.spans(), character)


def shared_characters(text: str, other: str) -> int:
    """The length of the beginning that two texts share."""
    shortest = min(len(text), len(other))
    return bisect.bisect_left(
        range(1, shortest + 1), True, key=lambda end: text[:end] != other[:end]
    )


def word_start(text: str, character: int) -> int:
    """Where the word that holds the character begins, or a part of it where it is long."""
    before = text[max(0, character - _MOST_SHOWN) : character]
    match = _WORD_BEFORE.search(before)
    return character - (0 if match is None else len(match[0]))


def _word(text: str, character: int, span: PromptSpan | None) -> str:
    """The word at the character, within its field."""
    first = 0 if span is None else span.start
    last = len(text) if span is None or span.end <= character else span.end
    match = _WORD_BEHIND.match(text[character : min(last, character + _MOST_SHOWN)])
    behind = "" if match is None else match[0]
    return text[max(first, word_start(text, character)) : character] + behind
