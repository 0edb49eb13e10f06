"""Answers of every endpoint in one form that can be compared, whole or as far as they came."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# How the endpoints say so; Anthropic's API has no word for it.
_ABORTED = ("abort", "cancelled")


@dataclass(slots=True)
class Choice:
    """`scores` are of each token its text and log probabilities, as the server wrote them."""

    text: str = ""
    scores: list[Any] = field(default_factory=list)
    end: str | None = None

    def begins(self, other: Choice) -> bool:
        """Whether `other` may be what becomes of this one."""
        return (
            other.text.startswith(self.text)
            and other.scores[: len(self.scores)] == self.scores
            and self.end in (None, other.end)
        )


@dataclass(slots=True)
class Answer:
    """What came of an answer. `error` is the one that it ended with, in or before its stream."""

    choices: dict[int, Choice] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_complete: bool = False

    def begins_one_of(self, rights: Sequence[Answer]) -> bool:
        """Whether each choice is the beginning of what it is in one of the `rights`, or all of it.

        Each may be of another one: a choice that has ended stays when others start again.
        """
        return all(
            any(choice.begins(right.choices[index]) for right in rights if index in right.choices)
            for index, choice in self.choices.items()
        )

    def equals_one_of(self, rights: Sequence[Answer]) -> bool:
        """Whether each choice is there, and is what it is in one of the `rights`."""
        return self.is_complete and all(
            any(self.choices.get(index) == right.choices[index] for right in rights)
            for index in {*self.choices, *rights[0].choices}
        )

    def without_aborts(self) -> Answer | None:
        """The answer as far as it came before a command ended it; None where none did."""
        if not any(choice.end in _ABORTED for choice in self.choices.values()):
            return None
        ends = {i: None if c.end in _ABORTED else c.end for i, c in self.choices.items()}
        return Answer({i: replace(c, end=ends[i]) for i, c in self.choices.items()})

    def difference(self, other: Answer) -> str:
        """Where this answer first leaves the other, for people."""
        for index, own in self.choices.items():
            right = other.choices.get(index, Choice())
            if not own.begins(right) or (self.is_complete and own != right):
                return (
                    f"choice {index}: text {own.text[-40:]!r} of {len(own.text)}, right "
                    f"{right.text[-40:]!r} of {len(right.text)}, ends {own.end}, "
                    f"{right.end}; scores {len(own.scores)} of {len(right.scores)}, equal begin: "
                    f"{right.scores[: len(own.scores)] == own.scores}; complete: {self.is_complete}"
                )
        return f"choices {sorted(self.choices)} of {sorted(other.choices)}"

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def add_body(self, path: str, body: dict[str, Any]) -> None:
        """A whole answer, not streamed."""
        if body.get("error"):  # null in responses
            self.error = body["error"]
            return
        _BODIES[path](self, body)
        self.is_complete = True

    def add_event(self, path: str, event: dict[str, Any]) -> None:
        """One event of a stream."""
        if event.get("type") == "error" or "error" in event:
            self.error = event.get("error") or event
        elif path in _EVENTS:
            _EVENTS[path](self, event)
        else:
            _add_choices(self, event)


class EventReader:
    """Takes the bytes of server-sent events apart, wherever they were cut."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False

    def push(self, data: bytes) -> Iterator[dict[str, Any]]:
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            for line in block.split(b"\n"):
                if line == b"data: [DONE]":
                    self.is_done = True
                elif line.startswith(b"data: "):
                    yield json.loads(line[6:])


def _add_choices(answer: Answer, body: dict[str, Any]) -> None:
    """Of completions and chats, whole or a chunk."""
    for one in body["choices"]:
        choice = answer.choice(one["index"])
        said = one.get("message") or one.get("delta") or one
        choice.text += said.get("text") or said.get("content") or ""
        choice.scores += _scores(one.get("logprobs"))
        choice.end = one.get("finish_reason") or choice.end


def _scores(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        tokens = logprobs["content"] or []
        return [
            [t["token"], t["logprob"], [x["logprob"] for x in t["top_logprobs"]]] for t in tokens
        ]
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [list(row) for row in zip(*columns, strict=True)]


def _add_response(answer: Answer, body: dict[str, Any]) -> None:
    parts = [part for item in body["output"] for part in item.get("content", ())]
    answer.choice(0).text = "".join(part["text"] for part in parts)
    answer.choice(0).end = body["status"]


def _add_response_event(answer: Answer, event: dict[str, Any]) -> None:
    if event["type"] == "response.output_text.delta":
        answer.choice(0).text += event["delta"]
    elif event["type"] == "response.failed":
        answer.error = event["response"]["error"]
    elif event["type"] in ("response.completed", "response.incomplete"):
        answer.choice(0).end = event["response"]["status"]
        answer.is_complete = True


def _add_message(answer: Answer, body: dict[str, Any]) -> None:
    answer.choice(0).text = "".join(part["text"] for part in body["content"])
    answer.choice(0).end = body["stop_reason"]


def _add_message_event(answer: Answer, event: dict[str, Any]) -> None:
    if event["type"] == "content_block_delta":
        answer.choice(0).text += event["delta"]["text"]
    elif event["type"] == "message_delta":
        answer.choice(0).end = event["delta"]["stop_reason"]
    elif event["type"] == "message_stop":
        answer.is_complete = True


_BODIES = {
    "/v1/completions": _add_choices,
    "/v1/chat/completions": _add_choices,
    "/v1/responses": _add_response,
    "/v1/messages": _add_message,
}
_EVENTS = {"/v1/responses": _add_response_event, "/v1/messages": _add_message_event}
