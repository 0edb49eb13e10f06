"""The content blocks of `/v1/messages` as messages of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefixcache.config.checked import shown
from prefixcache.exceptions import wrong
from prefixcache.server.http.json_text import object_json
from prefixcache.server.jobs.caching import Marked, Place
from prefixcache.text.chat.parts import (
    Values,
    content_of,
    objects,
    one_object,
    text_of,
    word_of,
)

Message = dict[str, Any]
_Block = tuple[Values, str]  # and the field that it is


class Conversation:
    """`system` and `messages` as messages of a chat, and the blocks that carry cache_control.

    Raises `InvalidRequestError`, naming the block, for what is not read.
    """

    def __init__(self, system: object, messages: object) -> None:
        self.messages: list[Message] = []
        self.marked: list[Marked] = []
        if system is not None and system != "":
            self._add_texts("system", _blocks(system, "system"))
        for index, message in enumerate(objects(messages, "messages")):
            self._add(message, f"messages[{index}]")
        for message in self.messages:
            _join_parts(message)
        if self.messages and self.messages[-1] == {"role": "assistant", "content": None}:
            self.messages.pop()  # the beginning of an answer that says nothing yet
        if all(message["role"] == "system" for message in self.messages):
            raise wrong("messages", "must hold a message")

    @property
    def last_block(self) -> Place:
        """The block that a cache_control of the whole request marks."""
        return Place("messages", len(self.messages) - 1)

    def _add(self, message: Values, field: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            self._add_texts(role, _blocks(content, f"{field}.content"))
        elif role == "user":
            self._add_user(content, f"{field}.content")
        elif role == "assistant":
            self._add_assistant(content, f"{field}.content")
        else:
            raise wrong(f"{field}.role", f"must be 'user' or 'assistant', got {shown(role)}")

    def _message(self, role: str) -> Message:
        """What a turn adds to: consecutive turns of a role are one message, as Anthropic says."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]

    def _add_texts(self, role: str, blocks: list[_Block], kinds: str = "'text'") -> None:
        for block, place in blocks:
            self._add_text(self._message(role), block, place, kinds)

    def _add_user(self, content: object, field: str) -> None:
        """Results of tools come first, each as a message of its own."""
        blocks = _blocks(content, field)
        if not blocks:
            raise wrong(field, "must not be empty")
        for block, place in blocks:
            if block.get("type") == "tool_result":
                self._add_result(block, place)
        said = [pair for pair in blocks if pair[0].get("type") != "tool_result"]
        self._add_texts("user", said, "'text' or 'tool_result'")

    def _add_result(self, block: Values, field: str) -> None:
        call_id, content = text_of(block, "tool_use_id", field), block.get("content")
        message: Message = {"role": "tool", "tool_call_id": call_id, "content": []}
        self.messages.append(message)
        for inner, place in [] if content is None else _blocks(content, f"{field}.content"):
            self._add_text(message, inner, place)
        self._mark(block, field, None)

    def _add_assistant(self, content: object, field: str) -> None:
        blocks, message = _blocks(content, field), self._message("assistant")
        for block, place in blocks:
            kind = block.get("type")
            if kind == "thinking":
                thought = text_of(block, "thinking", place)
                message.setdefault("reasoning_content", []).append(thought)
            elif kind == "tool_use":
                message.setdefault("tool_calls", []).append(_call(block, place))
                self._mark(block, place, None)  # the end of the text before it
            elif kind != "redacted_thinking":
                self._add_text(message, block, place, "'text', 'thinking' or 'tool_use'")

    def _add_text(self, message: Message, block: Values, field: str, kinds: str = "'text'") -> None:
        """Adds a part to the last message."""
        if block.get("type") != "text":
            kind = shown(block.get("type"))
            raise wrong(f"{field}.type", f"must be {kinds}, the kinds that are read, got {kind}")
        self._mark(block, field, len(message["content"]))
        message["content"].append({"type": "text", "text": text_of(block, "text", field)})

    def _mark(self, block: Values, field: str, part: int | None) -> None:
        control = block.get("cache_control")
        if control is not None:
            place = Place("messages", len(self.messages) - 1, part)
            self.marked.append(Marked(place, f"{field}.cache_control", control))


def _join_parts(message: Message) -> None:
    """Once for all turns of the message: they may be thousands, and one of them megabytes."""
    content = content_of(message["content"])
    message["content"] = "" if content is None and message["role"] == "tool" else content
    if "reasoning_content" in message:
        message["reasoning_content"] = "\n".join(message["reasoning_content"])


def _call(block: Values, field: str) -> dict[str, Any]:
    arguments = object_json(one_object(block.get("input", {}), f"{field}.input")).decode()
    function = {"name": text_of(block, "name", field), "arguments": arguments}
    return {"id": text_of(block, "id", field), "type": "function", "function": function}


def _blocks(content: object, field: str) -> list[_Block]:
    if isinstance(content, str):
        return [({"type": "text", "text": content}, field)]
    if content is None:
        raise wrong(field, "must be a string or a list of blocks")
    return [(block, f"{field}[{i}]") for i, block in enumerate(objects(content, field))]


def marked_tools(value: object) -> list[Marked]:
    """The tools that carry cache_control."""
    return [
        Marked(Place("tools", index), f"tools[{index}].cache_control", tool["cache_control"])
        for index, tool in enumerate(objects(value, "tools"))
        if tool.get("cache_control") is not None
    ]


def chat_tools(value: object) -> list[dict[str, Any]]:
    """`tools` in the form of a chat. Raises `InvalidRequestError` for tools that run elsewhere."""
    return [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(objects(value, "tools"))]


def _chat_tool(tool: Values, field: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise wrong(f"{field}.type", f"must be 'custom', got {shown(tool.get('type'))}")
    function = {"name": text_of(tool, "name", field)}
    function |= {"parameters": one_object(tool.get("input_schema"), f"{field}.input_schema")}
    if tool.get("description") is not None:
        function["description"] = text_of(tool, "description", field)
    return {"type": "function", "function": function}


def chat_tool_choice(value: object) -> tuple[object, bool]:
    """`tool_choice` in the form of a chat, and whether several calls may be made at once."""
    if value is None:
        return None, True
    choice = one_object(value, "tool_choice")
    choices: dict[str, Callable[[], object]] = {
        "none": lambda: "none",
        "auto": lambda: "auto",
        "any": lambda: "required",
        "tool": lambda: {
            "type": "function",
            "function": {"name": text_of(choice, "name", "tool_choice")},
        },
    }
    kind = word_of(choice, "type", choices, "tool_choice")
    return choices[kind](), choice.get("disable_parallel_tool_use") is not True
