"""Messages and tools to the prompt's text, in the form that a model's template shows wholly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefixcache.exceptions import InvalidRequestError
from prefixcache.text.chat.call_ids import CallIds
from prefixcache.text.chat.calls.formats import PHI4_MINI, ToolFormat
from prefixcache.text.chat.harmony.turns import harmony_messages, single_calls
from prefixcache.text.chat.prompted_tools import phi_messages, prompted, with_calls_as_text
from prefixcache.text.chat.tools import Tool
from prefixcache.text.chat.turn_order import TurnOrder
from prefixcache.text.tokenization.chat_template import ChatTemplate, plain_message

_Message = dict[str, Any]
# Messages, and tools as the template reads them.
_Form = tuple[list[_Message], list[Mapping[str, Any]]]

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
        self._is_harmony = is_harmony
        # Some templates fail on a function without parameters.
        self._needs_parameters = ".parameters.properties" in template.for_tools
        self._role_of_tools = "system" if _takes_system_messages(template) else "user"
        self._rewrites = [change for signs, change in _REWRITES if signs(template.source)]
        self._form = self._harmony_form if is_harmony else self._plain_form
        self._ids, self._turns = CallIds(template), TurnOrder(template)

    def write(self, messages: Sequence[_Message], tools: Sequence[Tool], **options: Any) -> str:
        """The prompt. `options` are those of `ChatTemplate.render`, with `variables`."""
        plain = [plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        turns, specs = self._form(self._ids.fitted(plain), tools)
        options = {**options, "tools": specs, "variables": self._variables(options["variables"])}
        return self._template.render(self._turns.fitted(turns, options), **options)

    def _variables(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        effort = given.get("reasoning_effort")
        if not self._is_harmony or not isinstance(effort, str):
            return given
        return {**given, "reasoning_effort": _EFFORTS.get(effort, effort)}

    def _harmony_form(self, messages: list[_Message], tools: Sequence[Tool]) -> _Form:
        return harmony_messages(messages), [_whole(tool.spec) for tool in tools]

    def _plain_form(self, messages: list[_Message], tools: Sequence[Tool]) -> _Form:
        for rewrite in self._rewrites:
            messages = rewrite(messages)
        if self._template.shows_tools:
            if self._tools is not None and "tool_calls" not in self._template.for_tools:
                messages = [with_calls_as_text(message, self._tools) for message in messages]
            if self._tools is not None and not self._tools.many:
                messages = single_calls(messages)
            needs = self._needs_parameters
            return messages, [_whole(tool.spec) if needs else tool.spec for tool in tools]
        if self._tools is PHI4_MINI:
            return phi_messages(messages, tools), []
        return prompted(messages, tools, self._role_of_tools), []


def _takes_system_messages(template: ChatTemplate) -> bool:
    """Some refuse them, as Mistral's first ones do."""
    try:
        template.render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    except InvalidRequestError:
        return False
    return True


def _with_thinking(messages: list[_Message]) -> list[_Message]:
    """Some templates name the reasoning of earlier answers so."""
    thoughts = [message.get("reasoning_content") for message in messages]
    return [
        {**message, "thinking": thought} if thought else message
        for message, thought in zip(messages, thoughts, strict=True)
    ]


def _with_parts(messages: list[_Message]) -> list[_Message]:
    """Mistral's templates read reasoning as a part of the content.

    The last message stays as it is: it may be continued.
    """
    return [*map(_in_parts, messages[:-1]), *messages[-1:]]


def _in_parts(message: _Message) -> _Message:
    thought, content = message.get("reasoning_content"), message.get("content")
    if not thought or message.get("role") != "assistant":
        return message
    parts = [{"type": "thinking", "thinking": thought}]
    parts += [{"type": "text", "text": content}] if content else []
    return {**message, "content": tuple(parts)}


def _with_responses(messages: list[_Message]) -> list[_Message]:
    """Gemma 4's first templates read results, and what follows, in the message of the calls."""
    written: list[_Message] = []
    for message in messages:
        before = written[-1] if written else {}
        role = message.get("role")
        if role == "tool" and before.get("tool_calls"):
            response = {"name": message["name"], "response": message["content"]}
            before["tool_responses"] = [*before.get("tool_responses", ()), response]
        elif role == "assistant" and before.get("tool_responses") and not message.get("tool_calls"):
            before["content"] = "\n".join(filter(None, (before["content"], message["content"])))
        else:
            written.append({**message})
    return written


_Rewrite = Callable[[list[_Message]], list[_Message]]
# What a template's text tells of the fields that it reads.
_REWRITES: tuple[tuple[Callable[[str], bool], _Rewrite], ...] = (
    (lambda source: ".thinking" in source, _with_thinking),
    (lambda source: "['thinking']" in source, _with_parts),
    (lambda source: "tool_responses" in source and "tool_call_id" not in source, _with_responses),
)


def _whole(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the fields on whose lack gpt-oss's template fails, and others."""
    function: dict[str, Any] = {"parameters": {"type": "object", "properties": {}}}
    function |= spec["function"]
    return {**spec, "function": {**function, "description": function.get("description") or ""}}
