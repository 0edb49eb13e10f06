"""Tools for models whose template has no variable for them: they become parts of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prefixcache.text.chat.calls.formats import PHI4_MINI, SMOLLM2, ToolFormat
from prefixcache.text.chat.tools import Tool

_Messages = list[dict[str, Any]]

_INSTRUCTIONS = """\
You can call functions. These are the functions, each with the JSON schema of its parameters:
<tools>{tools}</tools>
To call some of them, answer with nothing but a list of calls in this form:
<tool_call>[
{{"name": "<name>", "arguments": {{"<parameter>": "<value>"}}}}
]</tool_call>
What they return follows in <tool_response></tool_response>. Answer in plain text where no call \
is needed."""
_PHI_SYSTEM = "You are a helpful assistant with some tools."


def with_calls_as_text(
    message: Mapping[str, Any], tools: ToolFormat, before: str = ""
) -> dict[str, Any]:
    """The message, its calls in their format behind its content, with `before` between the two."""
    written = dict(message)
    calls = written.pop("tool_calls", None)
    if calls:
        said = written.get("content", "")
        written["content"] = f"{said}{before if said else ''}{tools.text(calls)}"
    return written


def prompted(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], role: str = "system"
) -> _Messages:
    """The messages, with plain text content, for a template that shows roles and content alone.

    The tools are a part of the first message of this role: "system" or "user".
    """
    written: _Messages = []
    for index, message in enumerate(messages):
        result = message.get("role") == "tool"
        if result and index and messages[index - 1].get("role") == "tool":
            written[-1]["content"] += "\n" + _result(message)
        elif result:  # many templates want user and assistant by turns
            written.append({"role": "user", "content": _result(message)})
        else:
            written.append(with_calls_as_text(message, SMOLLM2, "\n"))
    return _with_tools(written, tools, role) if tools else written


def phi_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> _Messages:
    """The messages, with plain text content, for Phi-4-mini's template.

    It shows the `tools` of a system message, and results by their role.
    """
    written = [with_calls_as_text(message, PHI4_MINI) for message in messages]
    for message in written:
        if message.get("role") == "tool":
            message["role"] = "tool_response"
    if not tools:
        return written
    if not written or written[0].get("role") != "system":
        written.insert(0, {"role": "system", "content": _PHI_SYSTEM})
    written[0]["tools"] = _json([tool.spec["function"] for tool in tools])
    return written


def _with_tools(messages: _Messages, tools: Sequence[Tool], role: str) -> _Messages:
    """In the first question, or in a system message at the beginning."""
    text = _INSTRUCTIONS.format(tools=_json([tool.spec for tool in tools]))
    at = next((i for i, message in enumerate(messages) if message.get("role") == role), None)
    if at is None or (at and role == "system"):
        return [{"role": role, "content": text}, *messages]
    said = messages[at].get("content", "")
    parts = (said, text) if role == "system" else (text, said)
    messages[at] = {**messages[at], "content": "\n\n".join(parts)}
    return messages


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message.get('content', '')}\n</tool_response>"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
