"""The fields that say what an answer must look like: OpenAI's, vLLM's, and vLLM's older ones."""

from __future__ import annotations

from json import JSONEncoder
from typing import Any, Literal

from pydantic import BaseModel, Field

from prefixcache.exceptions import InvalidRequestError, wrong
from prefixcache.server.http.body import Strings
from prefixcache.server.options.limits import MAX_GRAMMAR_CHARACTERS
from prefixcache.types.structured_output import Kind, StructuredOutput

Named = tuple[str, StructuredOutput]
"""A structured output, and the field that asked for it."""


class JsonSchemaFields(BaseModel, strict=True, extra="allow"):
    """`response_format.json_schema`. Every schema is followed as if it were strict."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    content: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel, strict=True, extra="allow"):
    """OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None

    def found(self) -> list[Named]:
        """What it asks for, if anything."""
        if self.type == "text":
            return []
        if self.type == "json_object":
            return [("response_format", StructuredOutput("json_object"))]
        field = "response_format.json_schema"
        if self.json_schema is None:
            raise wrong(field, "is missing")
        if self.json_schema.content is None:
            raise wrong(f"{field}.schema", "is missing")
        return [stated_output(f"{field}.schema", "json", self.json_schema.content)]


class StructuredOutputsFields(BaseModel, strict=True, extra="allow"):
    """vLLM's form: one of these."""

    schema_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def found(self) -> list[Named]:
        """What it asks for, in order."""
        for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace"):
            if (self.model_extra or {}).get(name):
                field = f"structured_outputs.{name}"
                raise wrong(field, "is not supported")
        return _found("structured_outputs.", self.schema_, self)


class GuidedFields(BaseModel):
    """What vLLM called them before."""

    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    def guided(self) -> list[Named]:
        """What they ask for, in order."""
        names = GuidedFields.model_fields
        asked = {name.removeprefix("guided_"): getattr(self, name) for name in names}
        return _found("guided_", self.guided_json, StructuredOutputsFields(**asked))


def _found(prefix: str, schema: object, asked: StructuredOutputsFields) -> list[Named]:
    stated: list[tuple[Kind, object]] = [
        ("json", schema),
        ("regex", asked.regex),
        ("choice", asked.choice),
        ("grammar", asked.grammar),
    ]
    wanted = [
        stated_output(prefix + kind, kind, value) for kind, value in stated if value is not None
    ]
    if asked.json_object:
        wanted.append((f"{prefix}json_object", StructuredOutput("json_object")))
    return wanted


def stated_output(field: str, kind: Kind, value: object) -> Named:
    """What a field states. Raises `InvalidRequestError` for a text that is too long."""
    text = value if isinstance(value, str) else _json(value)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        problem = f"may have at most {MAX_GRAMMAR_CHARACTERS} characters"
        raise wrong(field, problem, code="too_long")
    return field, StructuredOutput(kind, text)


def _json(value: object) -> str:
    """The text, or a beginning that is too long already.

    `json.dumps` would write all of it in one go, which no other thread could interrupt.
    """
    pieces, size = list[str](), 0
    for piece in JSONEncoder(ensure_ascii=False).iterencode(value):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_GRAMMAR_CHARACTERS:
            break
    return "".join(pieces)


def only_one(wanted: list[Named]) -> Named | None:
    """The one that is asked for, if any. Raises `InvalidRequestError` where there are more."""
    if len(wanted) > 1:
        fields = " and ".join(field for field, _ in wanted)
        raise InvalidRequestError(
            f"{fields} cannot be combined: an answer follows one of them.", param=wanted[1][0]
        )
    return wanted[0] if wanted else None
