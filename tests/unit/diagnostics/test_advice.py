"""What is said to be computed again, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixcache.diagnostics.advice import Finding, advice_for, summarize
from prefixcache.diagnostics.history import Miss, MissReason, PromptHistory, RememberedPrompt
from prefixcache.diagnostics.spans import PromptSource
from prefixcache.text.tokenization.chat_template import ChatTemplate
from prefixcache.types.request import CacheScope
from prefixcache.types.token_ids import TokenIds, as_token_ids
from support.tiny_models import CHAT_TEMPLATE

TEMPLATE = ChatTemplate(
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ today }}" + CHAT_TEMPLATE,
)
BLOCK = 64
RULES = "Answer in one word and be polite. " * 20
UUIDS = ("b7e2f1a0-3c4d-4e5f-8a9b-0c1d2e3f4a5b", "0c1d2e3f-3c4d-4e5f-8a9b-b7e2f1a04a5b")


def token_ids(text: str) -> TokenIds:
    """A token a character."""
    return as_token_ids(np.frombuffer(text.encode("utf-32-le"), dtype=np.int32).copy())


def sent(
    system: str = RULES,
    said: Sequence[str] = (),
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    today: str = "",
    cached: int = 0,
    miss: Miss | None = None,
    with_text: bool = True,
) -> RememberedPrompt:
    messages = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": text} for text in said]
    text = TEMPLATE.render(messages, tools=tools or None, variables={"today": today})
    return RememberedPrompt(
        request_id="chatcmpl-1",
        time=0.0,
        scope=CacheScope(),
        model="m",
        api="chat",
        token_ids=token_ids(text),
        source=PromptSource(text, messages, tools) if with_text else None,
        prompt_tokens=len(text),
        cached_tokens=cached,
        miss=miss,
    )


def tool(name: str, description: str = "Finds what there is to be found about it.") -> Any:
    function = {"name": name, "description": description, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def findings(*prompts: RememberedPrompt) -> list[Finding]:
    return summarize(prompts, block_size=BLOCK).findings


def test_turns_that_go_on_and_other_questions_are_no_loss() -> None:
    turns = [f"Question {number} of the talk" for number in range(6)]
    grown = [sent(said=turns[:end], cached=16) for end in range(6)]
    assert findings(*grown) == []
    system = len(sent().token_ids) // BLOCK * BLOCK - BLOCK
    others = [sent(said=[text], cached=system) for text in ("Why is grass green?", "How far?")]
    assert findings(*others) == []


def test_a_time_at_the_top_is_one_finding_over_all_turns() -> None:
    turns = [f"Question {number} of the talk" for number in range(30)]
    times = [f"It is 14:0{number % 10}:{number * 7 % 60:02}. " for number in range(30)]
    prompts = [
        sent(time + RULES, turns[:end], cached=0, miss=Miss(0, "different_text"))
        for end, time in enumerate(times)
    ]
    (found,) = findings(*prompts)
    again = [len(prompt.token_ids) for prompt in prompts[:-1]]
    assert 0.9 * sum(again) < found.tokens_recomputed < sum(again)
    assert (found.num_requests, found.offender, found.reason) == (29, "date", "different_text")
    assert str(found).endswith(
        "computed again by 29 requests: message 0, system, differs at character 10: `14:09:23.` "
        "was `14:08:16.`: a date or time in the first 200 tokens; move it after the stable part, "
        "as to the last user message, or leave the time out"
    )


@pytest.mark.parametrize(
    ("old", "new", "offender", "reported"),
    [
        (f"Session {UUIDS[0]}.", f"Session {UUIDS[1]}.", "id", "an id or number"),
        ("On 2026-11-22:", "On 2026-11-23:", "date", "a date or time"),
        ("Today is Sunday, 1 March.", "Today is Monday, 2 March.", "date", "a date or time"),
        (
            "x-anthropic-billing-header: cc_version=2.1; cch=fa690;",
            "x-anthropic-billing-header: cc_version=2.1; cch=1c2e0;",
            "billing_header",
            "--strip-header-pattern",
        ),
        ("You are Ann.", "x-anthropic-billing-header: cch=1;", None, "move it"),
        ("You are Ann.", "You are Bob.", None, "move it after the stable part"),
    ],
)
def test_offenders_in_a_system_message(old: str, new: str, offender: str, reported: str) -> None:
    (found,) = findings(sent(f"{old}\n{RULES}"), sent(f"{new}\n{RULES}"))
    assert found.offender == offender
    assert reported in str(found)
    assert found.num_requests == 1


def test_tools_in_another_order_and_other_tools() -> None:
    tools = [tool(name) for name in ("read", "write", "search")]
    (found,) = findings(
        *[sent(tools=order) for order in (tools, tools[::-1], tools[1:] + tools[:1])]
    )
    assert (found.num_requests, found.offender) == (2, "tool_order")
    assert "sort them by name" in found.advice
    (changed,) = findings(sent(tools=tools), sent(tools=[tools[0], tool("grep"), *tools[1:]]))
    assert changed.offender == "tools_changed"
    dated = [[tool("read", f"Now: 14:0{number}"), *tools[1:]] for number in range(2)]
    (inside,) = findings(*[sent(tools=order) for order in dated])
    assert (inside.offender, inside.difference and inside.difference.field) == (
        "date",
        "tools[0].function.description",
    )


def test_text_of_the_template() -> None:
    (found,) = findings(sent(today="alpha"), sent(today="beta"))
    assert found.offender == "chat_template"


def test_what_was_evicted_otherwise_is_reported_with_its_reason() -> None:
    again = sent(cached=64, miss=Miss(64, "evicted"))
    (found,) = findings(sent(), again)
    lost = len(again.token_ids) - 64
    assert (found.reason, found.tokens_recomputed, found.position) == ("evicted", lost, 64)
    assert "evicted from token 64" in str(found)
    assert findings(sent(), sent(cached=lost + 32, miss=Miss(lost + 32, "tail"))) == []


def test_rewritten_history_and_prompts_without_text() -> None:
    talk = ["What is there?", "seen 5 seconds ago", "Go on then, and tell all about it."]
    (found,) = findings(sent(said=talk), sent(said=[talk[0], "seen moments ago", talk[2]]))
    assert found.advice.startswith("leave what was said before")
    bare = [sent(f"It is 14:0{number}. {RULES}", with_text=False) for number in range(3)]
    (found,) = findings(*bare)
    assert (found.num_requests, found.offender) == (2, None)
    assert "the prompt differs at token" in str(found)
    assert "14:0" not in str(found)


@pytest.mark.parametrize(
    ("reason", "has_earlier", "advice"),
    [
        ("different_text", True, "a date or time in the first 200 tokens: move it after the"),
        ("different_text", False, "send the same text first"),
        ("evicted", False, "give the cache more memory"),
        ("never_seen", False, "new: no remembered prompt has these tokens"),
        ("tail", False, ""),
    ],
)
def test_a_miss_alone_has_its_advice(reason: MissReason, has_earlier: bool, advice: str) -> None:
    history = PromptHistory(1 << 20)
    if has_earlier:
        history.remember(sent("It is 14:01:10. " + RULES))
    prompt = replace(sent("It is 14:02:20. " + RULES, miss=Miss(0, reason)), arrival=1.0)
    history.remember(prompt)
    found = advice_for(prompt, history, block_size=BLOCK)
    assert found.startswith(advice)
    assert bool(found) == bool(advice)


def test_no_prompts() -> None:
    summary = summarize([], block_size=BLOCK)
    assert (summary.num_requests, summary.since, summary.findings) == (0, None, [])
