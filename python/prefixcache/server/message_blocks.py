"""The content blocks of `/v1/messages` as messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import to_json

from prefixcache.checked import shown
from prefixcache.server.parts import (
    Values,
    content_of,
    objects,
    one_object,
    text_of,
    text_part,
    wrong,
)

Message = dict[str, Any]


def system_message(system: object) -> list[Message]:
    """`system`: a text or blocks of text, as a message if there is any."""
    if system is None or system == "":
        return []
    content = content_of(_texts(system, "system"))
    return [] if content is None else [{"role": "system", "content": content}]


def chat_messages(messages: object) -> list[Message]:
    """`messages`. Raises `InvalidRequestError`, naming the block, for what is not read."""
    found: list[Message] = []
    for index, message in enumerate(objects(messages, "messages")):
        field = f"messages[{index}]"
        role = message.get("role")
        if role == "system":
            content = content_of(_texts(message.get("content"), f"{field}.content"))
            found.append({"role": "system", "content": content})
        elif role == "user":
            found += _user(message.get("content"), f"{field}.content")
        elif role == "assistant":
            found.append(_assistant(message.get("content"), f"{field}.content"))
        else:
            raise wrong(f"{field}.role", f"must be 'user' or 'assistant', got {shown(role)}")
    if not found:
        raise wrong("messages", "must hold a message")
    return found


def _user(content: object, field: str) -> list[Message]:
    """Results of tools come first, each as a message of its own."""
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    for block, place in _blocks(content, field):
        if block.get("type") == "tool_result":
            results.append(_result(block, place))
        else:
            parts.append(_text(block, place, "'text' or 'tool_result'"))
    said = [{"role": "user", "content": content_of(parts)}] if parts else []
    if not (results or said):
        raise wrong(field, "must not be empty")
    return results + said


def _result(block: Values, field: str) -> Message:
    call_id = text_of(block, "tool_use_id", field)
    content = block.get("content")
    parts = [] if content is None else _texts(content, f"{field}.content")
    marked = text_part(block, "") if not parts else {**parts[-1], **_marks(block)}
    told = content_of([*parts[:-1], marked])
    return {"role": "tool", "tool_call_id": call_id, "content": told}


def _marks(block: Values) -> Mapping[str, Any]:
    return {name: value for name, value in text_part(block, "").items() if name not in _TEXT}


def _assistant(content: object, field: str) -> Message:
    message: Message = {"role": "assistant", "content": None}
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block, place in _blocks(content, field):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(text_of(block, "thinking", place))
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block, place))
        elif kind != "redacted_thinking":
            parts.append(_text(block, place, "'text', 'thinking' or 'tool_use'"))
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    message["content"] = content_of(parts)
    return message


def _call(block: Values, field: str) -> dict[str, Any]:
    arguments = to_json(one_object(block.get("input", {}), f"{field}.input")).decode()
    function = {"name": text_of(block, "name", field), "arguments": arguments}
    return {"id": text_of(block, "id", field), "type": "function", "function": function}


def _texts(content: object, field: str) -> list[dict[str, Any]]:
    return [_text(block, place, "'text'") for block, place in _blocks(content, field)]


def _text(block: Values, field: str, known: str) -> dict[str, Any]:
    if block.get("type") != "text":
        kind = shown(block.get("type"))
        raise wrong(f"{field}.type", f"must be {known}, the kinds that are read, got {kind}")
    return text_part(block, text_of(block, "text", field))


def _blocks(content: object, field: str) -> list[tuple[Values, str]]:
    if isinstance(content, str):
        return [({"type": "text", "text": content}, field)]
    if content is None:
        raise wrong(field, "must be a string or a list of blocks")
    return [(block, f"{field}[{i}]") for i, block in enumerate(objects(content, field))]


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
    kind = choice.get("type")
    choices: dict[object, Callable[[], object]] = {
        "none": lambda: "none",
        "auto": lambda: "auto",
        "any": lambda: "required",
        "tool": lambda: {
            "type": "function",
            "function": {"name": text_of(choice, "name", "tool_choice")},
        },
    }
    if not isinstance(kind, str) or kind not in choices:
        known = ", ".join(map(str, choices))
        raise wrong("tool_choice.type", f"must be one of {known}, got {shown(kind)}")
    return choices[kind](), choice.get("disable_parallel_tool_use") is not True


_TEXT = ("type", "text")
