"""Requests made of the server's own description: nothing fails, and no answer is undocumented."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckContext
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

FIXED = os.environ.get("PREFIXCACHE_FIXED_CASES") == "1"
EXAMPLES = int(os.environ.get("PREFIXCACHE_EXAMPLES", "25"))
# They stop the others, or take the weights away: they are called one by one, and undone.
STOPPING = r"^/(pause|sleep|update_weights_from_disk|prefix_cache/resize|weights/chunk)$"
COMMANDS = [
    ("POST", "/pause", {"mode": 1}, 400),
    ("POST", "/pause", {}, 200),
    ("POST", "/resume", {}, 200),
    ("POST", "/sleep", {"level": 7}, 400),
    ("POST", "/sleep", {}, 200),
    ("POST", "/wake_up", {}, 200),
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}, 400),
    ("POST", "/weights/chunk", {"update_id": "x", "shm_name": "prefixcache-x"}, 400),
    ("POST", "/prefix_cache/resize", {}, 400),
    ("POST", "/prefix_cache/resize", {"memory": "256MiB"}, 200),
    ("GET", "/prefix_cache/resize", None, 200),
]


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


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/completions", {"prompt": "One"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "One"}]}),
        ("/v1/responses", {"input": "One"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "One"}]}),
    ],
)
def test_streams_are_as_they_are_described(
    address: str, path: str, question: dict[str, Any]
) -> None:
    described = schemathesis.openapi.from_url(f"{address}/openapi.json")
    body = {**question, "max_tokens": 2, "max_output_tokens": 2, "stream": True}
    case = described[path]["POST"].Case(body=body, media_type="application/json")
    response = case.call(timeout=240)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response, checks=CHECKS)


def test_commands_answer_as_they_are_described(address: str) -> None:
    described = schemathesis.openapi.from_url(f"{address}/openapi.json")
    for method, path, body, status in COMMANDS:
        given = {} if body is None else {"body": body, "media_type": "application/json"}
        case = described[path][method].Case(**given)
        response = case.call(timeout=240)
        assert response.status_code == status, (path, response.text)
        case.validate_response(response, checks=CHECKS)


def _try_many(operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        derandomize=FIXED,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    def one(case: Any) -> None:
        _bound(case.body)
        response = case.call(timeout=240)
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
