"""The grammar of a whole answer: reasoning, then calls of tools, content, or either."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from prefixcache.exceptions import wrong
from prefixcache.text.chat.calls.formats import ToolFormat
from prefixcache.text.chat.grammars import FREE, SPACING, Markers, escaped, literal
from prefixcache.text.chat.reasoning import ReasoningStart
from prefixcache.text.chat.tools import ToolUse
from prefixcache.text.grammar.json_schema import known_schema
from prefixcache.types.structured_output import StructuredOutput

# Tools whose calls begin with nothing but their name: with more, masks reach llguidance's limits.
_MOST_BARE = 128
# Models write it between reasoning and what follows.
_GAP = r'("\n\n" | "\n")?'


def tool_grammar(
    use: ToolUse,
    call_format: ToolFormat,
    output: StructuredOutput | None,
    start: ReasoningStart,
    markers: Markers,
) -> StructuredOutput | None:
    """The grammar of an answer that may or must call tools; None where it may say anything.

    An answer that calls none is free text, or what `output` says.
    """
    opening = call_format.opening
    plain = "main"
    calls = "calls" if call_format.bare else f"{markers.terminal(opening)} calls"
    rules = [call_format.rules(use, markers)]
    if use.mode == "required":
        rules.append(f"main: {calls}")
    elif output is not None:
        rules += [f"main: {calls} | answer", answer_rule("answer", output)]
    elif call_format.bare and len(use.tools) > _MOST_BARE:
        return None
    elif call_format.bare:
        rules += _bare_rules(use, call_format, markers)
    else:
        plain = "unreasoned"
        rules += _free_rules(opening, start, markers)
    return _reasoned(rules, start, markers, plain)


def _free_rules(opening: str, start: ReasoningStart, markers: Markers) -> list[str]:
    """`main` is free until a call begins; so is `unreasoned`, which begins with no reasoning."""
    unlike = f" & ~/\\s*{escaped(re.escape(start.reasoning.opening))}(?s:.*)/"
    return [
        f"FREE: {FREE}",
        "main: FREE | head calls",
        markers.head("head", opening),
        f"PLAIN: {FREE}{unlike}",
        "unreasoned: PLAIN | plain_head calls",
        markers.head("plain_head", opening, unlike),
    ]


def _bare_rules(use: ToolUse, call_format: ToolFormat, markers: Markers) -> list[str]:
    """`main` is free unless it begins with an object that names a tool, which is a call."""
    begin = r'\s*\{\s*"name"\s*:\s*"'
    names = "|".join(re.escape(tool.name) for tool in use.tools)
    unlike = f' & ~/{begin}({names})"(?s:.*)/'
    after = r'"\s{0,2},\s{0,2}"parameters"\s{0,2}:\s{0,2}'
    bare = (
        rf"/{begin}{re.escape(tool.name)}{after}/ args_{tool.index} /\s{{0,2}}\}}/"
        for tool in use.callable_tools
    )
    return [
        f"FREE: {FREE}{unlike}",
        "main: FREE | bare | head calls",
        f"bare: {' | '.join(bare)}",
        markers.head("head", call_format.opening, unlike),
    ]


def _reasoned(
    rules: Sequence[str], start: ReasoningStart, markers: Markers, plain: str = "main"
) -> StructuredOutput:
    """The grammar of an answer whose rules are these: `main` holds from the end of reasoning on.

    Where reasoning is optional, `plain` is the rule of an answer without.
    """
    text = "\n".join(rules)
    if start.begin == "outside":
        return StructuredOutput("grammar", f"start: main\n{text}")
    opening, closing = start.reasoning.opening, start.reasoning.closing
    after = f"start: {_GAP} main"
    if start.begin == "inside":
        return StructuredOutput("grammar", f"{after}\n{text}", closing)
    return StructuredOutput(
        "grammar",
        f"start: {plain} | {markers.terminal(opening)} thought {_GAP} main\n"
        f"{markers.head('thought', closing)}\n{text}",
    )


def answer_grammar(
    output: StructuredOutput | None, start: ReasoningStart, markers: Markers
) -> StructuredOutput | None:
    """The grammar of an answer that may begin with reasoning; None where it may say anything."""
    if output is None or start.begin == "outside":
        return output
    if start.begin == "inside" or output.kind == "grammar":
        return dataclasses.replace(output, begin_after=start.reasoning.closing)
    return _reasoned([answer_rule("main", output)], start, markers)


def answer_rule(name: str, output: StructuredOutput) -> str:
    """The rule `name`: what an answer must look like that calls no tool."""
    if output.kind == "grammar":
        raise wrong("tools", "that may be called cannot be combined with a grammar")
    return f"{name}: {_answer(output)}"


def _answer(output: StructuredOutput) -> str:
    if output.kind == "regex":
        return f"/{escaped(output.text)}/"
    if output.kind == "choice":
        return " | ".join(literal(choice) for choice in json.loads(output.text))
    schema = json.loads(output.text) if output.kind == "json" else {"type": "object"}
    schema = {**known_schema(schema), "x-guidance": {**SPACING, "coerce_one_of": True}}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"
