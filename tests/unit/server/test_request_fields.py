"""What a body's fields cost where they are wrong: no more than a little, however many entries."""

from __future__ import annotations

import itertools
import sys
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError

from prefixcache.exceptions import InvalidRequestError
from prefixcache.server.app import create_app  # noqa: F401 - it imports all models
from prefixcache.server.http import body
from prefixcache.server.http.body import RequestFields, parse_fields, parse_object
from prefixcache.server.jobs.structured_fields import StructuredOutputsFields
from prefixcache.server.options.limits import MAX_GRAMMAR_CHARACTERS


def models_below(model: type[RequestFields]) -> set[type[RequestFields]]:
    return {kind for below in model.__subclasses__() for kind in (below, *models_below(below))}


# Those that are made with an application are of administrators alone.
WRITTEN = (
    kind
    for kind in models_below(RequestFields)
    if hasattr(sys.modules[kind.__module__], kind.__name__)
)
MODELS = sorted(WRITTEN, key=lambda model: model.__name__)
WRONG = [object()] * 5000
NESTED: dict[str, Any] = {
    "structured_outputs": {"choice": WRONG},
    "prediction": {"type": "content", "content": WRONG},
    "messages": [{"role": "user", "content": WRONG}],
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_list_of_wrong_entries_is_a_few_errors(model, monkeypatch):
    counts: list[int] = []

    def counted(error: ValidationError) -> InvalidRequestError:
        counts.append(error.error_count())
        return InvalidRequestError("wrong")

    monkeypatch.setattr(body, "invalid_field", counted)
    for name in model.model_fields:
        for value in (WRONG, *([NESTED[name]] if name in NESTED else [])):
            with suppress(InvalidRequestError):
                parse_fields({name: value}, model)
    assert max(counts, default=0) < 10


class Endless(dict[str, int]):
    """An object of JSON that never ends."""

    def __bool__(self) -> bool:
        return True

    def items(self) -> Any:
        """Its members, one after the other."""
        return itertools.repeat(("a" * 1000, 1))


def test_a_schema_is_written_no_further_than_its_limit() -> None:
    fields = StructuredOutputsFields.model_construct(schema_=Endless())
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_GRAMMAR_CHARACTERS}") as refused:
        fields.found()
    assert (refused.value.param, refused.value.code) == ("structured_outputs.json", "too_long")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "[1, -1e999]", '{"x": 1e400}'])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_number_out_of_range_is_refused_by_its_field(model, number):
    for name in model.model_fields:
        with pytest.raises(InvalidRequestError, match="out of range") as caught:
            parse_fields(parse_object(f'{{"{name}": {number}}}'.encode()), model)
        assert caught.value.param == name
