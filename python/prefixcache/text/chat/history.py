"""Messages of a request as chat templates expect them: calls and results of tools, reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from prefixcache._core import parse_json
from prefixcache.config.checked import shown
from prefixcache.exceptions import wrong
from prefixcache.text.chat.parts import one_object

# Of the arguments of one call.
_MAX_VALUES = 2**16


class _Arguments(dict[str, Any]):
    """Arguments of a call: templates read an object, and some write it as text, which is JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return f"{self}{after}"

    def __radd__(self, before: str) -> str:
        return f"{before}{self}"


def read_messages(
    messages: Sequence[Mapping[str, Any]], *, developer: str = "developer"
) -> list[dict[str, Any]]:
    """The messages; arguments of calls are objects, and results have the name of their tool.

    `developer` is the role that messages of that role get.

    Arguments whose text is no JSON object are shown as an empty one: an answer that was cut off
    within a call must not end its conversation.

    Raises `InvalidRequestError`, naming the field, for contents and calls that are none, and for a
    result of a call that no message before it made.
    """
    names: dict[str, str] = {}
    return [
        _read_message(message, f"messages[{index}]", names, developer)
        for index, message in enumerate(messages)
    ]


def _read_message(
    message: Mapping[str, Any], field: str, names: dict[str, str], developer: str
) -> dict[str, Any]:
    read = dict(one_object(message, field))
    content = read.get("content")
    if not isinstance(content, str | list | None):  # some templates would show any object
        raise wrong(f"{field}.content", f"must be text or a list of parts, got {shown(content)}")
    if read.get("role") == "developer":
        read["role"] = developer
    if read.get("role") == "tool":
        _read_result(read, field, names)
    _read_reasoning(read, field)
    if read.get("role") == "assistant" and read.get("content") is None:
        refusal = read.get("refusal")
        read["content"] = refusal if isinstance(refusal, str) else ""  # templates add it to text
    calls = read.pop("tool_calls", None)
    if calls is None or calls == []:
        if read.get("content") is None and read.get("role") in ("system", "developer", "user"):
            raise wrong(f"{field}.content", "must be text or a list of parts, and is missing")
        return read
    if read.get("role") != "assistant":
        raise wrong(f"{field}.tool_calls", "is for messages of the role 'assistant'")
    if not isinstance(calls, list):
        raise wrong(f"{field}.tool_calls", f"must be a list, got {shown(calls)}")
    listed = enumerate(cast("list[object]", calls))
    read["tool_calls"] = [_read_call(c, f"{field}.tool_calls[{i}]", names) for i, c in listed]
    return read


def _read_call(value: object, field: str, names: dict[str, str]) -> dict[str, Any]:
    call = one_object(value, field)
    if call.get("type") not in (None, "function"):
        raise wrong(f"{field}.type", f"must be 'function', got {shown(call['type'])}")
    function = one_object(call.get("function"), f"{field}.function")
    call_id, name = call.get("id"), function.get("name")
    if not isinstance(call_id, str) or not call_id:
        raise wrong(f"{field}.id", f"must be a string, got {shown(call_id)}")
    if not isinstance(name, str):  # an answer may have called "" too
        raise wrong(f"{field}.function.name", f"must be a string, got {shown(name)}")
    names[call_id] = name
    arguments = _arguments(function.get("arguments"), f"{field}.function.arguments")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _arguments(value: object, field: str) -> _Arguments:
    if isinstance(value, Mapping):
        return _Arguments(cast("Mapping[str, Any]", value))
    if value is None or value == "":
        return _Arguments()
    if not isinstance(value, str):
        raise wrong(field, f"must be a string, got {shown(value)}")
    try:
        read = parse_json(value.encode(), max_numbers=_MAX_VALUES, max_others=_MAX_VALUES)
    except ValueError as error:
        if error.args[0] in ("numbers", "others"):
            raise wrong(field, f"has {error.args[1]}", code="too_many_values") from None
        read = None
    return _Arguments(cast("dict[str, Any]", read) if isinstance(read, dict) else {})


def _read_result(message: dict[str, Any], field: str, names: Mapping[str, str]) -> None:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str):
        raise wrong(f"{field}.tool_call_id", f"must be a string, got {shown(call_id)}")
    if call_id not in names:
        raise wrong(
            f"{field}.tool_call_id",
            f"must be the id of a call in a message before it, got {shown(call_id)}",
        )
    if message.get("name") is None:
        message["name"] = names[call_id]
    if message.get("content") is None:
        message["content"] = ""


def _read_reasoning(message: dict[str, Any], field: str) -> None:
    """Clients send it back under either name; templates read one of them."""
    for name, other in (("reasoning_content", "reasoning"), ("reasoning", "reasoning_content")):
        text = message.get(name)
        if text is None:
            continue
        if not isinstance(text, str):
            raise wrong(f"{field}.{name}", f"must be a string, got {shown(text)}")
        if message.get(other) is None:
            message[other] = text
