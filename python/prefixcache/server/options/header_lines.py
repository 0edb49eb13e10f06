"""`--strip-header-pattern`: lines that clients put into prompts, and that vary, are left out.

The patterns are of Rust's regex engine, through pydantic: its time grows with the text alone,
whatever the pattern, and it bounds what a pattern may take. It knows no look-around and no
references back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic_core import SchemaError, SchemaValidator, core_schema

from prefixcache.exceptions import FieldError

_ROLES = ("system", "developer")
_FIELD = "strip_header_pattern"


class HeaderLines:
    """Leaves out the lines in which one of `patterns` is found.

    Raises `FieldError` for a pattern that is none, or that is found in an empty line.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._compiled = [_compiled(pattern) for pattern in patterns]

    def stripped(self, text: str) -> str:
        """The text without such lines."""
        lines = text.split("\n")
        kept = [line for line in lines if not self._is_found(line.removesuffix("\r"))]
        return text if len(kept) == len(lines) else "\n".join(kept)

    def stripped_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a chat, without such lines in what the system and developers say."""
        if not self.patterns:
            return messages
        return [
            self._message(message) if message["role"] in _ROLES else message for message in messages
        ]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, list):
            return {**message, "content": [*map(self._part, cast("list[object]", content))]}
        return {**message, "content": self.stripped(content) if content else content}

    def _part(self, part: object) -> object:
        """Parts that are not text are rejected by the endpoint."""
        if not isinstance(part, Mapping):
            return part
        fields = cast("Mapping[str, object]", part)
        text = fields.get("text")
        return {**fields, "text": self.stripped(text)} if isinstance(text, str) else fields

    def _is_found(self, line: str) -> bool:
        return any(pattern.isinstance_python(line) for pattern in self._compiled)


def _compiled(pattern: str) -> SchemaValidator:
    try:
        validator = SchemaValidator(
            core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")
        )
    except SchemaError as error:
        reason = " ".join(str(error).split("SchemaError:", 1)[-1].split())
        raise FieldError(_FIELD, f"is not a pattern: {reason}") from None
    if validator.isinstance_python(""):
        raise FieldError(_FIELD, f"must not match an empty line, as {pattern!r} does.")
    return validator
