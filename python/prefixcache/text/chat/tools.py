"""The tools of a request and which of them an answer may or must call, checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from prefixcache.config.checked import is_mapping, shown
from prefixcache.exceptions import wrong
from prefixcache.text.chat.parts import one_object, text_of

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments.

    `spec` is the tool as the request has it, which templates show. With `strict` a schema of which
    anything cannot be kept is refused. `index` is its place in the request.
    """

    index: int
    name: str
    parameters: Mapping[str, Any]
    spec: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a model is shown, and what its answer does with them.

    With `mode` "none" it calls none, with "auto" what it likes, with "required" at least one.
    `callable_tools` are those it may call; `parallel` allows more than one call.
    """

    tools: tuple[Tool, ...] = ()
    callable_tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    parallel: bool = True


NO_TOOLS = ToolUse()


def read_tool_use(
    tools: Sequence[Any] | None, choice: object = None, *, parallel: bool = True
) -> ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's chat completions.

    A choice is "none", "auto", "required", a function by its name, or OpenAI's "allowed_tools".
    Without one it is "auto". Raises `InvalidRequestError`, naming the field, for a tool that is no
    function, names that are wrong or come twice, and a choice that no tool fits.
    """
    listed = _read_tools(tools or ())
    mode, names = _read_choice(choice)
    if not listed:
        if mode == "required":
            raise wrong("tool_choice", "needs tools to choose from")
        return NO_TOOLS
    callable_tools = listed if names is None else _chosen(listed, names)
    is_named = is_mapping(choice) and choice.get("type") == "function"
    return ToolUse(listed, callable_tools, mode, parallel and not is_named)


def shown_tool(index: int, spec: Mapping[str, Any]) -> Tool:
    """A tool that templates show and that is never called."""
    function = spec["function"]
    return Tool(index, function["name"], function.get("parameters") or _NO_PARAMETERS, spec)


def _read_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        message = f"may have at most {MAX_TOOLS} entries, got {len(tools)}"
        raise wrong("tools", message, code="too_long")
    read = tuple(_read_tool(tool, index) for index, tool in enumerate(tools))
    name, times = Counter(tool.name for tool in read).most_common(1)[0] if read else ("", 0)
    if times > 1:
        raise wrong("tools", f"has {times} functions named {name!r}")
    return read


def _read_tool(value: object, index: int) -> Tool:
    field = f"tools[{index}]"
    tool = one_object(value, field)
    if tool.get("type") not in (None, "function"):
        raise wrong(f"{field}.type", f"must be 'function', got {shown(tool['type'])}")
    function = one_object(tool.get("function"), f"{field}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(
            f"{field}.function.name",
            f"must be 1 to 128 letters, digits, '_', '-' and '.', got {shown(name)}",
        )
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise wrong(f"{field}.function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    schema = one_object(parameters, f"{field}.function.parameters")
    if schema.get("type", "object") != "object":
        raise wrong(f"{field}.function.parameters.type", "must be 'object'")
    return Tool(index, name, schema, tool, strict=function.get("strict") is True)


def _read_choice(choice: object) -> tuple[Mode, list[str] | None]:
    """The mode, and the names of those that may be called where not all may."""
    if choice is None:
        return "auto", None
    if choice in ("none", "auto", "required"):
        return choice, None
    if is_mapping(choice):
        if choice.get("type") == "function":
            return "required", [_name_of(choice, "tool_choice")]
        if choice.get("type") == "allowed_tools":
            return _read_allowed(
                one_object(choice.get("allowed_tools"), "tool_choice.allowed_tools")
            )
    raise wrong(
        "tool_choice",
        "must be 'none', 'auto', 'required' or an object that names a function, "
        f"got {shown(choice)}",
    )


def _read_allowed(allowed: Mapping[str, Any]) -> tuple[Mode, list[str]]:
    field = "tool_choice.allowed_tools"
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{field}.mode", f"must be 'auto' or 'required', got {shown(mode)}")
    if not isinstance(tools, list) or not tools:
        raise wrong(f"{field}.tools", "must be a list that is not empty")
    named = enumerate(cast("list[object]", tools))
    return mode, [_name_of(tool, f"{field}.tools[{index}]") for index, tool in named]


def _name_of(value: object, field: str) -> str:
    function = one_object(one_object(value, field).get("function"), f"{field}.function")
    return text_of(function, "name", f"{field}.function")


def _chosen(tools: Sequence[Tool], names: Collection[str]) -> tuple[Tool, ...]:
    by_name = {tool.name: tool for tool in tools}
    missing = next((name for name in names if name not in by_name), None)
    if missing is not None:
        raise wrong("tool_choice", f"names {shown(missing)}, which is none of tools")
    return tuple(by_name[name] for name in dict.fromkeys(names))
