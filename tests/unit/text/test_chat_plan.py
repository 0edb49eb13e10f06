"""What is asked of the engine for a chat with tools: prompts, errors, and grammars that hold."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from prefixcache.exceptions import InvalidRequestError, ModelLoadError
from prefixcache.text.chat.grammars import schema_problem
from prefixcache.text.chat.tools import read_tool_use
from prefixcache.types.structured_output import StructuredOutput
from support.chat_models import CLOCK, QUESTION, TOOLS, WEATHER, assistant, chat_format, tokenizer

NAMED = {"type": "function", "function": {"name": "get_time"}}
ARGUMENTS = '{"city": "Rome", "unit": "C"}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "get_time", "arguments": {}}'
HERMES, HERMES_OTHER = (f"<tool_call>\n{one}\n</tool_call>" for one in (CALL, OTHER))
LLAMA = CALL.replace("arguments", "parameters")
WRONG = HERMES.replace('"C"', '"K"')
DEEPSEEK = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
    "<｜tool▁call▁end｜>"
)


def deepseek(calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


class _Source:
    bos_token_id = None

    def __init__(self, family: str) -> None:
        self._tokenizer = tokenizer(family)
        size = self._tokenizer.vocab_size
        self.tokens = [self._tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(self._tokenizer.special_token_ids)
        self.eos_token_id = self._tokenizer.eos_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode()).tolist()


def holds(family: str, output: StructuredOutput, text: str) -> bool:
    """Whether a whole answer follows the grammar, from the marker on where it has one."""
    source = _Source(family)
    if output.begin_after is not None:
        text = text.partition(output.begin_after)[2]
    backend = LLTokenizer(TokenizerWrapper(source), eos_token=[source.eos_token_id])
    matcher = LLMatcher(backend, LLMatcher.grammar_from_lark(output.text))
    assert not matcher.is_error(), matcher.get_error()
    tokens = source(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar(family: str, choice: object = None, **options) -> StructuredOutput | None:
    answer = options.pop("answer", None)
    use = read_tool_use(TOOLS, choice, **options)
    return (
        chat_format(family).plan(QUESTION, tool_use=use, structured_output=answer).structured_output
    )


@pytest.mark.parametrize(
    ("family", "choice", "parallel", "text", "expected"),
    [
        ("qwen2", "required", True, HERMES, True),
        ("qwen2", "required", True, f"{HERMES}\n{HERMES_OTHER}", True),
        ("qwen2", "required", False, f"{HERMES}\n{HERMES_OTHER}", False),
        ("qwen2", "required", True, WRONG, False),
        ("qwen2", "required", True, "No.", False),
        ("qwen2", "auto", True, "No.", True),
        ("qwen2", "auto", True, f"Let me see.\n{HERMES}", True),
        ("qwen2", "auto", True, f"Let me see.\n{WRONG}", False),
        ("qwen2", NAMED, True, HERMES_OTHER, True),
        ("qwen2", NAMED, True, f"{HERMES_OTHER}\n{HERMES_OTHER}", False),
        ("qwen2", NAMED, True, HERMES, False),
        ("qwen3", "required", True, HERMES, True),
        ("qwen3", "required", True, f"<think>\n{WRONG}\n</think>\n\n{HERMES}", True),
        ("qwen3", "required", True, f"<think>\nhm\n</think>\n\n{WRONG}", False),
        ("qwen3", "required", True, f"<think>\nhm\n</think>\n{HERMES}", True),
        ("qwen3", "auto", True, f"<think>\n{WRONG}\n</think>\n\nNo.", True),
        ("qwen3", "auto", True, f"<think>\nhm\n</think>\n\n{WRONG}", False),
        ("qwen3-thinking", "required", True, f"hm\n</think>\n\n{HERMES}", True),
        ("qwen3-thinking", "required", True, f"hm\n</think>\n\n{WRONG}", False),
        ("smollm2", "required", True, f"<tool_call>[\n{CALL},\n{OTHER}\n]</tool_call>", True),
        ("smollm2", "required", True, f"<tool_call>[\n{CALL},\n{CALL}", False),
        ("smollm2", "auto", True, "a < b", True),
        ("llama3", "required", True, LLAMA, True),
        ("llama3", "required", True, CALL, False),
        ("llama3", "auto", True, LLAMA, True),
        ("llama3", "auto", True, LLAMA.replace('": "get', '":"get').replace(", ", ",", 1), True),
        ("llama3", "auto", True, f"<|python_tag|>{LLAMA}", True),
        ("llama3", "auto", True, f"Well. {LLAMA}", True),
        ("llama3", "auto", True, '{"name": "Ann", "age": 3}', True),
        ("llama3", "auto", True, '{"name": "get_times"}', True),
        ("llama3", "auto", True, LLAMA.replace('"C"', '"K"'), False),
        ("llama3", "auto", True, CALL, False),
        ("llama3", "auto", True, f"<|python_tag|>{CALL}", False),
        ("mistral", "required", True, f"[TOOL_CALLS][{CALL}, {OTHER}]", True),
        ("mistral", "required", True, f'[TOOL_CALLS][{CALL[:-1]}, "id": "aBcDeF123"}}]', True),
        ("mistral", "auto", True, f"Well[TOOL_CALLS][{OTHER}]", True),
        ("mistral", "auto", True, f"Well[TOOL_CALLS][{CALL}", False),
        ("mistral-named", "required", True, "[TOOL_CALLS]get_time[ARGS]{}", True),
        ("ministral3", "required", True, "[THINK]hm[/THINK][TOOL_CALLS]get_time[ARGS]{}", True),
        ("ministral3", "auto", True, "[THINK]hm[/THINK]No.", True),
        ("phi4-mini", "required", True, f"<|tool_call|>[{CALL}, {OTHER}]<|/tool_call|>", True),
        ("phi4-mini-own", "auto", True, f"Well<|tool_call|>[{CALL}]", False),
        ("granite3", "required", True, f"<|tool_call|>[{CALL}]", True),
        ("granite3", "required", False, f"<|tool_call|>[{CALL}, {OTHER}]", False),
        ("exaone4", "required", True, HERMES.replace("\n", ""), True),
        ("exaone4", "required", True, HERMES, False),
        ("deepseek-v3", "required", True, deepseek(f"{DEEPSEEK}\n{DEEPSEEK}"), True),
        ("deepseek-v3", "required", False, deepseek(f"{DEEPSEEK}\n{DEEPSEEK}"), False),
        ("deepseek-v3", "auto", True, f"Well.{deepseek(DEEPSEEK.replace('C', 'K'))}", False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_grammars_hold_what_the_choice_asks_for(family, choice, parallel, text, expected):
    output = grammar(family, choice, parallel=parallel)
    assert output is not None
    assert holds(family, output, text) == expected


@pytest.mark.parametrize(
    "answer",
    [
        StructuredOutput("json", '{"enum": ["a/b"]}'),
        StructuredOutput("choice", '["\\"a/b\\""]'),
        StructuredOutput("regex", '"a/[b]"'),
    ],
    ids=lambda answer: answer.kind,
)
def test_an_answer_is_a_call_or_what_was_asked_for(answer):
    for family in ("qwen2", "qwen3"):
        output = grammar(family, "auto", answer=answer)
        assert holds(family, output, '"a/b"')
        assert holds(family, output, HERMES)
        assert not holds(family, output, "other")


def test_what_an_answer_must_look_like_holds_behind_reasoning():
    answer = StructuredOutput("json", '{"enum": [1]}')
    optional = chat_format("qwen3").plan(QUESTION, structured_output=answer).structured_output
    assert [holds("qwen3", optional, t) for t in ("1", "<think>2</think>\n\n1", "2")] == [1, 1, 0]
    sure = chat_format("qwen3-thinking").plan(QUESTION, structured_output=answer)
    assert sure.structured_output == StructuredOutput("json", answer.text, "</think>")
    assert chat_format("qwen2").plan(QUESTION, structured_output=answer).structured_output is answer


def test_a_chat_that_may_call_nothing_has_no_grammar():
    assert grammar("qwen2", "none") is None


def test_tools_that_may_not_be_called_are_not_begun():
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    output = grammar("llama3", {"type": "allowed_tools", "allowed_tools": allowed})
    assert not holds("llama3", output, LLAMA)
    assert holds("llama3", output, '{"name": "get_time", "parameters": {}}')


def test_strict_tools_refuse_what_a_grammar_cannot_keep():
    schema = {"type": "object", "properties": {"a": {"not": {"required": ["b"]}}}}
    for strict in (False, True):
        tool = {
            "type": "function",
            "function": {"name": "f", "parameters": schema, "strict": strict},
        }
        plan = chat_format("qwen2").plan(
            QUESTION, tool_use=read_tool_use([CLOCK, tool], "required")
        )
        text = plan.structured_output.text
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text))
        assert bool(error) == strict
    field, reason = schema_problem(text, error)
    assert field == "tools[1].function.parameters"
    assert "not" in reason
    assert "get_time" not in reason


HISTORY = [
    *QUESTION,
    assistant(("c1", "get_weather", {"city": "Rome", "unit": "C"}), ("c2", "get_time", "")),
    {"role": "tool", "tool_call_id": "c1", "content": "mild"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "noon"}]},
]


def test_a_template_shows_tools_calls_and_results():
    prompt = chat_format("qwen2").plan(HISTORY, tool_use=read_tool_use(TOOLS)).prompt
    assert json.dumps(TOOLS) in prompt
    assert f"<|im_start|>assistant\n{HERMES}\n{HERMES_OTHER}<|im_end|>" in prompt
    assert "<|im_start|>tool\nmild<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>" in prompt


def test_a_template_of_one_call_a_message_shows_each_with_its_result():
    prompt = chat_format("llama3-own").plan(HISTORY, tool_use=read_tool_use(TOOLS)).prompt
    turns = ("assistant", LLAMA), ("tool", "mild")
    turns += ("assistant", OTHER.replace("arguments", "parameters")), ("tool", "noon")
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert f"{shown}<|im_start|>assistant" in prompt


def test_a_template_that_shows_no_calls_shows_them_as_text():
    prompt = chat_format("phi4-mini-own").plan(HISTORY, tool_use=read_tool_use(TOOLS)).prompt
    functions = json.dumps([tool["function"] for tool in TOOLS])
    assert f"<|tool|>{functions}<|/tool|><|end|>" in prompt
    assert f"<|assistant|><|tool_call|>[{CALL}, {OTHER}]<|/tool_call|><|end|>" in prompt
    assert prompt.endswith("<|tool_response|>mild<|end|><|tool_response|>noon<|end|><|assistant|>")
    plain = chat_format("phi4-mini-own").plan(QUESTION).prompt
    assert plain == f"<|user|>{QUESTION[0]['content']}<|end|><|assistant|>"


def test_a_template_without_tools_is_given_them_as_text():
    system = {"role": "system", "content": "Be kind."}
    prompt = chat_format("smollm2").plan([system, *HISTORY], tool_use=read_tool_use(TOOLS)).prompt
    begin = "<|im_start|>system\nBe kind.\n\n"
    assert prompt.startswith(begin)
    assert json.dumps(TOOLS) in prompt
    assert (
        f"<|im_start|>assistant\n<tool_call>[\n{CALL},\n{OTHER}\n]</tool_call><|im_end|>" in prompt
    )
    results = ("<tool_response>\nmild\n</tool_response>", "<tool_response>\nnoon\n</tool_response>")
    assert "<|im_start|>user\n" + "\n".join(results) + "<|im_end|>" in prompt


def test_tools_stand_before_the_first_question_where_no_system_message_may():
    prompt = chat_format("by-turns").plan(HISTORY, tool_use=read_tool_use(TOOLS)).prompt
    assert prompt.startswith("<|im_start|>user\nYou can call functions.")
    assert f"{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n<tool_call>[" in prompt


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("smollm2", f"<tool_call>[\n{CALL}\n]</tool_call>"),
        ("qwen2", HERMES),
        ("phi4-mini", f"<|tool_call|>[{CALL}]<|/tool_call|>"),
        ("phi4-mini-own", f"<|tool_call|>[{CALL}]<|/tool_call|>"),
        ("granite3", f"<|tool_call|>[{CALL}]"),
        ("nemotron", f"<TOOLCALL>[{CALL}]</TOOLCALL>"),
        ("apriel", f"<tool_calls>[{CALL}]</tool_calls>"),
        ("exaone4", f"<tool_call>{CALL}</tool_call>"),
        ("deepseek-v3", deepseek(DEEPSEEK)),
        (
            "deepseek-v31",
            deepseek(
                f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
            ),
        ),
        ("mistral-ids", f"[TOOL_CALLS]get_weather[CALL_ID]aBcDeF123[ARGS]{ARGUMENTS}"),
        ("smollm3-own", HERMES),
        ("lfm2.5-own", "<|tool_call_start|>[get_weather(city='Rome', unit='C')]<|tool_call_end|>"),
        ("lfm2-own", "<|tool_call_start|>[get_weather(city='Rome', unit='C')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get_weather(city='Rome', unit='C')]<|tool_call_end|>"),
        ("olmo3", "<function_calls>\nget_weather(city='Rome', unit='C')\n</function_calls>"),
        (
            "qwen3-coder",
            (
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
                "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>"
            ),
        ),
        (
            "seed-oss",
            (
                "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n"
                "<parameter=unit>C</parameter>\n</function>\n</seed:tool_call>"
            ),
        ),
        (
            "gemma4",
            '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,unit:<|"|>C<|"|>}<tool_call|>',
        ),
    ],
    ids=lambda value: value[:16],
)
def test_the_next_prompt_goes_on_with_the_calls_of_the_answer(family, answer):
    """Or their blocks would be no hits; and a grammar that forces calls allows them so."""
    use = read_tool_use(TOOLS)
    first = chat_format(family).plan(QUESTION, tool_use=use).prompt
    assert holds(family, grammar(family, "required"), answer)
    message = assistant(("aBcDeF123", "get_weather", {"city": "Rome", "unit": "C"}))
    result = {"role": "tool", "tool_call_id": "aBcDeF123", "content": "mild"}
    later = chat_format(family).plan([*QUESTION, message, result], tool_use=use).prompt
    assert later.startswith(first + answer)


@pytest.mark.parametrize(("family", "role"), [("smollm2", "system"), ("developer", "developer")])
def test_developers_speak_in_a_role_that_the_template_knows(family, role):
    messages = [{"role": "developer", "content": "Be short."}, *QUESTION]
    prompt = chat_format(family).plan(messages).prompt
    assert prompt.startswith(f"<|im_start|>{role}\nBe short.<|im_end|>\n<|im_start|>user")
    assert messages[0]["role"] == "developer"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_given_back_to_the_template(name):
    said = {"role": "assistant", "content": "Mild.", name: "Rome is in Italy."}
    shown = [
        chat_format(f).plan([*QUESTION, said, *QUESTION]).prompt for f in ("qwen3", "ministral3")
    ]
    assert "<think>\nRome is in Italy.\n</think>\n\nMild.<|im_end|>" in shown[0]
    assert "[THINK]Rome is in Italy.[/THINK]Mild.<|im_end|>" in shown[1]


def test_a_refusal_is_what_an_answer_said():
    said = {"role": "assistant", "content": None, "refusal": "Never."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]}
    plain = {"role": "assistant", "content": "Never."}
    prompts = [chat_format("qwen3").plan([*QUESTION, turn]).prompt for turn in (said, parts, plain)]
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_turn_goes_on_behind_results_where_they_are_fields_of_its_message():
    use, said = read_tool_use(TOOLS), {"role": "assistant", "content": "Mild."}
    prompts = [
        chat_format("gemma4-own").plan([*QUESTION, *more], tool_use=use).prompt
        for more in (HISTORY[1:2], HISTORY[1:], [*HISTORY[1:], said])
    ]
    results = "".join(
        f'<|tool_response>response:{name}{{value:<|"|>{text}<|"|>}}<tool_response|>'
        for name, text in (("get_weather", "mild"), ("get_time", "noon"))
    )
    head = prompts[0].removesuffix("<turn|>\n<|turn>model\n")
    assert head.endswith("<|tool_call>call:get_time{}<tool_call|>")
    assert prompts[1] == head + results
    assert prompts[2] == head + results + "Mild.<turn|>\n"


def _tool(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([CLOCK] * 2, None, "tools"),
        ([CLOCK] * 1025, None, "tools"),
        ([1], None, "tools[0]"),
        ([CLOCK, {"type": "custom"}], None, "tools[1].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([_tool(name="a b")], None, "tools[0].function.name"),
        ([_tool(name="")], None, "tools[0].function.name"),
        ([_tool(description=1)], None, "tools[0].function.description"),
        ([_tool(parameters=[])], None, "tools[0].function.parameters"),
        ([_tool(parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([], "required", "tool_choice"),
        ([CLOCK], "any", "tool_choice"),
        ([CLOCK], {"type": "function"}, "tool_choice.function"),
        ([CLOCK], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([CLOCK], {"type": "allowed_tools", "allowed_tools": {"tools": []}}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_tools_are_named(tools, choice, param):
    with pytest.raises(InvalidRequestError) as caught:
        read_tool_use(tools, choice)
    assert caught.value.param == (param or "tool_choice.allowed_tools.tools")


def test_a_tool_or_call_whose_type_is_null_is_a_function():
    use = read_tool_use([{**CLOCK, "type": None}])
    assert use.callable_tools[0].name == CLOCK["function"]["name"]
    said = assistant(("c1", "get_time", "{}"))
    untyped = {**said, "tool_calls": [{**said["tool_calls"][0], "type": None}]}
    prompts = [chat_format("qwen2").plan([*QUESTION, one]).prompt for one in (said, untyped)]
    assert prompts[0] == prompts[1]


def test_allowed_tools_are_the_ones_that_may_be_called():
    allowed = {"mode": "required", "tools": [NAMED]}
    use = read_tool_use(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed})
    assert (use.mode, use.parallel, len(use.tools)) == ("required", True, 2)
    assert [tool.name for tool in use.callable_tools] == ["get_time"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "c9"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "tool_calls[0]"),
        (assistant(("", "f", "")), "tool_calls[0].id"),
        (assistant(("c", None, "")), "tool_calls[0].function.name"),
        (assistant(("c", "f", f"[{'1,' * 2**16}1]")), "tool_calls[0].function.arguments"),
        ({"role": "assistant", "reasoning": 1}, "reasoning"),
        ({"role": "user"}, "content"),
        ({"role": "developer", "content": None}, "content"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_history_is_named(message, param):
    for family in ("smollm2", "qwen2"):
        with pytest.raises(InvalidRequestError) as caught:
            chat_format(family).plan([*QUESTION, message])
        assert caught.value.param == f"messages[1].{param}"


@pytest.mark.parametrize(
    "text", ["{", '{"a": "b', "[1]", '{"a": NaN}', '{"a":' + "[" * 9999, "\ud800"]
)
@pytest.mark.parametrize("family", ["smollm2", "qwen2", "deepseek-v3", "gemma4-own"])
def test_arguments_that_are_no_object_are_shown_as_an_empty_one(family, text):
    prompts = [
        chat_format(family).plan([*QUESTION, assistant(("c", "get_time", said))]).prompt
        for said in (text, "{}")
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("family", ["unknown", "minimax"])
def test_a_form_that_nobody_knows_is_refused_or_named(caplog, family):
    unknown = chat_format(family)
    assert "--tool-call-parser" in caplog.text
    with pytest.raises(InvalidRequestError, match="--tool-call-parser"):
        unknown.plan(QUESTION, tool_use=read_tool_use(TOOLS))
    assert unknown.plan(QUESTION, tool_use=read_tool_use(TOOLS, "none")).structured_output is None
    known = chat_format(family, tool_call_parser="hermes")
    assert known.plan(QUESTION, tool_use=read_tool_use(TOOLS)).structured_output is not None
    with pytest.raises(ModelLoadError, match="shows no tools"):
        chat_format("smollm2", tool_call_parser="hermes")


def test_calls_that_only_a_response_template_knows_cannot_be_forced():
    described = chat_format("described")
    assert described.plan(QUESTION, tool_use=read_tool_use(TOOLS)).show_special_tokens
    with pytest.raises(InvalidRequestError, match="cannot be forced"):
        described.plan(QUESTION, tool_use=read_tool_use(TOOLS, "required"))
    with pytest.raises(ModelLoadError, match="has none"):
        chat_format("unknown", tool_call_parser="response_template")


def test_special_tokens_are_shown_where_they_mark_calls():
    use = read_tool_use([WEATHER])
    shown = [
        chat_format(f).plan(QUESTION, tool_use=use).show_special_tokens
        for f in ("mistral", "qwen3", "smollm2")
    ]
    assert shown == [True, False, False]
