"""What the text of an answer must look like: plain data, made where a request is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from prefixcache.exceptions import InvalidRequestError

Kind = Literal["json_object", "json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that an answer must follow, as a client states it.

    `text` is, by `kind`: for "json" the schema as JSON text, for "choice" a JSON list of strings,
    for "regex" the expression, which the whole answer matches, for "grammar" Lark's notation as
    llguidance reads it, and for "json_object" (any JSON object) nothing. With `begin_after` the
    grammar holds for what follows that marker, as after the end of reasoning; before it anything
    goes. Whether the text is well formed shows when it is compiled.

    Raises `InvalidRequestError` for another kind, an empty marker, and text that is none or that
    UTF-8 cannot hold.
    """

    kind: Kind
    text: str = ""
    begin_after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise _wrong(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.begin_after == "":
            raise _wrong("begin_after must not be empty")
        for text in (self.text, self.begin_after or ""):
            _check_text(text)


def _check_text(text: object) -> None:
    try:
        if isinstance(text, str):
            text.encode()
            return
    except UnicodeEncodeError:
        pass
    raise _wrong("must be made of text that UTF-8 can hold")


def _wrong(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_output: {problem}.", param="structured_output")
