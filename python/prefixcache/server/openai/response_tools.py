"""The tools of `/v1/responses` as functions of a chat.

Clients run the functions of a namespace and custom tools, so each is a function here, and its calls
are given back as what the client knows. Tools that OpenAI's server runs are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from prefixcache.config.checked import is_mapping, is_object, shown
from prefixcache.exceptions import wrong
from prefixcache.server.jobs.structured_fields import stated_output
from prefixcache.text.chat.parts import Values, objects, one_object, text_of, word_of
from prefixcache.types.structured_output import StructuredOutput

# Those that OpenAI's server runs, and those of its clients that are no functions.
_LEFT_OUT = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
_KINDS = ("function", "custom", "namespace")
_INPUT = "input"
# Of one request: each is compiled by itself.
_MAX_GRAMMARS = 16

# Characters before a text, spaces and line breaks among them; behind more it comes at its end.
_MOST_BEFORE = 64
_BEGIN = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
# A character may be written as two escapes, which must not be parted.
_CERTAIN = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)
_LONGEST_CHARACTER = 12


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def item(self, call_id: str) -> dict[str, Any]:
        """The first members of the item of a call."""
        kind = "custom_tool_call" if self.is_custom else "function_call"
        of = {} if self.namespace is None else {"namespace": self.namespace}
        text = _INPUT if self.is_custom else "arguments"
        return {"type": kind, "call_id": call_id, "name": self.name, **of, text: ""}


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of one request.

    `functions` are those of a chat, and `by_function` what each stands for. `fields` are the names
    in errors of what a chat calls otherwise, `grammars` those of custom tools with their fields,
    and `left_out` the kinds of the tools that nobody runs here.
    """

    functions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    by_function: dict[str, ClientTool] = field(default_factory=dict[str, ClientTool])
    fields: dict[str, str] = field(default_factory=dict[str, str])
    grammars: dict[str, StructuredOutput] = field(default_factory=dict[str, StructuredOutput])
    left_out: dict[str, None] = field(default_factory=dict[str, None])

    def add(self, tool: Values, place: str, namespace: str | None = None) -> None:
        """Takes a tool at a `place` of the request. Raises `InvalidRequestError`."""
        if namespace is None and tool.get("type") in _LEFT_OUT:
            self.left_out[tool["type"]] = None
            return
        kind = word_of(tool, "type", _KINDS if namespace is None else _KINDS[:2], place)
        if kind == "namespace":
            name = text_of(tool, "name", place)
            for index, inner in enumerate(objects(tool.get("tools"), f"{place}.tools")):
                self.add(inner, f"{place}.tools[{index}]", name)
            return
        chat_field = f"tools[{len(self.functions)}].function"
        if kind == "custom":
            self.fields[f"{chat_field}.parameters"] = f"{place}.format.definition"
            tool = {**tool, "parameters": self._text_parameter(tool, place)}
        self.fields[chat_field] = place
        given = ("description", "parameters", "strict")
        function = {name: tool[name] for name in given if tool.get(name) is not None}
        name = tool.get("name")
        if isinstance(name, str):  # a chat refuses other names
            client_tool = ClientTool(name, namespace, kind == "custom")
            name = function_name(name, namespace)
            self.by_function[name] = client_tool
        self.functions.append({"type": "function", "function": {"name": name, **function}})

    def _text_parameter(self, tool: Values, place: str) -> Mapping[str, Any]:
        """The schema of a custom tool's only argument; models are shown its grammar."""
        text: dict[str, Any] = {"type": "string"}
        form = one_object(tool.get("format") or {"type": "text"}, f"{place}.format")
        if word_of(form, "type", ("text", "grammar"), f"{place}.format") == "grammar":
            syntax = word_of(form, "syntax", ("lark", "regex"), f"{place}.format")
            grammar = text_of(form, "definition", f"{place}.format")
            if len(self.grammars) == _MAX_GRAMMARS:
                problem = f"may have grammars in at most {_MAX_GRAMMARS} tools"
                raise wrong("tools", problem, code="too_long")
            kind = "regex" if syntax == "regex" else "grammar"
            definition, output = stated_output(f"{place}.format.definition", kind, grammar)
            self.grammars[definition] = output
            text["description"] = f"Follows this grammar ({syntax}):\n{grammar}"
            if syntax == "regex":
                text["pattern"] = f"^(?:{grammar})$"
        return {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}


def read_tools(value: object) -> ResponseTools:
    """`tools` of a request. Raises `InvalidRequestError`, naming the place."""
    tools = ResponseTools()
    for index, tool in enumerate(objects(value, "tools")):
        tools.add(tool, f"tools[{index}]")
    return tools


def function_name(name: str, namespace: object) -> str:
    """The name in a chat of a namespace's function; names of namespaces may end in underscores."""
    if not isinstance(namespace, str):
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def chat_tool_choice(value: object) -> object:
    """`tool_choice` in the form of a chat."""
    if not is_mapping(value):
        return value
    choice = one_object(value, "tool_choice")
    if choice.get("type") in ("function", "custom"):
        return _named(choice, "tool_choice")
    if choice.get("type") == "allowed_tools":
        tools = objects(choice.get("tools"), "tool_choice.tools")
        named = [_named(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named},
        }
    kind = shown(choice.get("type"))
    raise wrong("tool_choice.type", f"must be 'function', 'custom' or 'allowed_tools', got {kind}")


def _named(tool: Values, place: str) -> dict[str, Any]:
    word_of(tool, "type", ("function", "custom"), place)
    name = function_name(text_of(tool, "name", place), tool.get("namespace"))
    return {"type": "function", "function": {"name": name}}


def chat_call(item: Values, place: str) -> dict[str, Any]:
    """The function and arguments of a call's item, as a chat has them."""
    is_custom = item.get("type") == "custom_tool_call"
    text = text_of(item, _INPUT if is_custom else "arguments", place)
    return {
        "name": function_name(text_of(item, "name", place), item.get("namespace")),
        "arguments": json.dumps({_INPUT: text}, ensure_ascii=False) if is_custom else text,
    }


class InputText:
    """The text of a custom tool's call, out of its arguments as they come."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        # What is not certain yet; None where no text is to come any more.
        self._held: str | None = ""
        self._has_begun = False
        self._length = 0

    def push(self, arguments: str) -> str:
        """The text that is certain with these further arguments; none after what is no JSON."""
        self._arguments.append(arguments)
        if self._held is None:
            return ""
        held = self._held + arguments
        if not self._has_begun and (begin := _BEGIN.match(held)):
            self._has_begun, held = True, held[begin.end() :]
        if not self._has_begun:
            self._held = held if len(held) <= _MOST_BEFORE else None
            return ""
        certain = _CERTAIN.match(held)
        end = certain.end() if certain else 0
        rest = held[end:]
        self._held = None if rest.startswith('"') or len(rest) >= _LONGEST_CHARACTER else rest
        try:
            text = json.loads(f'"{held[:end]}"', strict=False)
        except ValueError:
            self._held = None
            return ""
        self._length += len(text)
        return text

    def end(self) -> str:
        """The rest. What is no object with an input is the input itself."""
        arguments = "".join(self._arguments)
        try:
            value: object = from_json(arguments, allow_partial="trailing-strings")
        except ValueError:
            return "" if self._length else arguments
        text = value.get(_INPUT, "") if is_object(value) else arguments
        return (text if isinstance(text, str) else arguments)[self._length :]
