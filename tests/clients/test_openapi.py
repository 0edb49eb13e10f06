"""Requests made of the server's own description: nothing fails, and no answer is undocumented."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckContext
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 25
# They stop the others, or take the weights away: that they are described is checked by hand.
STOPPING = r"^/(pause|sleep|update_weights_from_disk|prefix_cache/resize)$"


def only_503(_ctx: CheckContext, response: Any, _case: Any) -> bool | None:
    """No 5xx but 503, which says that the server is busy, asleep or ending."""
    assert response.status_code < 500 or response.status_code == 503, response.text
    return None


CHECKS = [
    only_503,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def test_nothing_is_undocumented(address: str) -> None:
    described = schemathesis.openapi.from_url(f"{address}/openapi.json")
    wrong = {}
    for result in described.exclude(path_regex=STOPPING).get_all_operations():
        operation = result.ok()
        try:
            _try_many(operation)
        except (AssertionError, FailureGroup) as error:  # all operations are tried
            wrong[operation.label] = str(error)[:3000]
    assert not wrong, "\n".join(f"{label}: {error}" for label, error in wrong.items())


def _try_many(operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    def one(case: Any) -> None:
        _bound(case.body)
        response = case.call(timeout=60)
        case.validate_response(response, checks=CHECKS)

    one()


def _bound(body: Any) -> None:
    """Answers as long as the context would take minutes, and tell nothing more."""
    if not isinstance(body, dict) or not {"prompt", "messages", "input"} & body.keys():
        return
    body.pop("model", None)  # any other name is 404 at once
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if not isinstance(body.get(name), int) or body[name] > 4:
            body[name] = 2
    for name in ("n", "best_of"):
        if isinstance(body.get(name), int) and body[name] > 2:
            body[name] = 2
