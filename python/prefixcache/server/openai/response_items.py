"""The items of `/v1/responses` as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prefixcache.exceptions import wrong
from prefixcache.server.openai.response_tools import chat_call
from prefixcache.text.chat.parts import (
    Values,
    content_of,
    objects,
    one_object,
    text_of,
    text_part,
    word_of,
)

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_INPUT_TEXT = (str, [({"type": "input_text", "text": str}, {"type": "output_text", "text": str})])
_CALL = {"call_id": str, "name": str, "namespace": str}
_ITEM = (
    {"role": Literal["user", "assistant", "system", "developer"], "content": _INPUT_TEXT},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": str}]},
    {"type": "function_call", **_CALL, "arguments": str},
    {"type": "function_call_output", "call_id": str, "output": _INPUT_TEXT},
    {"type": "custom_tool_call", **_CALL, "input": str},
    {"type": "custom_tool_call_output", "call_id": str, "output": _INPUT_TEXT},
    {"type": "web_search_call"},
)
# The form of `input` in `/openapi.json`.
INPUT = (str, [_ITEM])
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages_of(value: object) -> list[Message]:
    """`input`: a text, or items. Raises `InvalidRequestError`, naming the item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if value is None:
        raise wrong("input", "is required")
    reader = _Reader()
    for index, item in enumerate(objects(value, "input")):
        reader.add(item, f"input[{index}]")
    return reader.end()


def items_of(value: object) -> list[Values]:
    """`input` as the items that it stands for."""
    if isinstance(value, str):
        return [_message_item("user", value)]
    return objects(value, "input")


class _Reader:
    """What an assistant thinks, says and calls stands in several items and is one message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning: list[str] = []

    def add(self, item: Values, field: str) -> None:
        readers = {
            "message": self._add_message,
            "reasoning": self._add_reasoning,
            "function_call": self._add_call,
            "custom_tool_call": self._add_call,
            "function_call_output": self._add_result,
            "custom_tool_call_output": self._add_result,
            "web_search_call": self._pass_over,
        }
        # OpenAI's client writes null where a message has no type.
        named = item if item.get("type") is not None else {"type": "message"}
        kind = word_of(named, "type", readers, field)
        readers[kind](item, field)

    def end(self) -> list[Message]:
        if self._reasoning:
            self._assistant()
        return self._messages

    def _add_message(self, item: Values, field: str) -> None:
        role = word_of(item, "role", _ROLES, field)
        if role == "assistant":
            said = item.get("content")  # an answer without text is no error
            content = None if said == [] else _content(said, f"{field}.content")
            self._assistant()["content"] = content
        else:
            content = _content(item.get("content"), f"{field}.content")
            self._messages.append({"role": role, "content": content})

    def _add_reasoning(self, item: Values, field: str) -> None:
        parts = objects(item.get("content"), f"{field}.content")
        parts = parts or objects(item.get("summary"), f"{field}.summary")
        self._reasoning += [text_of(part, "text", field) for part in parts]

    def _add_call(self, item: Values, field: str) -> None:
        function = chat_call(item, field)
        call = {"id": text_of(item, "call_id", field), "type": "function", "function": function}
        last = self._messages[-1] if self._messages and not self._reasoning else None
        message = last if last and last["role"] == "assistant" else self._assistant()
        message.setdefault("tool_calls", []).append(call)

    def _add_result(self, item: Values, field: str) -> None:
        call_id = text_of(item, "call_id", field)
        content = _content(item.get("output"), f"{field}.output")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _pass_over(self, item: Values, field: str) -> None:
        """What a search found stands in the message after it."""

    def _assistant(self) -> Message:
        """A new message of the assistant, with what was thought before it."""
        message: Message = {"role": "assistant", "content": None}
        if self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning = []
        self._messages.append(message)
        return message


def _content(value: object, field: str) -> str | list[Mapping[str, Any]] | None:
    if isinstance(value, str):
        return value
    parts = [_part(part, f"{field}[{i}]") for i, part in enumerate(objects(value, field))]
    if not parts:
        raise wrong(field, "must be a string or a list of parts")
    return content_of(parts)


def _part(part: Values, field: str) -> dict[str, Any]:
    kind = word_of(part, "type", _TEXTS, field)
    return text_part(part, text_of(part, _TEXTS[kind], field))


def _message_item(role: str, text: str) -> Values:
    return {
        "type": "message",
        "role": role,
        "content": [{"type": "input_text", "text": text}],
    }


def chat_format(value: object) -> object:
    """`text.format` as the `response_format` of a chat."""
    if value is None:
        return None
    form = one_object(value, "text.format")
    if form.get("type") != "json_schema":
        return form
    names = ("name", "description", "schema", "strict")
    schema = {name: form[name] for name in names if form.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def answer_messages(items: Sequence[Values]) -> list[Message]:
    """What an answer said, as the messages that a later request goes on from."""
    reader = _Reader()
    for index, item in enumerate(items):
        reader.add(item, f"output[{index}]")
    return reader.end()
