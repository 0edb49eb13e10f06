"""The forms in which families of models write calls of tools, and how a template tells its own."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from prefixcache.text.chat.call_parser import CallParser, CallSyntax
from prefixcache.text.chat.grammars import Markers, call_rules, literal
from prefixcache.text.chat.tools import ToolUse

_ID_CHARACTERS = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates refuse other lengths."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One form: within the markers of `syntax`, `before`, calls with `between` them, and `after`.

    With `repeats` each call has its own markers, `before` and `after`, and `between` stands between
    those. Without `many` an answer holds one call.
    """

    name: str
    syntax: CallSyntax
    before: str = ""
    after: str = ""
    between: str = ""
    repeats: bool = False
    many: bool = True
    arguments: str = "arguments"
    new_id: Callable[[], str] = _call_id

    @property
    def markers(self) -> tuple[str, ...]:
        """What stands around calls, where it may be tokens of its own."""
        return tuple(filter(None, (self.syntax.opening, self.syntax.closing)))

    def parser(self, use: ToolUse) -> CallParser:
        """A parser of one answer."""
        known = frozenset(tool.name for tool in use.tools)
        return CallParser(self.syntax, known, self.new_id, None if use.parallel else 1)

    def rules(self, use: ToolUse, markers: Markers) -> str:
        """The rule `calls`: what follows the opening marker of the first call."""
        opening, closing = map(markers.terminal, (self.syntax.opening, self.syntax.closing))
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
        if self.syntax.named:
            separator = markers.terminal("[ARGS]")
            return call_rules(use.callable_tools, lambda name: f"{literal(name)} {separator}")
        begin = '{{"name": "{}", "{}": '.format
        return call_rules(
            use.callable_tools, lambda name: literal(begin(name, self.arguments)), literal("}")
        )


HERMES = ToolFormat(
    name="hermes",
    syntax=CallSyntax(opening="<tool_call>", closing="</tool_call>"),
    before="\n",
    after="\n",
    between="\n",
    repeats=True,
)
# A template of Llama shows one call a message, and refuses more.
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    syntax=CallSyntax(opening="<|python_tag|>", bare=True),
    arguments="parameters",
    many=False,
)
MISTRAL = ToolFormat(
    name="mistral",
    syntax=CallSyntax(opening="[TOOL_CALLS]"),
    before="[",
    after="]",
    between=", ",
    new_id=_short_id,
)
# Since version 11 of Mistral's tokenizer.
MISTRAL_NAMED = replace(
    MISTRAL,
    syntax=CallSyntax(opening="[TOOL_CALLS]", named=True),
    before="",
    after="",
    between="",
    repeats=True,
)
SMOLLM2 = ToolFormat(
    name="smollm2",
    syntax=CallSyntax(opening="<tool_call>", closing="</tool_call>"),
    before="[\n",
    after="\n]",
    between=",\n",
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL, SMOLLM2)
}


def detected_format(template: str) -> ToolFormat | None:
    """The format of a template that shows tools; None where it is another one."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters": ' in template):
        return LLAMA3_JSON
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    return None
