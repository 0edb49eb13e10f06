"""Chat templates against transformers' own rendering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from prefixcache.exceptions import FieldError, InvalidRequestError, ModelLoadError
from prefixcache.text.tokenization.chat_template import ChatTemplate, read_template
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.tiny_models import CHAT_TEMPLATE, save_tokenizer

_MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Zwölf 🦙 ?  "},
    {"role": "assistant", "content": "  Yes, "},
]
_TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"
_RICH = """{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- set ns = namespace(count=0) -%}
{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- bos_token + m['role'] | title }}: {% generation %}{{ m.content }}{% endgeneration %}
    {{- eos_token }}
{% endfor %}
{{ ns.count }}{% if thinking is defined and thinking %} <think>{% endif %}
{{ {'ü': '<&>'} | tojson }}{{ pad_token }}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    return tmp_path


def _render_both(folder: Path, template: str, **options: object) -> tuple[str, str]:
    (folder / "chat_template.jinja").write_text(template)
    variables = options.pop("variables", {})
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        _MESSAGES, tokenize=False, **options, **variables
    )
    ours = Tokenizer.from_folder(folder).chat_template
    return ours.render(_MESSAGES, variables=variables, **options), theirs


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, _TRIMMING, _RICH])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"thinking": True, "eos_token": "!"}])
def test_text_equals_that_of_transformers(folder, template, prompt, variables):
    ours, theirs = _render_both(folder, template, add_generation_prompt=prompt, variables=variables)
    assert ours == theirs


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, _TRIMMING, _RICH])
def test_the_final_message_stays_open_as_in_transformers(folder, template):
    ours, theirs = _render_both(
        folder, template, add_generation_prompt=False, continue_final_message=True
    )
    assert ours == theirs
    assert ours.rstrip().endswith("Yes,")


def test_none_valued_keys_are_dropped():
    template = ChatTemplate("{% for m in messages %}{{ m.content is defined }}{% endfor %}")
    assert template.render([{"role": "user", "content": None}]) == "False"


@pytest.mark.parametrize(
    ("source", "messages", "options"),
    [
        ("{{ raise_exception('roles must alternate') }}", _MESSAGES, {}),
        ("{{ messages[0].content + 1 }}", _MESSAGES, {}),
        ("{{ 1 // 0 }}", _MESSAGES, {}),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", _MESSAGES, {}),
        ("{{ messages.append(1) }}", _MESSAGES, {}),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", _MESSAGES, {}),
        ("{{ 'a' * (1024 ** 5) }}", _MESSAGES, {}),
        ("{{ '{}'.format() }}", _MESSAGES, {}),
        ("{{ cycler() }}", _MESSAGES, {}),
        ("nothing of them", _MESSAGES, {"continue_final_message": True}),
        (CHAT_TEMPLATE, [], {"continue_final_message": True}),
        (CHAT_TEMPLATE, _MESSAGES, {"continue_final_message": True, "add_generation_prompt": True}),
    ],
)
def test_what_cannot_be_rendered_is_the_callers_error(source, messages, options):
    options = {"add_generation_prompt": False} | options
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source).render(messages, **options)
    assert caught.value.param in ("messages", "continue_final_message")
    assert not str(caught.value).endswith(": ")


_SEES_IMAGES = (
    "{% for m in messages %}{{ m.content if m.content is string else '<image>' }}{% endfor %}"
)


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    parts.append({"type": "refusal", "refusal": "c"})
    assert ChatTemplate(_SEES_IMAGES).render([{"role": "user", "content": parts}]) == "a\nb\nc"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "messages[1].content[1].type"),
        ({"type": "image"}, "messages[1].content[1].type"),
        ({"type": []}, "messages[1].content[1].type"),
        ({"type": "text"}, "messages[1].content[1].text"),
        ({"type": "refusal"}, "messages[1].content[1].refusal"),
        ("x", "messages[1].content[1]"),
    ],
)
def test_parts_that_the_model_cannot_read_never_reach_the_template(part, param):
    content = [{"type": "text", "text": "What is this?"}, part]
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": content}]
    with pytest.raises(InvalidRequestError) as raised:
        ChatTemplate(_SEES_IMAGES).render(messages)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ " + "-" * 5000 + "1 }}", "{% break %}", "{{ " + "9" * 10**4 + " }}"],
    ids=["syntax", "depth", "no loop", "digits"],
)
def test_a_broken_template_is_a_load_error(source):
    with pytest.raises(ModelLoadError, match="template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "value",
    [
        "the one",
        {"tool_use": "no", "default": "the one"},
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "the one"}],
    ],
)
def test_the_default_template_of_the_config_is_found(folder, value):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": value}))
    template = Tokenizer.from_folder(folder).chat_template
    assert template.source == template.render([]) == "the one"
    with_tools = template.render([], tools=[{"name": "f"}])
    assert with_tools == ("the one" if isinstance(value, str) else "no")


def test_a_folder_without_a_template_has_none(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).chat_template is None


def test_a_template_is_given_as_a_file_or_as_its_text(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}\\n")
    assert read_template(str(file)) == "{{ messages[0].content }}\\n"
    assert read_template("{{ 'Zwölf 天 \\n' }}\\u00e4") == "{{ 'Zwölf 天 \n' }}ä"
    assert read_template(None) is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("none.jinja", "cannot read 'none.jinja': No such file"),
        ("chatml", "cannot read 'chatml': No such file"),
        (".", "cannot read '.': Is a directory"),
        ("{% for %}", "is no Jinja template: "),
        ("{{ '\\x' }}", "has a wrong escape: "),
        ("\0", "cannot read"),
    ],
)
def test_what_is_no_template_is_named(given, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FieldError) as raised:
        read_template(given)
    assert str(raised.value).startswith(f"chat_template {problem}")


def test_a_template_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(FieldError, match="chat_template cannot read"):
        read_template(str(file))
