"""Where prompts leave each other, in a request's own fields, and what is advised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.diagnostics.difference import Difference, find_difference
from prefixcache.diagnostics.spans import PromptSource, span_at
from prefixcache.text.tokenization.chat_template import ChatTemplate
from prefixcache.types.token_ids import TokenIds, as_token_ids
from support.repeatable import bounded
from support.tiny_models import CHAT_TEMPLATE

Messages = Sequence[Mapping[str, Any]]
TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>"
    "{% endif %}"
)
TRIMMED = CHAT_TEMPLATE.replace("message['content']", "(message['content'] | trim)")
# Shows what users say in a form that it was not sent in.
REWRITTEN = CHAT_TEMPLATE.replace(
    "message['content']",
    "(message['content'] | upper if message.role == 'user' else message['content'])",
)
WITH_CALLS = CHAT_TEMPLATE.replace(
    "+ '<|im_end|>'",
    "+ (message.tool_calls[0].function | tojson if message.tool_calls else '') + '<end>'",
)
TALK = [
    {"role": "system", "content": "Answer in one word. Time: 14:05:11"},
    {"role": "user", "content": "Which colour has the sky?"},
    {"role": "assistant", "content": "blue"},
    {"role": "user", "content": " And grass? \n"},
]


def rendered(
    messages: Messages, tools: Messages = (), template: str = CHAT_TEMPLATE
) -> PromptSource:
    text = ChatTemplate(template).render(messages, tools=tools or None)
    return PromptSource(text, messages, tools)


def ids(text: str) -> TokenIds:
    """A token a character."""
    return as_token_ids(np.frombuffer(text.encode("utf-32-le"), dtype=np.int32).copy())


def difference(new: PromptSource, old: PromptSource, *, shown: bool = True) -> Difference | None:
    return find_difference(ids(new.text), new, ids(old.text), old, shows_earlier=shown)


def tool(name: str, description: str = "") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def test_a_changed_time_is_found_in_its_message() -> None:
    old = [{**TALK[0], "content": "You start here at 14:04:37."}, *TALK[1:]]
    new = [{**TALK[0], "content": "You start here at 14:05:11."}, *TALK[1:]]
    found = difference(rendered(new), rendered(old))
    assert str(found) == ("message 0, system, differs at character 22: `14:05:11.` was `14:04:37.`")
    hidden = difference(rendered(new), rendered(old), shown=False)
    assert hidden is not None
    assert hidden.earlier_text is None
    assert "14:04" not in repr(hidden)
    assert str(hidden) == "message 0, system, differs at character 22: `14:05:11.`"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TRIMMED, REWRITTEN, TOOLS + CHAT_TEMPLATE])
@pytest.mark.parametrize("message", range(len(TALK)))
def test_messages_are_found_under_any_template(template: str, message: int) -> None:
    changed = [dict(one) for one in TALK]
    changed[message]["content"] = changed[message]["content"].rstrip()[:-2] + "XY"
    tools = [tool("a", "And grass? blue"), tool("b")]
    found = difference(rendered(changed, tools, template), rendered(TALK, tools, template))
    assert found is not None
    assert (found.message, found.role, found.field) == (message, TALK[message]["role"], "content")
    assert found.text is not None
    assert "XY" in found.text


def test_parts_calls_and_reasoning_are_fields() -> None:
    parts = [{"type": "text", "text": text} for text in ("first", "second", "third one")]
    changed = [*parts[:2], {"type": "text", "text": "third two"}]
    found = difference(
        rendered([{"role": "user", "content": changed}]),
        rendered([{"role": "user", "content": parts}]),
    )
    assert found is not None
    assert str(found) == "message 0, user, content[2].text, differs at character 6: `two` was `one`"

    def call(city: str) -> dict[str, Any]:
        function = {"name": "weather", "arguments": {"city": city}}
        return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}

    called = [rendered([TALK[1], call(city)], template=WITH_CALLS) for city in ("Oslo", "Rome")]
    found = difference(*called)
    assert found is not None
    assert (found.message, found.field) == (1, "tool_calls[0].function.arguments")


def test_tools_are_fields_of_no_message() -> None:
    template = TOOLS + CHAT_TEMPLATE
    tools = [tool("get_time"), tool("get_weather", "At 14:04")]
    new = [tools[0], tool("get_weather", "At 14:05")]
    found = difference(rendered(TALK, new, template), rendered(TALK, tools, template))
    assert str(found) == (
        "tools[1].function.description differs at character 7: `14:05` was `14:04`"
    )
    assert found is not None
    assert (found.message, found.field) == (None, "tools[1].function.description")


def test_what_goes_on_does_not_differ() -> None:
    shorter, longer = "one two", "one two three"
    assert difference(PromptSource(shorter), PromptSource(longer)) is None
    assert difference(PromptSource(longer), PromptSource(shorter)) is None


def test_a_plain_prompt_and_one_without_text() -> None:
    found = difference(PromptSource("a b c"), PromptSource("a x c"))
    assert str(found) == "prompt differs at character 2: `b` was `x`"
    bare = find_difference(ids("abc"), None, ids("abd"), None, shows_earlier=True)
    assert bare == Difference(token=2)
    assert str(bare) == "the prompt differs at token 2"


@settings(max_examples=bounded(20, 2000))
@given(st.lists(st.text(max_size=30), min_size=1, max_size=6), st.data())
def test_positions_are_those_of_a_plain_comparison(
    contents: list[str], data: st.DataObject
) -> None:
    messages = [{"role": "user", "content": text} for text in contents]
    place = data.draw(st.integers(0, len(contents) - 1))
    cut = data.draw(st.integers(0, len(contents[place])))
    changed = [dict(one) for one in messages]
    changed[place]["content"] = contents[place][:cut] + data.draw(st.text(min_size=1, max_size=9))
    new, old = rendered(changed), rendered(messages)
    found = difference(new, old)
    same = 0
    for one, other in zip(new.text, old.text, strict=False):
        if one != other:
            break
        same += 1
    if found is None or found.character is None:
        assert same >= min(len(new.text), len(old.text)) or new.text == old.text
        return
    assert found.character == found.token == same
    span = span_at(new.spans(), same)
    begin = 0 if span is None else span.start
    assert found.field_character == same - begin
