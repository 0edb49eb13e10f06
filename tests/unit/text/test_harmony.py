"""gpt-oss's chats: what a template is given, what an answer may be, and how it is read."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.exceptions import InvalidRequestError, ModelLoadError
from prefixcache.server.jobs.answers import AnswerChoice
from prefixcache.text.chat.tools import read_tool_use
from prefixcache.types.request import Ending, RequestOutput, TokenLogprobs
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.structured_output import StructuredOutput
from support.chat_models import QUESTION, TOOLS, assistant, chat_format, tokenizer
from support.repeatable import bounded
from unit.text.test_chat_parsers import cut, read
from unit.text.test_chat_plan import holds

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
SHOWN_CALL = " to=functions.get_weather<|channel|>commentary json<|message|>"
ARGUMENTS = '{"city": "Rome", "unit": "C"}'
WEATHER_CALL = ("get_weather", ARGUMENTS)
PIECES = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>"),
    *("<|call|>", "analysis", "commentary", "final", "assistant", " to=functions.get_time", "json"),
    *("to=", "{", "}", " ", "\n", "<|", "|>", "<", "user", "a", "é", "x" * 300, ANALYSIS, FINAL),
)
WORDS = st.text("ab .\n<|é", max_size=8)


def plan(choice: object = None, tools=TOOLS, **options):
    messages = options.pop("messages", QUESTION)
    use = read_tool_use(tools, choice, parallel=options.pop("parallel", True))
    return chat_format("gpt-oss").plan(messages, tool_use=use, **options)


def said(text: str, **options) -> tuple[str, str, list[tuple[str, str]]]:
    """What is read of an answer, which is the same however it comes."""
    whole = read(plan(**options).new_parser(), [text])
    assert read(plan(**options).new_parser(), list(text)) == whole
    return whole


@settings(max_examples=bounded(100, 5000))
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=20),
    places=st.lists(st.integers(0, 999), max_size=8),
    one=st.booleans(),
)
def test_pieces_make_no_difference_and_nothing_special_is_passed_on(pieces, places, one):
    text = "".join(pieces)
    whole = read(plan(parallel=not one).new_parser(), [text])
    assert read(plan(parallel=not one).new_parser(), cut(text, places)) == whole
    assert read(plan(parallel=not one).new_parser(), list(text)) == whole
    content, reasoning, calls = whole
    for shown in (content, reasoning, *itertools.chain(*calls)):
        assert not any(piece in shown for piece in PIECES[:7])
    assert not one or len(calls) <= 1


@settings(max_examples=bounded(40, 2000))
@given(
    thought=WORDS,
    preamble=WORDS,
    final=WORDS,
    values=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=3)), max_size=2),
    shown=st.booleans(),
    places=st.lists(st.integers(0, 999), max_size=8),
)
def test_an_answer_is_read_as_it_is_written(thought, preamble, final, values, shown, places):
    head = SHOWN_CALL if shown else CALL
    calls = [f"{head}{json.dumps(one)}<|call|><|start|>assistant" for one in values]
    text = f"{ANALYSIS}{thought}{NEXT}{PREAMBLE}{preamble}{NEXT}{''.join(calls)}{FINAL}{final}"
    content, reasoning, found = read(plan().new_parser(), cut(text, places))
    assert reasoning == thought
    assert content == (f"{preamble}\n{final}" if preamble and final else preamble + final)
    assert found == [("get_weather", json.dumps(one)) for one in values]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", "", [])),
        ("Rome is warm.", ("Rome is warm.", "", [])),
        ("to be", ("to be", "", [])),
        ("to=", ("to=", "", [])),
        ("assistant", ("assistant", "", [])),
        (f"{ANALYSIS}hm", ("", "hm", [])),
        (f"{ANALYSIS}hm<|end|>yes", ("yes", "hm", [])),
        (f"{ANALYSIS}hm{FINAL}yes<|return|>", ("yes", "hm", [])),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b", ("", "a\nb", [])),
        ("<|channel|>other<|message|>yes", ("yes", "", [])),
        ("<|message|>yes", ("yes", "", [])),
        ("<|channel|>final <|constrain|>json<|message|>{}", ("{}", "", [])),
        (f"<|channel|>{'x' * 300}", ("x" * 300, "", [])),
        (f"{FINAL}a<|message|>b<|constrain|>c", ("abc", "", [])),
        ("<|channel|>fin", ("", "", [])),
        (f"{ANALYSIS}hm{NEXT}{CALL}{ARGUMENTS}", ("", "hm", [WEATHER_CALL])),
        (f"{SHOWN_CALL}{ARGUMENTS}<|call|>", ("", "", [WEATHER_CALL])),
        (f'{CALL}{{"city"', ("", "", [("get_weather", '{"city"')])),
        ("<|channel|>commentary to=functions.get_w", ("", "", [])),
        ("<|channel|>analysis to=python<|message|>1+1<|call|>", ("", "", [("python", "1+1")])),
        ("<|start|>assistant<|channel|>final<|message|>hi", ("hi", "", [])),
    ],
    ids=lambda value: str(value)[:40],
)
def test_broken_answers_give_what_can_be_given(text, expected):
    assert said(text) == expected


def test_what_calls_a_tool_is_text_where_none_may_be_called():
    assert said(f"{CALL}{ARGUMENTS}", choice="none") == (ARGUMENTS, "", [])
    assert said(f"{CALL}{ARGUMENTS}", tools=None) == (ARGUMENTS, "", [])


def test_an_answer_that_continues_a_message_begins_within_it():
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    continued = plan(messages=messages, **options)
    assert continued.prompt.endswith(f"{FINAL}It is")
    assert read(continued.new_parser(), [" to=a mild", f"{NEXT}{ANALYSIS}so"]) == (
        " to=a mild",
        "so",
        [],
    )
    answer = StructuredOutput("regex", "mild")
    asked = plan(messages=messages, structured_output=answer, **options)
    assert asked.structured_output is answer
    with pytest.raises(InvalidRequestError) as caught:
        plan("required", messages=messages, **options)
    assert caught.value.param == "tool_choice"


def test_an_answer_ends_where_its_message_is_for_others():
    known = tokenizer("gpt-oss").added_token_ids
    params = plan().applied_to(SamplingParams(stop_token_ids=(7,)))
    assert params.stop_token_ids == (7, known["<|return|>"], known["<|call|>"])
    assert not params.skip_special_tokens


def test_log_probabilities_are_those_of_what_is_said():
    choice, seen = AnswerChoice(0, 3, plan().new_parser), []
    texts = ["<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "assistant"]
    for token_id, text in enumerate([*texts, "<|channel|>", "final", "<|message|>", "yes", ""]):
        scored = TokenLogprobs(token_id, -1.0, 1)
        last = text == ""
        choice.add(
            RequestOutput(
                request_id="a",
                text=text,
                token_ids=(token_id,),
                logprobs=(scored,),
                ending=Ending("stop" if last else None),
            )
        )
        seen += [one.token_id for one in choice.content_logprobs]
    assert seen == [10]
    assert (choice.message.content, choice.message.reasoning) == ("yes", "hm")


@pytest.mark.parametrize(
    ("choice", "text", "expected"),
    [
        ("required", f"{CALL}{ARGUMENTS}<|call|>", True),
        ("required", f"{SHOWN_CALL}{ARGUMENTS}", True),
        ("required", f"{ANALYSIS}<{NEXT}{PREAMBLE}Wait.{NEXT}{CALL}{ARGUMENTS}", True),
        ("required", f"{CALL}{ARGUMENTS.replace('C', 'K')}", False),
        ("required", f"{FINAL}No.", False),
        ("required", f"{CALL.replace('weather', 'wealth')}{ARGUMENTS}", False),
        ("auto", f"{FINAL}No.", True),
        ("auto", f"{ANALYSIS}hm{NEXT}{FINAL}No.<|return|>", True),
        ("auto", f"{ANALYSIS}hm{NEXT}{CALL}{ARGUMENTS}", True),
        ("auto", f"{ANALYSIS}hm{NEXT}{CALL}{{}}", False),
        ("auto", f"{ANALYSIS}hm{NEXT}", False),
        ({"type": "function", "function": {"name": "get_time"}}, f"{CALL}{ARGUMENTS}", False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_grammars_hold_what_the_choice_asks_for(choice, text, expected):
    assert holds("gpt-oss", plan(choice).structured_output, text) == expected


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["alone", "with tools"])
def test_the_final_message_is_what_was_asked_for(tools):
    for answer in (
        StructuredOutput("json", '{"enum": ["a/b"]}'),
        StructuredOutput("choice", '["\\"a/b\\""]'),
    ):
        output = plan(tools=tools, structured_output=answer).structured_output
        assert holds("gpt-oss", output, f'{ANALYSIS}c{NEXT}{FINAL}"a/b"')
        assert holds("gpt-oss", output, '<|channel|>final <|constrain|>json<|message|>"a/b"')
        assert not holds("gpt-oss", output, f"{FINAL}c")
        assert not holds("gpt-oss", output, f'{PREAMBLE}c{NEXT}{FINAL}"a/b"')
        assert holds("gpt-oss", output, f"{CALL}{ARGUMENTS}") == (tools is not None)


def test_a_grammar_of_the_clients_begins_with_the_final_message():
    answer = StructuredOutput("grammar", 'start: "a"')
    output = plan("none", structured_output=answer).structured_output
    assert output == StructuredOutput("grammar", 'start: "a"', FINAL)
    with pytest.raises(InvalidRequestError):
        plan("auto", structured_output=answer)
    assert plan("none").structured_output is None


@pytest.mark.parametrize(
    "named", [{"tool_call_parser": "openai"}, {"reasoning_parser": "openai_gptoss"}]
)
def test_channels_are_read_where_the_template_has_them(named):
    assert chat_format("gpt-oss", **named).plan(QUESTION).stop_token_ids
    with pytest.raises(ModelLoadError, match="no channels"):
        chat_format("qwen3", **named)


def test_reasoning_effort_reaches_the_template():
    assert "Reasoning: medium\n" in plan().prompt
    assert "Reasoning: high\n" in plan(variables={"reasoning_effort": "high"}).prompt


def test_instructions_are_one_message_of_the_developers():
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
        *QUESTION,
    ]
    prompt = plan(tools=None, messages=messages).prompt
    assert (
        "<|start|>developer<|message|># Instructions\n\nBe kind.\n\nBe short.\n\n<|end|>" in prompt
    )
    assert prompt.endswith(f"{QUESTION[0]['content']}<|end|><|start|>assistant")


ANSWERED = [
    *QUESTION,
    assistant(
        ("c1", "get_weather", {"city": "Rome", "unit": "C"}),
        ("c2", "get_time", ""),
        content="Let me see.",
        reasoning="Two calls.",
    ),
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "tool", "tool_call_id": "c1", "content": "mild"},
]


def test_a_message_of_several_calls_loses_none():
    """The template shows one call a message, and either what was thought or what was said."""
    prompt = plan(messages=ANSWERED).prompt
    assert (
        f"{ANALYSIS}Two calls.\nLet me see.{NEXT}{SHOWN_CALL}{ARGUMENTS}<|call|>"
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"mild"<|end|>'
        "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>"noon"<|end|>'
    ) in prompt


def test_what_was_thought_is_left_out_once_an_answer_was_given():
    answer = {"role": "assistant", "content": "Mild, at noon.", "reasoning": "So."}
    prompt = plan(messages=[*ANSWERED, answer, *QUESTION]).prompt
    assert ANALYSIS not in prompt
    assert f"<|start|>assistant{FINAL}Mild, at noon.<|end|>" in prompt


def test_the_next_prompt_goes_on_with_the_call_of_the_answer():
    """Or its blocks would be no hits."""
    first = plan(messages=QUESTION).prompt
    message = assistant(("c1", "get_weather", {"city": "Rome", "unit": "C"}), reasoning="hm")
    result = {"role": "tool", "tool_call_id": "c1", "content": "mild"}
    later = plan(messages=[*QUESTION, message, result]).prompt
    assert later.startswith(f"{first}{ANALYSIS}hm{NEXT}{SHOWN_CALL}{ARGUMENTS}<|call|>")
