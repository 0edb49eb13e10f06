"""The grammar of an answer in the harmony format."""

from __future__ import annotations

import dataclasses

from prefixcache.exceptions import wrong
from prefixcache.text.chat.answer_grammar import answer_rule
from prefixcache.text.chat.grammars import FREE, Markers, call_rules, literal
from prefixcache.text.chat.tools import ToolUse
from prefixcache.types.structured_output import StructuredOutput

FINAL = "<|channel|>final<|message|>"


def harmony_grammar(
    use: ToolUse, output: StructuredOutput | None, markers: Markers, *, in_final: bool
) -> StructuredOutput | None:
    """The grammar of an answer that may reason, then calls a tool or says what `output` says.

    None where it may say anything. Raises `InvalidRequestError` for calls that are forced from
    within a final message, and for calls together with a grammar of the client's.
    """
    if in_final:
        if use.mode == "required":
            raise wrong("tool_choice", "must be 'none' or 'auto' where a message is continued")
        return output
    if use.mode == "none" and (output is None or output.kind == "grammar"):
        return None if output is None else dataclasses.replace(output, begin_after=FINAL)
    text = "\n".join(_rules(use, output, markers))
    return StructuredOutput("grammar", text)


def _rules(use: ToolUse, output: StructuredOutput | None, markers: Markers) -> list[str]:
    """Analysis and what is said before a call come first; a call or the final message is last."""
    token = markers.terminal
    asides = ["analysis"] if output is not None else ["analysis", "commentary"]
    beginnings = " | ".join(token(f"<|channel|>{name}<|message|>") for name in asides)
    last = {"none": "final", "auto": "(final | call)", "required": "call"}[use.mode]
    rules = [
        f"start: aside* {last}",
        f"aside: ({beginnings}) aside_text {token('<|start|>assistant')}",
        markers.head("aside_text", "<|end|>"),
    ]
    if use.mode != "none":
        call = call_rules(use.callable_tools, lambda name: _call_head(name, markers))
        rules.append(call.replace("call:", "one_call:", 1))
        rules.append(f"call: one_call {token('<|call|>')}?")
    if use.mode != "required":
        constrain = f"({literal(' ')}? {token('<|constrain|>json')})?"
        head = f"{token('<|channel|>final')} {constrain} {token('<|message|>')}"
        rules.append(f"final: {head} answer {token('<|return|>')}?")
        rules.append(f"answer: {FREE}" if output is None else answer_rule("answer", output))
    return rules


def _call_head(name: str, markers: Markers) -> str:
    """The recipient stands behind the channel, or where the template shows it: behind the role."""
    token = markers.terminal
    to, message = f"to=functions.{name}", token("<|message|>")
    constrain = f"({literal(' ')} ({token('<|constrain|>json')} | {literal('json')}))?"
    behind_role = f"{literal(f' {to}')} {token('<|channel|>commentary')}"
    behind_channel = token(f"<|channel|>commentary {to}")
    return f"({behind_channel} | {behind_role}) {constrain} {message}"
