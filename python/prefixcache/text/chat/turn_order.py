"""Turns in an order that a model's chat template shows: many refuse or drop what clients send."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from prefixcache.exceptions import InvalidRequestError
from prefixcache.text.tokenization.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

_Message = dict[str, Any]

_INSTRUCT = ("system", "developer")
# What may follow what in the order that all templates show.
_USUAL = {
    *(("user", "assistant"), ("assistant", "user")),
    *(("assistant", "tool"), ("tool", "tool"), ("tool", "assistant")),
}
_TEXTS = ("content", "reasoning", "reasoning_content", "thinking")
_MARK = re.compile(r"text (\d+);")
# Where a template wants an answer between the result of a tool and the user's next words.
_ANSWER: _Message = {"role": "assistant", "content": "OK."}

_QUESTION: _Message = {"role": "user", "content": "b"}
_SYSTEM: _Message = {"role": "system", "content": "a"}
_DIALOGUES = ([_SYSTEM, _QUESTION], [_SYSTEM, _QUESTION, _ANSWER, _QUESTION])
_FUNCTION = {"name": "f", "arguments": "{}"}
_CALL = {"id": "aBcDeF123", "type": "function", "function": _FUNCTION}
_WITH_RESULT: list[_Message] = [
    *(_SYSTEM, _QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}),
    {"role": "tool", "tool_call_id": _CALL["id"], "name": "f", "content": "c"},
]
# Stands for all tools of a request, whose texts may be long, and hold marks.
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}


class TurnOrder:
    """Changes turns where a template raises on them, or would lose a system message or a question.

    Nothing moves: several system messages at the beginning become one, later ones become text of
    the user, and turns of one role in a row one turn. The first change that helps is made.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        # Mistral's older ones drop the system message once a result is there. Others raise on it.
        self._shows_usual = all(self._shows(turns, {}) for turns in _DIALOGUES)
        self._shows_usual &= self._shows(_WITH_RESULT, {}, otherwise=True)
        self._has_warned = False

    def fitted(self, messages: Sequence[_Message], options: Mapping[str, Any]) -> list[_Message]:
        """The messages, changed if need be. `options` are those of `ChatTemplate.render`."""
        turns = [*messages]
        if self._shows_usual and _is_usual(turns):
            return turns
        tools = [_TOOL] if options.get("tools") else []
        options = {**options, "continue_final_message": False, "tools": tools}
        for changed in _changes(turns):
            if self._shows(changed, options):
                self._warn(turns, changed)
                return changed
        return turns

    def _shows(
        self, turns: Sequence[_Message], options: Mapping[str, Any], *, otherwise: bool = False
    ) -> bool:
        """Whether the template shows instructions and questions, by short texts in their place.

        `otherwise` where it raises.
        """
        try:
            text = self._template.render(_shortened(turns), **options)
        except InvalidRequestError:
            return otherwise
        shown = {*map(int, _MARK.findall(text))}
        return all(
            index in shown
            for index, turn in enumerate(turns)
            if turn.get("role") in (*_INSTRUCT, "user") and turn.get("content")
        )

    def _warn(self, before: Sequence[_Message], after: Sequence[_Message]) -> None:
        first = num_leading(before)
        if self._has_warned or _count(after) >= min(first, 1) + _count(before[first:]):
            return
        self._has_warned = True
        logger.warning(
            "The model's chat template refuses or drops system messages where a request has them: "
            "they are shown as text of the user, which users may imitate."
        )


def _count(turns: Sequence[_Message]) -> int:
    return sum(turn.get("role") in _INSTRUCT for turn in turns)


def num_leading(turns: Sequence[_Message]) -> int:
    """How many messages of instructions stand at the beginning."""
    others = (i for i, turn in enumerate(turns) if turn.get("role") not in _INSTRUCT)
    return next(others, len(turns))


def _is_usual(turns: Sequence[_Message]) -> bool:
    roles = [turn.get("role") for turn in turns]
    if roles[:1] and roles[0] in _INSTRUCT:
        del roles[0]
    return roles[:1] == ["user"] and all(pair in _USUAL for pair in pairwise(roles))


def _changes(turns: list[_Message]) -> Iterator[list[_Message]]:
    """The turns, then with ever more changed."""
    yield turns
    first = num_leading(turns)
    leading = [_joined(turns[:first]), *turns[first:]] if first > 1 else turns
    later = [*leading[:1], *map(_spoken, leading[1:])]
    for changed in (leading, later, [*map(_spoken, leading)]):
        yield changed
        yield _by_turns(changed)
        yield _by_turns(changed, answered=True)


def _spoken(turn: _Message) -> _Message:
    return {**turn, "role": "user"} if turn.get("role") in _INSTRUCT else turn


def _by_turns(turns: Sequence[_Message], *, answered: bool = False) -> list[_Message]:
    runs: list[list[_Message]] = []
    for turn in turns:
        before = runs[-1][-1] if runs else {}
        if _continues(before, turn):
            runs[-1].append(turn)
            continue
        if answered and (before.get("role"), turn.get("role")) == ("tool", "user"):
            runs.append([_ANSWER])
        runs.append([turn])
    return [*map(_joined, runs)]


def _continues(before: _Message, turn: _Message) -> bool:
    role = turn.get("role")
    texts = all(isinstance(side.get("content"), str) for side in (before, turn))
    is_same = role == before.get("role") and role in ("user", "assistant")
    return texts and is_same and not before.get("tool_calls")


def _joined(run: Sequence[_Message]) -> _Message:
    """Turns of one role as one."""
    if len(run) == 1:
        return run[0]
    merged = {name: value for turn in reversed(run) for name, value in turn.items()}
    for name, between in zip(_TEXTS, ("\n\n", "\n", "\n", "\n"), strict=True):
        if name in merged:
            merged[name] = between.join(filter(None, (turn.get(name) for turn in run)))
    return merged


def _shortened(turns: Sequence[_Message]) -> list[_Message]:
    """The turns with other texts, and without arguments of calls."""
    return [_short(turn, f"text {index};") for index, turn in enumerate(turns)]


def _short(turn: _Message, text: str) -> _Message:
    texts = {name: text for name in _TEXTS if isinstance(turn.get(name), str) and turn[name]}
    short = {**turn, **texts}
    calls: list[_Message] | None = turn.get("tool_calls")
    if calls is not None:
        short["tool_calls"] = [_without_arguments(call) for call in calls]
    return short


def _without_arguments(call: _Message) -> _Message:
    function: _Message = call["function"]
    return {**call, "function": {**function, "arguments": type(function["arguments"])()}}
