"""Chat templates: messages rendered to text, as transformers renders them.

The templates come with the model and are code of others, so they run in jinja2's sandbox and see
plain data alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefixcache.config.checked import shown
from prefixcache.config.model_config import read_json_object
from prefixcache.exceptions import FieldError, InvalidRequestError, ModelLoadError, wrong

# Ends in a space: a template that trims the content loses it, and so tells.
_CUT = "<<the final message ends here>> "
# What a part of a message has its text in.
_TEXTS = {"text": "text", "input_text": "text", "refusal": "refusal"}
_FLAG = "chat_template"


class ChatTemplate:
    """A compiled chat template. `special_tokens` are variables that it may name.

    Chats with tools are rendered by `tool_source` where it is given. `for_tools` is the source for
    those, `shows_tools` says whether it reads them.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.for_tools = tool_source or source
        self._special_tokens = dict(special_tokens or {})
        try:
            environment = _environment()
            parsed = environment.parse(self.for_tools)
            read = meta.find_undeclared_variables(parsed)
            self._tool_template = self._template = environment.from_string(parsed)
            if tool_source is not None:
                self._template = environment.from_string(source)
        except Exception as error:  # jinja2 passes on what Python's compiler raises
            raise ModelLoadError(f"The model's chat template is broken: {error}") from error
        # SmolLM3 reads functions under another name.
        self._reads_xml_tools = "xml_tools" in read and "tools" not in read
        self.shows_tools = "tools" in read or self._reads_xml_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` reach the template and win over the special tokens.

        `tools` have the form of OpenAI's API, or of functions that a template was written for.
        A message's content is text, or a list of parts that are text, joined by line breaks.
        With `continue_final_message` the text stops where the last message's content does, so
        that the model continues it. Raises `InvalidRequestError` for parts of other types, when
        the template refuses the messages, or when it does not show the final message as it is.
        """
        plain = [plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        variables = {"tools": tools or None, **(variables or {})}
        if tools and self._reads_xml_tools:
            variables["xml_tools"] = [tool.get("function", tool) for tool in tools]
        if not continue_final_message:
            return self._render(plain, add_generation_prompt, variables)
        if add_generation_prompt:
            raise wrong("continue_final_message", "and add_generation_prompt exclude each other")
        return self._render_open_end(plain, variables)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        values = {"documents": None, **self._special_tokens, **variables}
        values.update(messages=messages, add_generation_prompt=add_generation_prompt)
        try:
            template = self._tool_template if values["tools"] else self._template
            return template.render(values)
        except TemplateError as error:
            raise InvalidRequestError(
                f"The chat template refuses the messages: {error}", param="messages"
            ) from error
        except Exception as error:
            problem = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"The chat template fails on the messages: {problem}", param="messages"
            ) from error

    def _render_open_end(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise wrong("continue_final_message", "needs a final message with text")
        marked = [*messages[:-1], {**messages[-1], "content": content + _CUT}]
        head, cut, tail = self._render(marked, False, variables).rpartition(_CUT.rstrip())
        if not cut or content.strip() not in head:
            raise InvalidRequestError(
                "The chat template does not show the final message as it is.",
                param="continue_final_message",
            )
        trims = not tail.startswith(" ")
        return head.rstrip() if trims else head


def plain_message(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A message without its empty fields, its content one text; `field` names it in errors."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        parts = enumerate(cast("list[object]", content))
        plain["content"] = "\n".join([_text_of(part, f"{field}.content[{i}]") for i, part in parts])
    return plain


def _text_of(part: object, field: str) -> str:
    """Templates turn parts of other types into tokens, and the parts are not read."""
    if not isinstance(part, Mapping):
        raise wrong(field, f"must be an object, got {shown(part)}")
    part = cast("Mapping[str, Any]", part)
    kind = part.get("type")
    name = _TEXTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise wrong(
            f"{field}.type",
            f"must be 'text' or 'refusal', the kinds that are read, got {shown(kind)}",
        )
    text = part.get(name)
    if not isinstance(text, str):
        raise wrong(f"{field}.{name}", "must be a string")
    return text


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    # jinja2's own would escape HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def read_template(given: str | None) -> str | None:
    """The source of a template that is given as a file or, as in vLLM, as its text.

    A text has braces or line breaks; its backslashes are escapes. Raises `FieldError` for a file
    that cannot be read, and for what is no template.
    """
    if given is None:
        return None
    try:
        source = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if not any(sign in given for sign in "{}\n"):
            reason = getattr(error, "strerror", None) or error
            raise FieldError(_FLAG, f"cannot read {shown(given)}: {reason}.") from None
        source = _unescaped(given)
    try:
        ChatTemplate(source)
    except ModelLoadError as error:
        raise FieldError(_FLAG, f"is no Jinja template: {error.__cause__}.") from None
    return source


def _unescaped(text: str) -> str:
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except ValueError as error:
        raise FieldError(_FLAG, f"has a wrong escape: {error}.") from None


def load_chat_template(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The folder's templates: a file of its own wins over `tokenizer_config.json`."""
    given = _template_file(folder) or config.get("chat_template")
    source = _template_of(given, "default")
    if source is None:
        return None
    return ChatTemplate(source, special_tokens, _template_of(given, "tool_use"))


def _template_file(folder: Path) -> object:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    older = folder / "chat_template.json"
    return read_json_object(older).get("chat_template") if older.is_file() else None


def _template_of(value: object, name: str) -> str | None:
    """The only template, or the one of that name."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        named = cast("dict[str, object]", value).get(name)
        return named if isinstance(named, str) else None
    if isinstance(value, list):
        entries = cast("list[dict[str, str]]", value)
        return next((e["template"] for e in entries if e.get("name") == name), None)
    return None
