"""From what a client states to a grammar that answers can follow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from prefixcache.exceptions import GrammarError
from prefixcache.text.grammar.json_schema import known_schema
from prefixcache.text.grammar.vocabulary import Vocabulary, Words
from prefixcache.types.structured_output import StructuredOutput

# At most a line break with its indentation, so that no answer ends in blanks without end.
_WHITESPACE = r"[ \t]{1,2}|\n[ \t]{0,40}"
# With them compiling takes less than a second, except for what `sandbox.py` finds out, a mask
# usually less than a millisecond and at most some tens, a matcher's automaton some megabytes.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=60_000,
    step_max_items=30_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
_MOST_PLACES = 512
"""Parts of a schema that are looked at to tell which of them is wrong."""


class Matcher:
    """A place in a grammar. Not thread safe; copies are independent and cheap."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def copy(self) -> Matcher:
        """Another one at the same place."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary)

    def follow(self, token_id: int) -> None:
        """Follows one more token. Raises `GrammarError` unless the grammar allows it."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(_reason(self._matcher))

    def write(self, words: Words) -> None:
        """Writes which tokens may follow; those that end the answer only where it may end.

        Raises `GrammarError` where there are none, and where a limit is reached.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher))


def compile_grammar(output: StructuredOutput, vocabulary: Vocabulary) -> tuple[Matcher, Words]:
    """The beginning of a grammar, and which tokens an answer may begin with.

    Raises `GrammarError`, which says what is wrong and, in a JSON schema, where.
    """
    source = _source(output)
    matcher = LLMatcher(vocabulary.backend, source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(_explained(output, matcher.get_error()))
    started = Matcher(matcher, vocabulary)
    words = np.zeros(vocabulary.num_words, dtype=np.int32)
    try:
        started.write(words)
    except GrammarError as error:
        raise GrammarError(f"no answer can follow it, or it is too complex: {error}") from None
    words.flags.writeable = False
    return started, words


def _source(output: StructuredOutput) -> str:
    """The grammar in llguidance's own form."""
    text = output.text
    if output.kind == "json_object":
        return _schema_source({"type": "object"})
    if output.kind == "json":
        return _schema_source(_schema(text))
    if output.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if output.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, _choices(text))))
    return LLMatcher.grammar_from_lark(_lark(text))


def _schema(text: str) -> dict[str, Any]:
    schema = _json(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object, and not false")
    return cast("dict[str, Any]", schema)


def _schema_source(schema: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(known_schema(schema)),
            defaults={"whitespace_pattern": _WHITESPACE, "coerce_one_of": True},
        )
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def _choices(text: str) -> list[str]:
    choices = _json(text)
    if not isinstance(choices, list) or not choices:
        raise GrammarError("choices must be a list of strings, and not empty")
    if not all(isinstance(choice, str) for choice in cast("list[object]", choices)):
        raise GrammarError("choices must be strings")
    return cast("list[str]", choices)


def _lark(text: str) -> str:
    """Lark's notation, which GGML's form (GBNF) is turned into."""
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - whatever it meets, the text is at fault
        raise GrammarError(f"the grammar cannot be read: {error}") from None


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {error}") from None


def _explained(output: StructuredOutput, error: str) -> str:
    """Llguidance's error, and for a schema the innermost part of it that gets the same one."""
    if output.kind != "json":
        return error.strip()
    schema = _schema(output.text)
    place = _innermost(schema, error)
    return f"at {place}: {_first_line(error)}" if place else _first_line(error)


def _innermost(schema: dict[str, Any], error: str) -> str:
    """The JSON pointer of that part; empty where it is the whole schema."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    place, part = "", schema
    left = _MOST_PLACES
    while True:
        for name, inner in _parts(part):
            left -= 1
            if left < 0:
                return place
            if _error_of({**shared, **inner}) == error:
                place, part = f"{place}/{name}", inner
                break
        else:
            return place


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that stand right in a schema, with their places."""
    for key, value in schema.items():
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", value)
            if key in ("properties", "patternProperties", "$defs", "definitions"):
                yield from _objects(key, inner.items())
            else:
                yield key, inner
        elif isinstance(value, list):
            yield from _objects(key, enumerate(cast("list[object]", value)))


def _objects(key: str, items: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in items:
        if isinstance(value, dict):
            yield f"{key}/{name}", cast("dict[str, Any]", value)


def _error_of(schema: dict[str, Any]) -> str:
    try:
        source = _schema_source(schema)
    except GrammarError as error:
        return str(error)
    return LLMatcher.validate_grammar(source, limits=_LIMITS)


def _reason(matcher: LLMatcher) -> str:
    """Why it stopped. Of llguidance's own names one is met where no limit is reached."""
    error = _first_line(matcher.get_error())
    return "none of the model's tokens may come next" if error == "NoExtensionBias" else error


def _first_line(error: str) -> str:
    return error.strip().partition("\n<")[0]
