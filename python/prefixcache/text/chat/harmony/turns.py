"""The messages of a chat in the form that gpt-oss's template shows without loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixcache.text.chat.turn_order import num_leading

_Message = dict[str, Any]


def harmony_messages(messages: Sequence[_Message]) -> list[_Message]:
    """One message of instructions at the beginning, and one call a message with its result.

    Reasoning is named `thinking`; what was said before a call joins it, as the template shows one
    of them alone.
    """
    first = num_leading(messages)
    texts = [message.get("content", "") for message in messages[:first]]
    written = [{"role": "developer", "content": "\n\n".join(texts)}] if texts else []
    return written + single_calls([*map(_with_thinking, messages[first:])])


def single_calls(messages: Sequence[_Message]) -> list[_Message]:
    """One call a message, with its result behind it."""
    written: list[_Message] = []
    index = 0
    while index < len(messages):
        end = index + 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        written += _turn(messages[index], messages[index + 1 : end])
        index = end
    return written


def _turn(message: _Message, results: Sequence[_Message]) -> list[_Message]:
    """A message and the results behind it, each behind its call."""
    calls = message.get("tool_calls", ())
    if len(calls) < 2:
        return [message, *results]
    written: list[_Message] = []
    left = [*results]
    for place, call in enumerate(calls):
        first = {} if place else {**message}
        written.append({"role": "assistant", "content": "", **first, "tool_calls": [call]})
        answers = [result for result in left if result["tool_call_id"] == call["id"]]
        left = [result for result in left if result["tool_call_id"] != call["id"]]
        written += answers
    return written + left


def _with_thinking(message: _Message) -> _Message:
    thought, content = message.get("reasoning_content"), message.get("content")
    if message.get("tool_calls") and thought and content:
        return {**message, "thinking": f"{thought}\n{content}", "content": ""}
    return {**message, "thinking": thought} if thought else message
