"""The formats in which models write calls of tools, and how a template shows its own."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefixcache.text.chat.calls.argument_rules import (
    GEMMA_STYLE,
    LFM2_STYLE,
    OLMO3_STYLE,
    QWEN_STYLE,
    SEED_STYLE,
    ArgumentStyle,
)
from prefixcache.text.chat.calls.call_parser import CallMarkers, CallParser
from prefixcache.text.chat.calls.json_calls import JsonCallParser
from prefixcache.text.chat.calls.notation_calls import GemmaCallParser, NotationCallParser
from prefixcache.text.chat.calls.schemas import ToolSchemas
from prefixcache.text.chat.calls.xml_calls import XmlCallParser
from prefixcache.text.chat.grammars import Markers, call_rules, literal
from prefixcache.text.chat.message import MessageParser
from prefixcache.text.chat.tools import ToolUse

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID = "/[A-Za-z0-9]{9}/"  # as `_short_id` makes them
_ID_FIELD, _QUOTE = ', "id": "', '"'


def call_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates refuse other lengths."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format: `opening`, `before`, calls with `between` them, `after`, and `closing`.

    With `repeats` each call has its own markers, `before` and `after`, and `between` stands between
    those. Without `many` an answer holds one call. Calls are JSON with their `arguments` under that
    name, unless they have a `style` of their own; with `bare` an answer may begin with such a call,
    with `named` the name comes first. With `has_ids` an id may stand behind the arguments, or must
    behind the name.
    """

    name: str
    opening: str
    closing: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    repeats: bool = False
    many: bool = True
    bare: bool = False
    named: bool = False
    has_ids: bool = False
    arguments: str = "arguments"
    style: ArgumentStyle | None = None
    new_parser: Callable[..., CallParser] = JsonCallParser
    new_id: Callable[[], str] = call_id

    @property
    def markers(self) -> tuple[str, ...]:
        """What stands around calls, where it may be tokens of its own."""
        return tuple(filter(None, (self.opening, self.closing)))

    def parser(self, use: ToolUse) -> MessageParser:
        """A parser of one answer."""
        markers, tools = CallMarkers(self.opening, self.closing), ToolSchemas(use.tools)
        most = None if use.parallel else 1
        return self.new_parser(markers, tools, self.new_id, most, bare=self.bare, named=self.named)

    def rules(self, use: ToolUse, markers: Markers) -> str:
        """The rule `calls`: what follows the opening marker of the first call."""
        opening, closing = map(markers.terminal, (self.opening, self.closing))
        before, after, between = map(literal, (self.before, self.after, self.between))
        many = self.many and use.parallel
        if self.repeats:
            one = f"{before} call {after} {closing}"
            calls = f"{one} ({between} {opening} {one})*" if many else one
        else:
            more = f"({between} call)*" if many else ""
            calls = f"{before} call {more} {after} {closing}"
        return f"calls: {calls}\n{self._call_rules(use, markers)}"

    def _call_rules(self, use: ToolUse, markers: Markers) -> str:
        if self.style is not None:
            return self.style.rules(use.callable_tools, markers)
        if self.named:
            separator = markers.terminal("[ARGS]")
            if self.has_ids:
                separator = f"{markers.terminal('[CALL_ID]')} {_ID} {separator}"
            return call_rules(use.callable_tools, lambda name: f"{literal(name)} {separator}")
        begin = '{{"name": "{}", "{}": '.format
        an_id = f"({literal(_ID_FIELD)} {_ID} {literal(_QUOTE)})? " if self.has_ids else ""
        return call_rules(
            use.callable_tools,
            lambda name: literal(begin(name, self.arguments)),
            an_id + literal("}"),
        )

    def text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls as they are written, for templates that show none."""
        listed = [self._written(call["function"]) for call in calls]
        if not self.repeats:
            return (
                f"{self.opening}{self.before}{self.between.join(listed)}{self.after}{self.closing}"
            )
        whole = (f"{self.opening}{self.before}{one}{self.after}{self.closing}" for one in listed)
        return self.between.join(whole)

    def _written(self, function: Mapping[str, Any]) -> str:
        if self.style is not None:
            return self.style.text(function["name"], function["arguments"])
        given = json.dumps(function["arguments"], ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        if self.named:
            return f"{function['name']}[ARGS]{given}"
        return f'{{"name": {name}, "{self.arguments}": {given}}}'


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    before="\n",
    after="\n",
    between="\n",
    repeats=True,
)
# A template of Llama shows one call a message, and refuses more.
LLAMA3_JSON = ToolFormat(
    name="llama3_json", opening="<|python_tag|>", bare=True, arguments="parameters", many=False
)
MISTRAL = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    before="[",
    after="]",
    between=", ",
    has_ids=True,
    new_id=_short_id,
)
# Since version 11 of Mistral's tokenizer.
MISTRAL_NAMED = replace(
    MISTRAL, named=True, has_ids=False, before="", after="", between="", repeats=True
)
# Since version 13.
MISTRAL_WITH_IDS = replace(MISTRAL_NAMED, has_ids=True)
SMOLLM2 = ToolFormat(
    name="smollm2",
    opening="<tool_call>",
    closing="</tool_call>",
    before="[\n",
    after="\n]",
    between=",\n",
)
NEMOTRON = ToolFormat(
    name="nemotron_json",
    opening="<TOOLCALL>",
    closing="</TOOLCALL>",
    before="[",
    after="]",
    between=", ",
)
GRANITE = ToolFormat(name="granite", opening="<|tool_call|>", before="[", after="]", between=", ")
PHI4_MINI = replace(GRANITE, name="phi4_mini_json", closing="<|/tool_call|>")
# As vLLM's template for Phi-4-mini asks for calls.
FUNCTOOLS = replace(GRANITE, name="phi4_mini_json", opening="functools")
QWEN3_CODER = replace(HERMES, name="qwen3_coder", style=QWEN_STYLE, new_parser=XmlCallParser)
SEED_OSS = replace(
    QWEN3_CODER,
    name="seed_oss",
    opening="<seed:tool_call>",
    closing="</seed:tool_call>",
    style=SEED_STYLE,
)
LFM2 = ToolFormat(
    name="lfm2",
    opening="<|tool_call_start|>",
    closing="<|tool_call_end|>",
    before="[",
    after="]",
    between=", ",
    style=LFM2_STYLE,
    new_parser=NotationCallParser,
)
OLMO3 = ToolFormat(
    name="olmo3",
    opening="<function_calls>",
    closing="</function_calls>",
    before="\n",
    after="\n",
    between="\n",
    style=OLMO3_STYLE,
    new_parser=NotationCallParser,
)
GEMMA4 = ToolFormat(
    name="gemma4",
    opening="<|tool_call>",
    closing="<tool_call|>",
    repeats=True,
    style=GEMMA_STYLE,
    new_parser=GemmaCallParser,
)

_FORMATS = (
    *(HERMES, LLAMA3_JSON, MISTRAL, SMOLLM2, GRANITE, PHI4_MINI),
    *(QWEN3_CODER, SEED_OSS, LFM2, OLMO3, GEMMA4, NEMOTRON),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {one.name: one for one in _FORMATS}

# What a template holds that shows calls in a format: the first row that it holds wholly counts.
_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), MISTRAL_WITH_IDS),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|python_tag|>",), LLAMA3_JSON),
    (("ipython", '"parameters": '), LLAMA3_JSON),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_list_start|>",), LFM2),
    (("List of tools: [",), LFM2),
    (("<function_calls>",), OLMO3),
    (("<|tool_call>", "call:"), GEMMA4),
    (("<TOOLCALL>",), NEMOTRON),
    (("<|/tool_call|>",), PHI4_MINI),
    (("functools[",), FUNCTOOLS),
    (("<|tool_call|>",), GRANITE),
    (("<seed:tool_call>",), SEED_OSS),
    (("<tool_call>", "<function=", "<parameter="), QWEN3_CODER),
    (("<tool_call>",), HERMES),
)


# Of forms that are not known, where the signs of known ones stand too.
_OTHER_SIGNS = ("<function=", "<arg_key>")


def detected_format(template: str) -> ToolFormat | None:
    """The format of a template that shows tools; None where it is another one."""
    found = (form for signs, form in _SIGNS if all(sign in template for sign in signs))
    form = next(found, None)
    others = form in (HERMES, LLAMA3_JSON) and any(one in template for one in _OTHER_SIGNS)
    return None if others else form
