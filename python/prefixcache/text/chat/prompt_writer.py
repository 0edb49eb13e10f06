"""Messages and tools to the prompt's text, in the form that a model's template shows wholly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefixcache.text.chat.calls.formats import PHI4_MINI, ToolFormat
from prefixcache.text.chat.harmony.turns import harmony_messages
from prefixcache.text.chat.prompted_tools import phi_messages, prompted
from prefixcache.text.chat.tools import Tool
from prefixcache.text.tokenization.chat_template import ChatTemplate, plain_message

_Message = dict[str, Any]

# What gpt-oss knows for efforts of other models.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


class PromptWriter:
    """Writes prompts by one template. Calls of earlier answers that it does not show become text.

    `tools` is the format of calls, None where the template writes messages in channels or where the
    format is not known.
    """

    def __init__(
        self, template: ChatTemplate, tools: ToolFormat | None, *, is_harmony: bool = False
    ) -> None:
        self._template = template
        self._tools = tools
        self._shows_tools = "tools" in template.variables
        # Some templates name the reasoning of earlier answers so.
        self._reads_thinking = ".thinking" in template.source
        self._write = self._write_harmony if is_harmony else self._write_plain

    def write(self, messages: Sequence[_Message], tools: Sequence[Tool], **options: Any) -> str:
        """The prompt. `options` are those of `ChatTemplate.render`, with `variables`."""
        return self._write(messages, tools, options)

    def _write_harmony(
        self, messages: Sequence[_Message], tools: Sequence[Tool], options: _Message
    ) -> str:
        variables = {**options.pop("variables")}
        effort = variables.get("reasoning_effort")
        if isinstance(effort, str):
            variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
        specs = [_with_description(tool.spec) for tool in tools]
        written = harmony_messages(messages)
        return self._template.render(written, tools=specs, variables=variables, **options)

    def _write_plain(
        self, messages: Sequence[_Message], tools: Sequence[Tool], options: _Message
    ) -> str:
        if self._reads_thinking:
            messages = [_with_thinking(message) for message in messages]
        if self._shows_tools:
            if self._tools is not None and "tool_calls" not in self._template.for_tools:
                messages = [_with_calls_as_text(one, self._tools) for one in _plain(messages)]
            return self._template.render(messages, tools=[tool.spec for tool in tools], **options)
        if self._tools is PHI4_MINI:
            written = phi_messages(_plain(messages), tools, PHI4_MINI.text)
        else:
            written = prompted(_plain(messages), tools)
        return self._template.render(written, **options)


def _plain(messages: Sequence[_Message]) -> list[_Message]:
    return [plain_message(one, f"messages[{index}]") for index, one in enumerate(messages)]


def _with_calls_as_text(message: _Message, tools: ToolFormat) -> _Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{message.get('content', '')}{tools.text(calls)}"}


def _with_thinking(message: _Message) -> _Message:
    thought = message.get("reasoning_content")
    return {**message, "thinking": thought} if thought else message


def _with_description(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """gpt-oss's template fails on a function without one."""
    function = spec["function"]
    return {**spec, "function": {**function, "description": function.get("description") or ""}}
