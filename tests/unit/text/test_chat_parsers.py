"""Answers are read alike however they come in pieces, and as an obvious reader reads them."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.server.jobs.answers import AnswerChoice
from prefixcache.text.chat.calls import formats
from prefixcache.text.chat.message import Message, MessageParser
from prefixcache.text.chat.text_stream import TextStream
from prefixcache.text.chat.tools import read_tool_use
from prefixcache.types.request import Ending, RequestOutput
from support.chat_models import CLOCK, QUESTION, TOOLS, WEATHER, chat_format
from support.repeatable import bounded

FAMILIES = [
    *("smollm2", "qwen2", "qwen3", "llama3", "mistral", "mistral-named", "ministral3"),
    *("phi4-mini", "phi4-mini-own", "granite3", "apriel", "exaone4", "deepseek-v3"),
    "deepseek-v31",
]
ANY_FAMILY = [*FAMILIES, "lfm2", "olmo3", "qwen3-coder", "seed-oss", "gemma4"]
THOUGHT, STEPS = "Here is my thought process:", "Here are my reasoning steps:"
TAGS = {"qwen3": ("<think>\n", "\n</think>\n\n"), "ministral3": ("[THINK]", "[/THINK]")}
LISTS = {
    "mistral": ("[TOOL_CALLS] ", ""),
    "phi4-mini": ("<|tool_call|>", "<|/tool_call|>"),
    "phi4-mini-own": ("<|tool_call|>", "<|/tool_call|>"),
    "granite3": ("<|tool_call|>", ""),
    "apriel": ("\n<tool_calls>", "</tool_calls>"),
}
NAMES = st.sampled_from([tool["function"]["name"] for tool in TOOLS])
# Text that is made of the very pieces that parsers look for.
NOISE = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>"),
            *("</think>", "\n", " ", "[", "]", "{", "}", '"', "\\", ":", ",", ";", "a", "é", "1"),
            *('{"name": "get_time"', '"arguments": ', '"parameters": ', "get_time", "null", "<"),
            *("[THINK]", "[/THINK]", "<|tool_call|>", "<|/tool_call|>", "<|tool_call_start|>"),
            *("<|tool_call_end|>", "<function_calls>", "</function_calls>", "(", ")", "city="),
            *("'", "\\u00e9", "<function=f>", "</function>", "<parameter=a>", "</parameter>"),
            *(
                "<seed:tool_call>",
                "<|tool_call>",
                "call:f{",
                '<|"|>',
                "<tool_call|>",
                "<tool_calls>",
            ),
            *(
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "function<｜tool▁sep｜>",
                "```json",
            ),
            *("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
        ]
    ),
    max_size=24,
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{}[],: é\n</', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=3), VALUES)), max_size=3)
WORDS = st.text("ab .\n", max_size=8).filter(lambda text: text == text.strip())


def parser(family: str, *, begin: str = "", **options) -> MessageParser:
    use = read_tool_use(TOOLS, **options)
    messages = [*QUESTION, {"role": "user", "content": begin}] if begin else QUESTION
    return chat_format(family).plan(messages, tool_use=use).new_parser()


def read(parser: MessageParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    message = Message()
    for piece in pieces:
        message.add(parser.push(piece, finished=False))
    message.add(parser.push("", finished=True))
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == len(ids)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.content, message.reasoning, calls


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


def written(family: str, content: str, calls: list[tuple[str, dict]]) -> str:
    """The answer as the family writes it."""
    key = "parameters" if family == "llama3" else "arguments"
    objects = [json.dumps({"name": name, key: given}) for name, given in calls]
    if not calls:
        return content
    if family == "llama3":
        return f"{content}<|python_tag|>" + "; ".join(objects)
    if family in LISTS:
        opening, closing = LISTS[family]
        return f"{content}{opening}[{', '.join(objects)}]{closing}"
    if family == "exaone4":
        return f"{content}\n" + "\n".join(f"<tool_call>{one}</tool_call>" for one in objects)
    if family.startswith("deepseek"):
        return f"{content}<｜tool▁calls▁begin｜>{deepseek(family, calls)}<｜tool▁calls▁end｜>"
    if family in ("mistral-named", "ministral3"):
        parts = [f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls]
        return content + "".join(parts)
    if family == "smollm2":
        return f"{content}\n<tool_call>[\n" + ",\n".join(objects) + "\n]</tool_call>"
    return f"{content}\n" + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def deepseek(family: str, calls: list[tuple[str, dict]]) -> str:
    written = [(name, json.dumps(given)) for name, given in calls]
    if family == "deepseek-v31":
        parts = [f"{name}<｜tool▁sep｜>{given}" for name, given in written]
    else:
        parts = [f"function<｜tool▁sep｜>{name}\n```json\n{given}\n```" for name, given in written]
    between = "" if family == "deepseek-v31" else "\n"
    return between.join(f"<｜tool▁call▁begin｜>{part}<｜tool▁call▁end｜>" for part in parts)


@pytest.mark.parametrize("family", ANY_FAMILY)
@settings(max_examples=bounded(30, 3000))
@given(text=NOISE, places=st.lists(st.integers(0, 400), max_size=8), one=st.booleans())
def test_pieces_make_no_difference(family, text, places, one):
    """Not in what looks like a call and is none, and not where an answer is cut off."""
    whole = read(parser(family, parallel=not one), [text])
    assert read(parser(family, parallel=not one), cut(text, places)) == whole
    assert read(parser(family, parallel=not one), list(text)) == whole
    assert not one or len(whole[2]) <= 1


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=bounded(12, 1000))
@given(content=WORDS, calls=CALLS, thought=WORDS, places=st.lists(st.integers(0, 999), max_size=8))
def test_calls_are_read_as_they_are_written(family, content, calls, thought, places):
    text = written(family, content, calls)
    reasons = family in TAGS
    opening, closing = TAGS.get(family, ("", ""))
    text = f"{opening}{thought}{closing}{text}" if reasons else text
    said, reasoned, found = read(parser(family), cut(text, places))
    assert said == content
    assert reasoned == (thought if reasons else "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(max_examples=bounded(20, 1000))
@given(calls=CALLS.filter(bool), places=st.lists(st.integers(0, 999), max_size=8), data=st.data())
def test_a_cut_answer_tells_what_there_is_of_its_last_call(calls, places, data):
    text = written("qwen2", "", calls)
    end = data.draw(st.integers(0, len(text)))
    _, _, found = read(parser("qwen2"), cut(text[:end], places))
    named = re.findall(r'\{"name": "(\w+)", ', text[:end])
    assert [name for name, _ in found][: len(named)] == named
    for (_, arguments), (_, returned) in zip(calls, found, strict=False):
        assert json.dumps(arguments).startswith(returned)


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("llama3", '{"name": "get_time", "parameters": null}', "", [("get_time", "{}")]),
        ("llama3", '{"name": "get_time"}', "", [("get_time", "{}")]),
        ("llama3", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("qwen2", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        ("qwen2", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
        ("qwen2", "Use <tool_call> for calls.", "Use <tool_call> for calls.", []),
        ("smollm2", "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        ("smollm2", "a < b <tool", "a < b <tool", []),
        # Without the word, the block, the end; what follows is content.
        (
            "deepseek-v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f\n{}<｜tool▁call▁begin｜>so",
            "<｜tool▁call▁begin｜>so",
            [("f", "{}")],
        ),
        ("deepseek-v3", "<｜tool▁calls▁begin｜>f {}", "<｜tool▁calls▁begin｜>f {}", []),
    ],
)
def test_answers_that_are_no_model_of_form(family, text, content, calls):
    assert read(parser(family), [text]) == (content, "", calls)


@pytest.mark.parametrize(
    ("family", "options", "text", "expected"),
    [
        ("qwen3", {}, "<think>\nhm\n</think>\n\nyes", ("yes", "hm")),
        ("qwen3", {}, "no <think>tags</think>", ("no <think>tags</think>", "")),
        ("qwen3", {}, "<think>cut off", ("", "cut off")),
        ("qwen3-thinking", {}, "hm\n</think>\n\nyes", ("yes", "hm")),
        ("qwen3", {"reasoning_parser": "deepseek_r1"}, "hm</think>yes", ("yes", "hm")),
        ("qwen3", {"reasoning_parser": "none"}, "<think>a</think>b", ("<think>a</think>b", "")),
        ("qwen2", {}, "<think>a</think>b", ("<think>a</think>b", "")),
        ("ministral3", {}, "[THINK]hm[/THINK]yes", ("yes", "hm")),
        ("gemma4-thinking", {}, "<|channel>thought\nhm\n<channel|>yes", ("yes", "hm")),
        ("seed-oss", {}, "<seed:think>hm</seed:think>\nyes", ("yes", "hm")),
        ("reka", {}, "<reasoning>hm</reasoning> yes", ("yes", "hm")),
        ("granite3.2", {}, f"{THOUGHT}\nhm\nHere is my response:\nyes", ("yes", "hm")),
        ("granite3.3", {}, "<think>hm</think>\n<response>yes</response>\n", ("yes", "hm")),
        ("granite3.3", {}, "<think>hm</think>yes</response>", ("yes</response>", "hm")),
        ("granite3.3", {}, "<response>yes</response>", ("<response>yes</response>", "")),
        ("qwen3", {}, "<think>hm</think><response>a", ("<response>a", "hm")),
        ("apriel", {}, f"{STEPS}\nhm\n[BEGIN FINAL RESPONSE]\nyes", ("yes", "hm")),
        ("apriel", {}, f"{STEPS} hm[BEGIN FINAL RESPONSE]a\n[END FINAL RESPONSE]\n", ("a", "hm")),
    ],
)
def test_reasoning_is_separated_from_content(family, options, text, expected):
    for pieces in ([text], list(text)):
        plan = chat_format(family, **options).plan(QUESTION)
        assert read(plan.new_parser(), pieces) == (*expected, [])


def test_a_budget_of_no_thought_is_within_reasoning():
    plan = chat_format("seed-oss-budget").plan(QUESTION)
    text = "I answer at once.</seed:cot_budget_reflect>\n</seed:think>yes"
    said, reasoned, _ = read(plan.new_parser(), [text])
    assert said == "yes"
    assert reasoned.startswith("I answer at once.")


def test_calls_keep_the_ids_that_answers_name():
    """A template shows them again; one that comes twice names one call alone."""
    one = "[TOOL_CALLS]get_time[CALL_ID]aBcDeF123[ARGS]{}"
    text = f"{one}{one}[TOOL_CALLS]get_time[CALL_ID]short[ARGS]{{}}[TOOL_CALLS]get_time[ARGS]{{}}"
    message = Message()
    message.add(parser("mistral-ids").push(text, finished=True))
    assert [call.name for call in message.tool_calls] == ["get_time"] * 4
    ids = [call.id for call in message.tool_calls]
    assert ids[0] == "aBcDeF123"
    assert len({*ids}) == 4
    assert {len(one) for one in ids} == {9}


def test_an_answer_without_thinking_begins_with_content():
    plan = chat_format("qwen3").plan(QUESTION, variables={"enable_thinking": False})
    assert plan.prompt.endswith("</think>\n\n")
    assert read(plan.new_parser(), ["<think>x"]) == ("<think>x", "", [])


def test_without_a_choice_of_tools_nothing_is_a_call():
    text = written("qwen2", "", [("get_time", {})])
    assert read(parser("qwen2", choice="none"), [text]) == (text, "", [])


def test_names_and_ids_come_first_and_once():
    text = written("qwen2", "", [("get_weather", {"city": "Rome"}), ("get_time", {})])
    reading, seen = parser("qwen2"), set()
    for piece in text:
        for delta in reading.push(piece, finished=False).tool_calls:
            assert (delta.index in seen) == (delta.id is None) == (delta.name is None)
            seen.add(delta.index)
    assert seen == {0, 1}
    assert {WEATHER["function"]["name"], CLOCK["function"]["name"]} == {"get_weather", "get_time"}


@settings(max_examples=bounded(20, 1000))
@given(places=st.lists(st.integers(0, 400), max_size=8), choice=st.sampled_from(["auto", "none"]))
def test_a_response_template_reads_what_no_parser_of_ours_knows(places, choice):
    calls = '<call>{"f": "get_time", "a": {}}</call><call>{"f": "g", "a": {"b": "}"}}</call>'
    content, reasoning, found = read(
        parser("described", choice=choice), cut(f"<hm>so</hm>Wait.{calls}", places)
    )
    assert reasoning == "so"
    assert content == ("Wait." if choice == "auto" else "Wait." + re.sub("</?call>", "", calls))
    assert found == ([("get_time", "{}"), ("g", '{"b": "}"}')] if choice == "auto" else [])


def test_what_a_response_template_cannot_read_is_content():
    assert read(parser("described"), ["a<call>{no json", "</call>", "b"])[0] == "a{no json</call>b"


@pytest.mark.parametrize("name", ["null", "3", "[]"])
def test_a_call_without_a_name_is_content_in_a_response_template_too(name: str) -> None:
    written = f'{{"f": {name}, "a": {{}}}}'
    assert read(parser("described"), [f"a<call>{written}</call>"]) == (f"a{written}", "", [])


def test_an_answer_that_restarts_is_read_again():
    choice = AnswerChoice(0, 3, lambda: parser("qwen2"))
    choice.add(RequestOutput(request_id="a", text='<tool_call>{"name": "f", "argu', token_ids=(1,)))
    choice.add(RequestOutput(request_id="a", restarted=True))
    choice.add(RequestOutput(request_id="a", text="Hello.", token_ids=(2,), ending=Ending("stop")))
    assert (choice.message.content, choice.message.tool_calls) == ("Hello.", [])
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("name", ['say "hi"', "{}", "back\\slash"])
def test_names_of_a_history_are_written_whole(name: str) -> None:
    """A client may send calls of functions that no tool of the request is."""
    call = {"id": "abcdefghi", "function": {"name": name, "arguments": {"a": 1}}}
    shown = formats.HERMES.text([call]).removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(shown) == {"name": name, "arguments": {"a": 1}}
    written = formats.MISTRAL_WITH_IDS.text([call])
    assert written == f'[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{{"a": 1}}'


def test_a_value_without_an_end_is_searched_once():
    """Of held text all would be searched again with every token."""
    stream, pieces = TextStream(), []
    reading = stream.value(pieces.append)
    for text in ("12", "34"):
        stream.push(text, finished=False)
        next(reading)
    assert pieces == ["12", "34"]
