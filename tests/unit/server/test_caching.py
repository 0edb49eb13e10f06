"""What OpenAI's and Anthropic's caching controls mean, as functions of a body's content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from prefixcache.exceptions import InvalidRequestError
from prefixcache.server.jobs.caching import (
    Breakpoint,
    CachingControls,
    Marked,
    Place,
    PromptCaching,
    anthropic_controls,
    breakpoint_ends,
    changed_behind,
    marked_parts,
    openai_controls,
    prompt_caching,
    written_by_ttl,
)
from prefixcache.server.jobs.sampling_fields import ResponseCacheOptions
from prefixcache.text.tokenization.chat_template import ChatTemplate
from prefixcache.types.retention_range import RetentionRange
from support.tiny_models import CHAT_TEMPLATE

EXPLICIT_MODE = ResponseCacheOptions(mode="explicit")
FIRST, SECOND, THIRD = (Place("messages", index) for index in range(3))
EXPLICIT, EPHEMERAL = {"mode": "explicit"}, {"type": "ephemeral"}
MINUTES, HOUR = 300, 3600


def marked(*values: object) -> list[Marked]:
    return [Marked(Place("messages", i), f"messages[{i}].control", v) for i, v in enumerate(values)]


def test_without_controls_everything_is_cached() -> None:
    assert openai_controls([]) == anthropic_controls([]) == CachingControls()
    assert openai_controls([], retention="in_memory") == CachingControls()
    assert prompt_caching(CachingControls(), []) == PromptCaching()


def test_openai_options() -> None:
    assert openai_controls([], ResponseCacheOptions()) == CachingControls(ttl_s=1800)
    assert openai_controls([], ResponseCacheOptions(ttl="12h")) == CachingControls(ttl_s=12 * HOUR)
    assert openai_controls([], retention="24h") == CachingControls(ttl_s=24 * HOUR)
    explicit = openai_controls(marked(EXPLICIT), EXPLICIT_MODE)
    assert explicit == CachingControls(explicit=True, breakpoints=(Breakpoint(FIRST, 1800),))
    own = openai_controls(marked(EXPLICIT | {"ttl": "12h"}, EXPLICIT))
    assert [one.ttl_s for one in own.breakpoints] == [12 * HOUR, 1800]
    many = marked(*[EXPLICIT] * 6)
    assert [one.place.index for one in openai_controls(many).breakpoints] == [3, 4, 5]
    latest = openai_controls(many, EXPLICIT_MODE).breakpoints
    assert [one.place.index for one in latest] == [2, 3, 4, 5]


def test_anthropic_controls() -> None:
    controls = anthropic_controls(
        marked(EPHEMERAL | {"ttl": "1h"}, EPHEMERAL), automatic=EPHEMERAL, last_block=THIRD
    )
    assert controls.explicit
    assert controls.breakpoints == (
        Breakpoint(FIRST, HOUR),
        Breakpoint(SECOND, MINUTES),
        Breakpoint(THIRD, MINUTES),
    )


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (True, ""),
        ({}, ".mode"),
        ({"mode": "implicit"}, ".mode"),
        (EXPLICIT | {"ttl": "5m"}, ".ttl"),
        (EXPLICIT | {"ttl": 30}, ".ttl"),
        (EXPLICIT | {"ttl": ["30m"]}, ".ttl"),
    ],
)
def test_what_is_no_openai_breakpoint_is_named(value: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        openai_controls(marked(EXPLICIT, value))
    assert refused.value.param == f"messages[1].control{field}"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (["ephemeral"], "messages[0].control"),
        ([{"type": "persistent"}], "messages[0].control.type"),
        ([EPHEMERAL | {"ttl": "30m"}], "messages[0].control.ttl"),
        ([EPHEMERAL, EPHEMERAL | {"ttl": "1h"}], "messages[1].control.ttl"),
        ([EPHEMERAL] * 5, "messages[4].control"),
    ],
)
def test_wrong_anthropic_controls_are_named(values: list[object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        anthropic_controls(marked(*values))
    assert refused.value.param == field


def test_the_control_at_the_top_counts_among_the_four() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        anthropic_controls(marked(*[EPHEMERAL] * 4), automatic=EPHEMERAL, last_block=THIRD)
    assert refused.value.param == "cache_control"


def test_both_of_openais_ways_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        openai_controls([], ResponseCacheOptions(), "24h")
    assert refused.value.param == "prompt_cache_retention"


def test_what_lies_before_several_breakpoints_is_kept_for_the_longest_ttl() -> None:
    ends = (Breakpoint(FIRST, MINUTES), Breakpoint(SECOND, HOUR), Breakpoint(THIRD, MINUTES))
    controls = CachingControls(breakpoints=ends, explicit=True)
    assert prompt_caching(controls, [10, 30, 55]) == PromptCaching(
        retention=(
            RetentionRange(0, 10, ttl_s=HOUR),
            RetentionRange(10, 30, ttl_s=HOUR),
            RetentionRange(30, 55, ttl_s=MINUTES),
        ),
        write_upto=55,
    )
    rest = prompt_caching(CachingControls(breakpoints=ends[:1], ttl_s=1800), [10])
    assert rest.write_upto is None
    assert rest.retention == (RetentionRange(0, 10, ttl_s=1800), RetentionRange(10, ttl_s=1800))


def test_breakpoints_may_be_in_any_order_in_one_place_or_not_shown() -> None:
    controls = openai_controls(marked(*[EXPLICIT] * 3), EXPLICIT_MODE)
    shown = prompt_caching(controls, [20, 0, 8])
    assert [(one.start, one.end) for one in shown.retention] == [(0, 8), (8, 20)]
    assert shown.write_upto == 20
    assert prompt_caching(controls, [8, 8, 8]).retention == (RetentionRange(0, 8, ttl_s=1800),)
    assert prompt_caching(controls, [0, 0, 0]) == PromptCaching(write_upto=0)


def test_what_was_written_is_split_by_ttl() -> None:
    ranges = (RetentionRange(0, 32, ttl_s=HOUR), RetentionRange(32, 60, ttl_s=MINUTES))
    assert written_by_ttl(ranges, 0, 48) == {HOUR: 32, MINUTES: 16}
    assert written_by_ttl(ranges, 16, 16) == {HOUR: 16}
    assert written_by_ttl(ranges, 48, 32) == {MINUTES: 12, None: 20}
    assert written_by_ttl((), 0, 16) == {None: 16}
    assert written_by_ttl((RetentionRange(0, ttl_s=HOUR),), 16, 64) == {HOUR: 64}


TRIMS = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
MOVES = (  # as Gemma's: the system's text is in the user's turn
    "{% set ns = namespace(first=true) %}{% for m in messages if m['role'] != 'system' %}"
    "<turn>{{ m['role'] }}\n{% if ns.first and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }}\n\n{% endif %}{% set ns.first = false %}{{ m['content'] }}</turn>"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
DROPS = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}|{% endfor %}"
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief. "}]},
    {"role": "user", "content": [{"type": "text", "text": t} for t in ("One", "Two ", "Three")]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four"},
]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "subtract")]


def end_of(
    source: str, place: Place, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, str | None]:
    """The prompt's text before and behind the end of a block."""
    template = ChatTemplate(source)

    def rendered(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        return template.render(messages, variables={"tools": tools})

    text = rendered(TALK, tools)
    (end,) = breakpoint_ends(text, [place], lambda p: rendered(*changed_behind(p, TALK, tools)))
    return text[:end], text[end:]


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, TRIMS, MOVES, DROPS])
def test_a_block_ends_where_its_text_does_under_any_template(source: str) -> None:
    for part, (text, behind) in enumerate([("One", "\nTwo"), ("Two ", "\nThree"), ("Three", "")]):
        before, after = end_of(source, Place("messages", 1, part))
        assert before.endswith(text)
        assert after.startswith(behind)
    before, after = end_of(source, Place("messages", 3))
    assert before.endswith("Four")
    assert "Four" not in after


def test_white_space_that_the_template_trims_ends_before_it() -> None:
    before, after = end_of(TRIMS, Place("messages", 0, 0))
    assert before.endswith("Be brief.")
    assert after.startswith("<|im_end|>")


def test_a_block_that_the_template_does_not_show_has_no_end() -> None:
    assert end_of(DROPS, Place("messages", 2))[0] == ""
    assert end_of(CHAT_TEMPLATE, Place("tools", 0), TOOLS)[0] == ""


def test_a_tool_ends_before_what_tells_the_next_one_from_it() -> None:
    before, after = end_of(MOVES, Place("tools", 0), TOOLS)
    assert '"add"' in before
    assert after.startswith("subtract")
    before, after = end_of(MOVES, Place("tools", 1), TOOLS)
    assert before.endswith('"subtract"}}')
    assert after == "]"


def test_marked_parts_are_found_in_order() -> None:
    name = "prompt_cache_breakpoint"
    part = {"type": "text", "text": "x", name: 1}
    contents = ["x", [part, {name: None}, 3, part], None]
    assert list(marked_parts(contents)) == [
        Marked(Place("messages", 1, 0), f"messages[1].content[0].{name}", 1),
        Marked(Place("messages", 1, 3), f"messages[1].content[3].{name}", 1),
    ]
