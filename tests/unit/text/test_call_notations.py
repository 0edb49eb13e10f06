"""Calls in program notation and in tags: read back as they were written, however they come."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.exceptions import InvalidRequestError
from prefixcache.text.chat.tools import read_tool_use
from support.chat_models import QUESTION, chat_format
from support.repeatable import bounded
from unit.text.test_chat_parsers import cut, read
from unit.text.test_chat_plan import holds

FAMILIES = ["lfm2", "olmo3", "qwen3-coder", "seed-oss", "gemma4"]
TREE = {
    "type": "object",
    "properties": {"deep": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
}
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "many": {"type": "array", "items": {"type": "string"}},
    "data": {"type": "object"},
    "maybe": {"type": ["string", "null"]},
    "kind": {"enum": ["a b", "it's", 3, None, True]},
    "tree": {"$ref": "#/$defs/Tree"},
}
PARAMETERS = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["text"],
    "$defs": {"Tree": TREE},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
# What tags hold that name no types.
XML_READ = (
    '{"text": "1", "count": 1, "sure": true, "data": {"a": null}, "other": "x", "maybe": "5"}'
)
PLAIN = {"type": "function", "function": {"name": "g"}}

TEXT = st.text("ab'\"\\{}[]()<>/=,: \né\U0001f999", max_size=9)
MEMBER = st.text("abc", min_size=1, max_size=2)
INNER = TEXT | st.integers() | st.booleans() | st.none()
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXT},
    optional={
        "count": st.integers(-(2**60), 2**60),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "sure": st.booleans(),
        "many": st.lists(TEXT, max_size=3),
        "data": st.dictionaries(MEMBER, INNER | st.lists(INNER, max_size=2), max_size=3),
        "maybe": TEXT | st.none(),
        "kind": st.sampled_from(["a b", "it's", 3, None, True]),
    },
)
CALLS = st.lists(st.just(("g", {})) | ARGUMENTS.map(lambda given: ("f", given)), max_size=3)
CONTENT = st.text("ab .\n", max_size=8).filter(lambda text: text == text.strip())


def written(family: str, calls: list[tuple[str, dict]]) -> str:
    """The calls as the family's models write them."""
    if not calls:
        return ""
    if family == "gemma4":
        return "".join(
            f"<|tool_call>call:{name}{gemma(given)}<tool_call|>" for name, given in calls
        )
    if family == "lfm2":
        return f"<|tool_call_start|>[{', '.join(python(*c, repr) for c in calls)}]<|tool_call_end|>"
    if family == "olmo3":
        lines = "\n".join(python(*call, olmo) for call in calls)
        return f"<function_calls>\n{lines}\n</function_calls>"
    tag, line = ("seed:tool_call", "") if family == "seed-oss" else ("tool_call", "\n")
    return "\n".join(tagged(*call, tag, line) for call in calls)


def python(name: str, given: dict, write) -> str:
    return f"{name}({', '.join(f'{key}={write(value)}' for key, value in given.items())})"


def olmo(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in sorted(value.items())) + "}"
    return f"[{','.join(map(gemma, value))}]" if isinstance(value, list) else json.dumps(value)


def tagged(name: str, given: dict, tag: str, line: str) -> str:
    plain = {key: v if isinstance(v, str) else tag_text(v) for key, v in given.items()}
    parameters = "".join(
        f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in plain.items()
    )
    return f"<{tag}>\n<function={name}>\n{parameters}</function>\n</{tag}>"


def tag_text(value: object) -> str:
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value)


def plan(family: str, choice: object = None, tools=(TOOL, PLAIN), **options):
    use = read_tool_use(list(tools), choice, **options)
    return chat_format(family).plan(QUESTION, tool_use=use)


def is_writable(family: str, given: dict) -> bool:
    """Line breaks around a value are no part of it, so Seed-OSS cannot write them."""
    if family == "seed-oss":
        return all(v == v.strip("\n") for v in given.values() if isinstance(v, str))
    return True


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=bounded(40, 3000))
@given(content=CONTENT, calls=CALLS, places=st.lists(st.integers(0, 999), max_size=8))
def test_calls_are_read_as_they_are_written(family, content, calls, places):
    calls = [(name, given) for name, given in calls if is_writable(family, given)]
    text = content + written(family, calls)
    said, reasoned, found = read(plan(family).new_parser(), cut(text, places))
    assert (said, reasoned) == (content, "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert read(plan(family).new_parser(), list(text)) == (said, reasoned, found)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=bounded(25, 2000))
@given(calls=CALLS.filter(bool), data=st.data(), places=st.lists(st.integers(0, 999), max_size=6))
def test_a_cut_answer_tells_the_same_however_it_comes(family, calls, data, places):
    calls = [(name, given) for name, given in calls if is_writable(family, given)]
    text = written(family, calls)
    text = text[: data.draw(st.integers(0, len(text)))]
    whole = read(plan(family).new_parser(), [text])
    assert read(plan(family).new_parser(), cut(text, places)) == whole
    assert read(plan(family).new_parser(), list(text)) == whole
    found = [(name, json.loads(arguments)) for name, arguments in whole[2][:-1]]
    assert found == calls[: len(found)]


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("lfm2", "[f(text='it's, so')]", "", [("f", '{"text": "it\'s, so"}')]),
        ("lfm2", '[{"name": "f", "arguments": {"text": "a"}}]', "", [("f", '{"text": "a"}')]),
        ("lfm2", "[f('a', count=1)]", "", [("f", '{"text": "a", "count": 1}')]),
        ("lfm2", "[f(text='\\x41\\u00e9\\q')]", "", [("f", '{"text": "A\\u00e9\\\\q"}')]),
        ("lfm2", "[f(text=Rome)]", "", [("f", '{"text": "Rome"}')]),
        ("lfm2", "[f(text='a'", None, [("f", '{"text": "a"')]),
        ("lfm2", f"[f(data={'[' * 9999}", None, [("f", '{"data": ' + "[" * 48)]),
        ("olmo3", "f(sure=true)\nh()", "", [("f", '{"sure": true}'), ("h", "{}")]),
        ("gemma4", 'call:f{text:<|"|>a<b<|"|>}', "", [("f", '{"text": "a<b"}')]),
        ("gemma4", "call:f", None, []),
        (
            "qwen3-coder",
            (
                "<function=f>\n<parameter=text>1</parameter>\n<parameter=count>\n1\n</parameter>\n"
                "<parameter=sure>True</parameter>\n<parameter=data>{'a': None}</parameter>\n"
                "<parameter=other>x</parameter>\n<parameter=maybe>5</parameter>\n</function>"
            ),
            "",
            [("f", XML_READ)],
        ),
        ("qwen3-coder", '{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ("qwen3-coder", "<function=f>\n<parameter=text>\nab", None, [("f", '{"text": "ab')]),
        ("qwen3-coder", "<parameter=a>", None, []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_answers_that_are_no_model_of_form(family, text, content, calls):
    """A content of None is what stands in the answer, which has no closing marker then."""
    form = chat_format(family)._tools
    text = f"{form.opening}{text}" + (form.closing if content is not None else "")
    for pieces in ([text], list(text)):
        said, _, found = read(plan(family).new_parser(), pieces)
        assert found == calls
        if content is not None:
            assert said == content
        elif not calls:
            assert said == text


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=bounded(25, 2000))
@given(calls=CALLS.filter(bool))
def test_calls_as_text_are_read_back(family, calls):
    """As they stand in a prompt whose template shows none."""
    calls = [(name, given) for name, given in calls if is_writable(family, given)]
    listed = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    text = chat_format(family)._tools.text(listed) if calls else ""
    _, _, found = read(plan(family).new_parser(), [text])
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=bounded(15, 500), deadline=None)
@given(calls=CALLS.filter(bool))
def test_grammars_hold_what_schemas_allow(family, calls):
    calls = [(name, _in_order(family, given)) for name, given in calls]
    calls = [(name, given) for name, given in calls if _is_kept(given)]
    output = plan(family, "required").structured_output
    if calls:
        assert holds(family, output, written(family, calls))
    wrong = [("f", {"text": "a", "count": True}), ("f", {"count": 1}), ("h", {})]
    for one in wrong:
        assert not holds(family, output, written(family, [one]))
    if len(calls) > 1:
        single = plan(family, "required", parallel=False).structured_output
        assert not holds(family, single, written(family, calls))


def _in_order(family: str, given: dict) -> dict:
    order = sorted(PROPERTIES) if family == "gemma4" else [*PROPERTIES]
    return {key: given[key] for key in order if key in given}


def _is_kept(given: dict) -> bool:
    """What Python writes with single quotes within lists, or with an escape of its own."""
    text = json.dumps(given, ensure_ascii=False)
    return not any(one in text for one in ("é", "\U0001f999", "\\")) and not (
        given.keys() & {"many", "data", "share"} or "'" in text
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_grammar_leaves_room_for_what_was_not_asked_for(family):
    output = plan(family, "auto").structured_output
    assert holds(family, output, "No calls: f(1) < 2 {}")
    assert holds(family, output, "Well." + written(family, [("g", {})]))
    assert not holds(family, output, "Well." + written(family, [("h", {})]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "pattern": "a+"}, {"not": {"type": "string"}}, {"allOf": [{}]}],
    ids=["pattern", "not", "all"],
)
def test_a_strict_tool_is_refused_where_its_schema_cannot_be_kept(family, schema):
    parameters = {"type": "object", "properties": {"a": schema}}
    for strict in (False, True):
        function = {"name": "s", "parameters": parameters, "strict": strict}
        tools = [PLAIN, {"type": "function", "function": function}]
        if not strict:
            assert plan(family, "required", tools).structured_output is not None
            continue
        with pytest.raises(InvalidRequestError) as caught:
            plan(family, "required", tools)
        assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("family", FAMILIES)
def test_further_arguments_are_allowed_where_the_schema_says_so(family):
    for more in (False, True):
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
        parameters["additionalProperties"] = more
        tool = {"type": "function", "function": {"name": "m", "parameters": parameters}}
        output = plan(family, "required", [tool]).structured_output
        assert holds(family, output, written(family, [("m", {"a": 1})]))
        for other in ({"b": "x"}, {"a": 1, "b": "x", "c": 2}):
            assert holds(family, output, written(family, [("m", other)])) == more


@pytest.mark.parametrize("family", FAMILIES)
def test_a_type_that_nobody_knows_is_named(family):
    parameters = {"type": "object", "properties": {"a": {"type": "strin"}}}
    tool = {"type": "function", "function": {"name": "b", "parameters": parameters}}
    with pytest.raises(InvalidRequestError, match="strin") as caught:
        plan(family, "auto", [PLAIN, tool])
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schema_of_any_size_makes_a_grammar_of_bounded_size(family):
    wide = {f"p{number}": {"anyOf": [{"$ref": "#/$defs/A"}] * 9} for number in range(9)}
    nested = {"type": "object", "properties": wide}
    parameters = {"type": "object", "properties": wide, "$defs": {"A": nested}}
    tool = {"type": "function", "function": {"name": "w", "parameters": parameters}}
    output = plan(family, "required", [tool]).structured_output
    assert len(output.text) < 2**24


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("items", [True, [{"type": "string"}], "text"])
def test_items_that_are_no_schema_may_be_anything(family: str, items: object) -> None:
    parameters = {"type": "object", "properties": {"many": {"type": "array", "items": items}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    use = read_tool_use([tool], "required")
    output = chat_format(family).plan(QUESTION, tool_use=use).structured_output
    assert output is not None
    assert items is not True or holds(family, output, written(family, [("f", {"many": [1, 2]})]))
