"""Turns that templates of real families refuse or drop: shown in place, with nothing lost."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.exceptions import InvalidRequestError
from prefixcache.text.chat.plan import ChatFormat
from prefixcache.text.chat.tools import read_tool_use
from prefixcache.text.tokenization.chat_template import ChatTemplate
from support.chat_models import TEMPLATES, TOOLS, assistant, tokenizer

FOLDER = Path(__file__).parents[2] / "data/templates"
SOURCES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
SOURCES["gpt-oss"] = TEMPLATES["gpt-oss"]
FAMILIES = [*SOURCES]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def new_format(family: str) -> ChatFormat:
    read = copy.copy(tokenizer("smollm2"))
    read.chat_template = ChatTemplate(SOURCES[family], TOKENS)
    return ChatFormat(read)


chat_format = cache(new_format)


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"says {i};"} for i, role in enumerate(roles)]


def shown(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"says (\d+);", text)]


def prompt(family: str, *roles: str) -> str:
    return chat_format(family).plan(turns(*roles)).prompt


S, U, A = "system", "user", "assistant"


@pytest.mark.parametrize(
    ("family", "roles", "expected"),
    [
        ("qwen3.5", (S, S, U), "system\nsays 0;\n\nsays 1;<|im_end|>\n<|im_start|>user\nsays 2;"),
        ("qwen3.5", (S, U, S), "<|im_start|>user\nsays 2;<|im_end|>\n<|im_start|>assistant"),
        ("qwen2.5", (S, U, S), "<|im_start|>system\nsays 2;<|im_end|>\n<|im_start|>assistant"),
        ("mistral-v3", (S, U, S), "[INST] says 0;\n\nsays 1;\n\nsays 2;[/INST]"),
        ("mistral-v3", (U, U, A, U), "[INST] says 0;\n\nsays 1;[/INST] says 2;</s>"),
        ("gemma2", (S, U, A, S, U), "user\nsays 0;\n\nsays 1;<end_of_turn>"),
        ("gemma2", (S, U, A, S, U), "user\nsays 3;\n\nsays 4;<end_of_turn>"),
        ("gemma3", (S, S, U), "user\nsays 0;\n\nsays 1;\n\nsays 2;<end_of_turn>"),
        ("gemma3", (S, U, A, S, U), "user\nsays 3;\n\nsays 4;<end_of_turn>"),
        ("phi3", (S, U), "<|user|>\nsays 0;<|end|>"),
        ("deepseek-r1-distill", (S, S, U), "<s>says 0;\n\nsays 1;<｜User｜>says 2;"),
        ("deepseek-r1-distill", (S, U, S), "<s>says 0;<｜User｜>says 1;<｜User｜>says 2;"),
        ("gpt-oss", (S, U, S), "<|start|>user<|message|>says 2;<|end|>"),
    ],
)
def test_instructions_stay_in_place_in_a_form_that_is_shown(family, roles, expected):
    assert expected in prompt(family, *roles)


@given(st.sampled_from(FAMILIES), st.lists(st.sampled_from([S, U, A, U, A]), max_size=7))
def test_nothing_is_lost_and_prompts_that_lose_nothing_stay_as_they_are(family, roles):
    said = turns(U, *roles) if roles[:1] != [S] else turns(S, U, *roles[1:])
    written = chat_format(family).plan(said).prompt
    try:
        plain = ChatTemplate(SOURCES[family], TOKENS).render(said)
    except InvalidRequestError:
        plain = ""
    if sorted(shown(plain)) == [*range(len(said))] and family != "gpt-oss":
        assert written == plain
    elif family == "mistral-v3" and said[0]["role"] == S:  # which it puts last
        assert sorted(shown(written)) == [*range(len(said))]
    else:
        assert shown(written) == [*range(len(said))]


@pytest.mark.parametrize("call_id", ["aBcDeF123", "call_0123456789abcdef01234567", "toolu_01", "1"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "command-r"])
def test_calls_results_and_what_is_said_behind_them_are_shown(family, call_id):
    call = assistant((call_id, "get_time", {}))
    result = {"role": "tool", "tool_call_id": call_id, "content": "says 1;"}
    said = [*turns(U), call, result, {"role": "system", "content": "says 2;"}]
    said += [{"role": role, "content": f"says {i};"} for i, role in ((3, U), (4, A), (5, U))]
    system = {"role": "system", "content": "says 9;"}
    for before in ([], [system]):
        text = chat_format(family).plan([*before, *said], tool_use=read_tool_use(TOOLS)).prompt
        numbers = shown(text)
        assert [n for n in numbers if n != 9] == [*range(6)]
        assert (9 in numbers) == bool(before)
        assert text.count("get_time") >= 2


def test_a_system_message_is_shown_when_the_result_of_a_tool_ends_the_chat():
    call = assistant(("c", "get_time", {}))
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    chat = [*turns(S, U), call, result]
    first = prompt("mistral-v3", S, U)
    later = chat_format("mistral-v3").plan(chat).prompt
    assert shown(first) == shown(later) == [0, 1]
    assert later.startswith(first)
    described = {"name": "get_time", "description": "Returns text 0; and text 1;"}
    use = read_tool_use([{"type": "function", "function": described}])
    assert shown(chat_format("mistral-v3").plan(chat, tool_use=use).prompt) == [0, 1]


def test_ids_of_nine_characters_stand_for_others_alike():
    def ids(family: str, call_id: str) -> list[str]:
        result = {"role": "tool", "tool_call_id": call_id, "content": "noon"}
        said = [*turns(U), assistant((call_id, "get_time", {})), result]
        text = chat_format(family).plan(said).prompt
        return re.findall(r'"(?:call_)?id": "([^"]*)"', text)

    for family in ("mistral-v3", "mistral-small-3.1"):
        assert ids(family, "aBcDeF123") == ["aBcDeF123"] * 2
        short, other = ids(family, "c1"), ids(family, "c2")
        assert short[0] == short[1] != other[0] == other[1]
        assert re.fullmatch("[A-Za-z0-9]{9}", short[0])
        assert ids(family, "c1") == short
    assert ids("mistral-small-3.1", "call_123456789") == ["123456789"] * 2


def test_the_log_says_once_that_instructions_become_text_of_the_user(caplog):
    chat = new_format("qwen3.5")
    chat.plan(turns(S, S, U))
    assert not caplog.records
    for _ in range(2):
        chat.plan(turns(S, U, S))
    assert len(caplog.records) == 1
