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
from prefixcache.text.chat.calls.call_parser import CallParser
from prefixcache.text.chat.calls.json_calls import (
    DeepseekCallParser,
    JsonCallParser,
    NamedCallParser,
)
from prefixcache.text.chat.calls.notation_calls import NotationCallParser
from prefixcache.text.chat.calls.schemas import ToolSchemas
from prefixcache.text.chat.calls.xml_calls import XmlCallParser
from prefixcache.text.chat.grammars import Markers, call_rules, literal
from prefixcache.text.chat.message import MessageParser
from prefixcache.text.chat.tools import ToolUse

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID = "/[A-Za-z0-9]{9}/"  # as `_short_id` makes them
_ID_FIELD, _QUOTE = ', "id": "', '"'
_PLACE = "{}"


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
    those. Without `many` an answer holds one call. A call is its `head`, where a name stands for
    the first `{}` and an id for a second, its arguments as JSON, and its `tail`, unless calls have
    a `style` of their own. With `has_ids` an id may stand behind the arguments. With `bare` an
    answer may begin with a call, whose arguments are `parameters`.
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
    head: str = '{"name": "{}", "arguments": '
    tail: str = "}"
    has_ids: bool = False
    style: ArgumentStyle | None = None
    new_parser: Callable[..., CallParser] = JsonCallParser
    new_id: Callable[[], str] = call_id

    @property
    def markers(self) -> tuple[str, ...]:
        """What stands around calls, where it may be tokens of its own."""
        return tuple(filter(None, (self.opening, self.closing)))

    def parser(self, use: ToolUse) -> MessageParser:
        """A parser of one answer."""
        return self.new_parser(
            ToolSchemas(use.tools),
            self.new_id,
            opening=self.opening,
            closing=self.closing,
            most=None if use.parallel else 1,
            bare=self.bare,
            style=self.style,
        )

    def rules(self, use: ToolUse, markers: Markers) -> str:
        """The rule `calls`: what follows the opening marker of the first call."""
        opening, closing = map(markers.terminal, (self.opening, self.closing))
        before, after, between = map(literal, (self.before, self.after, self.between))
        many = self.many and use.parallel
        if self.repeats:
            call_rule = f"{before} call {after} {closing}"
            calls = f"{call_rule} ({between} {opening} {call_rule})*" if many else call_rule
        else:
            more = f"({between} call)*" if many else ""
            calls = f"{before} call {more} {after} {closing}"
        return f"calls: {calls}\n{self._call_rules(use, markers)}"

    def _call_rules(self, use: ToolUse, markers: Markers) -> str:
        if self.style is not None:
            return self.style.rules(use.callable_tools, markers)
        tail = markers.terminal(self.tail)
        if self.has_ids:
            tail = f"({literal(_ID_FIELD)} {_ID} {literal(_QUOTE)})? {tail}"
        return call_rules(use.callable_tools, lambda name: self._begin(name, markers), tail)

    def _begin(self, name: str, markers: Markers) -> str:
        """The terminals before the arguments."""
        return f" {_ID} ".join(map(markers.terminal, self._head(name)))

    def _head(self, name: str) -> list[str]:
        """The text before the arguments, around the id where it has one."""
        before, after, *rest = self.head.split(_PLACE)
        if before.endswith('"'):
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        return [before + name + after, *rest]

    def text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls as they are written, for templates that show none."""
        listed = [self._written(call) for call in calls]
        if not self.repeats:
            return (
                f"{self.opening}{self.before}{self.between.join(listed)}{self.after}{self.closing}"
            )
        written = (
            f"{self.opening}{self.before}{call}{self.after}{self.closing}" for call in listed
        )
        return self.between.join(written)

    def _written(self, call: Mapping[str, Any]) -> str:
        function = call["function"]
        if self.style is not None:
            return self.style.text(function["name"], function["arguments"])
        head = call.get("id", "").join(self._head(function["name"]))
        return f"{head}{json.dumps(function['arguments'], ensure_ascii=False)}{self.tail}"


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    before="\n",
    after="\n",
    between="\n",
    repeats=True,
)
# As EXAONE 4 has them, without line breaks within the markers.
HERMES_INLINE = replace(HERMES, before="", after="")
# A template of Llama shows one call a message, and refuses more.
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    opening="<|python_tag|>",
    bare=True,
    head='{"name": "{}", "parameters": ',
    many=False,
)
SMOLLM2 = ToolFormat(
    name="smollm2",
    opening="<tool_call>",
    closing="</tool_call>",
    before="[\n",
    after="\n]",
    between=",\n",
)
GRANITE = ToolFormat(name="granite", opening="<|tool_call|>", before="[", after="]", between=", ")
PHI4_MINI = replace(GRANITE, name="phi4_mini_json", closing="<|/tool_call|>")
# As vLLM's template for Phi-4-mini asks for calls.
FUNCTOOLS = replace(GRANITE, name="phi4_mini_json", opening="functools")
NEMOTRON = replace(GRANITE, name="nemotron_json", opening="<TOOLCALL>", closing="</TOOLCALL>")
APRIEL = replace(GRANITE, name="apriel", opening="<tool_calls>", closing="</tool_calls>")
MISTRAL = replace(GRANITE, name="mistral", opening="[TOOL_CALLS]", has_ids=True, new_id=_short_id)
# Since version 11 of Mistral's tokenizer.
MISTRAL_NAMED = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    repeats=True,
    head="{}[ARGS]",
    tail="",
    new_parser=NamedCallParser,
    new_id=_short_id,
)
# Since version 13.
MISTRAL_WITH_IDS = replace(MISTRAL_NAMED, head="{}[CALL_ID]{}[ARGS]")
# Of DeepSeek R1 and V3, and what was distilled from R1.
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    between="\n",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    new_parser=DeepseekCallParser,
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    between="",
    head="<｜tool▁call▁begin｜>{}<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
)
QWEN3_CODER = replace(HERMES, name="qwen3_coder", style=QWEN_STYLE, new_parser=XmlCallParser)
SEED_OSS = replace(
    QWEN3_CODER,
    name="seed_oss",
    opening="<seed:tool_call>",
    closing="</seed:tool_call>",
    style=SEED_STYLE,
)
LFM2 = replace(
    GRANITE,
    name="lfm2",
    opening="<|tool_call_start|>",
    closing="<|tool_call_end|>",
    style=LFM2_STYLE,
    new_parser=NotationCallParser,
)
OLMO3 = replace(
    HERMES,
    name="olmo3",
    opening="<function_calls>",
    closing="</function_calls>",
    repeats=False,
    style=OLMO3_STYLE,
    new_parser=NotationCallParser,
)
GEMMA4 = ToolFormat(
    name="gemma4",
    opening="<|tool_call>",
    closing="<tool_call|>",
    repeats=True,
    style=GEMMA_STYLE,
    new_parser=NotationCallParser,
)

_FORMATS = (
    *(HERMES, LLAMA3_JSON, MISTRAL, SMOLLM2, GRANITE, PHI4_MINI),
    *(QWEN3_CODER, SEED_OSS, LFM2, OLMO3, GEMMA4, NEMOTRON, APRIEL, DEEPSEEK_V3, DEEPSEEK_V31),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _FORMATS}

# What a template holds that shows calls in a format: the first row that it holds wholly counts.
_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
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
    (("<tool_calls>[",), APRIEL),
    (("<tool_call>", "[|assistant|]"), HERMES_INLINE),
    (("<tool_call>",), HERMES),
)


# Of forms that are not known, where the signs of known ones stand too.
_OTHER_SIGNS = ("<function=", "<arg_key>", "<invoke")


def detected_format(template: str) -> ToolFormat | None:
    """The format of a template that shows tools; None where it is another one."""
    matching = (form for signs, form in _SIGNS if all(sign in template for sign in signs))
    form = next(matching, None)
    others = any(sign in template for sign in _OTHER_SIGNS)
    return None if others and form in (HERMES, HERMES_INLINE, LLAMA3_JSON) else form
