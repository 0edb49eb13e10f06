"""No number makes the server fail: every numeric field of every endpoint, at its extremes."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from prefixcache.engine.control import Control
from prefixcache.server.admin import admin, weights_push
from prefixcache.server.openai import protocol
from support.serving import client_of

_PROMPT = {"prompt": "hello", "max_tokens": 2}
_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
# Path, the model of its body, a body that is served.
_ENDPOINTS: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/completions", protocol.CompletionRequest, _PROMPT),
    ("/v1/chat/completions", protocol.ChatRequest, _CHAT),
    ("/prefix_cache/probe", protocol.CompletionRequest, _PROMPT),
    ("/prefix_cache/probe", protocol.ChatRequest, _CHAT),
    ("/tokenize", protocol.TokenizeRequest, {"prompt": "hello"}),
    ("/tokenize", protocol.TokenizeChatRequest, {"messages": _CHAT["messages"]}),
    ("/detokenize", protocol.DetokenizeRequest, {"tokens": [5]}),
    *((path, admin.options_of(command), {}) for path, command in Control.endpoints()),
    ("/update_weights_from_disk", admin.UpdateWeightsRequest, {"model_path": "/nowhere"}),
    ("/weights/begin", weights_push.BeginWeightsRequest, {}),
]
_EDGES = [0, 1, 2**31, 2**32, 2**53, 2**63, 2**64, 2**127, 10**308, 10**309, 10**310, 10**4299]
_SMALL = [5e-324, 1e-320, 1e-310, 1e-45, 1e-38, 1e-10, 0.5, 1e10, 3.5e38, 1.7e308]
_numbers = st.one_of(
    st.sampled_from([edge + by for edge in _EDGES for by in (-1, 0, 1)]),
    st.sampled_from(_SMALL),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
).flatmap(lambda number: st.sampled_from([number, -number]))


def _numeric_fields(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if _numeric(field.annotation)]


def _numeric(annotation: Any) -> bool:
    return annotation in (int, float, Any) or any(map(_numeric, get_args(annotation)))


def _shapes(number: float) -> list[Any]:
    """The places for a number in a field."""
    return [number, [number], [[number]], {"5": number}, {str(number): 1.0}]


_cases = [(path, good, name) for path, model, good in _ENDPOINTS for name in _numeric_fields(model)]


def test_the_fields_are_found():
    assert {"temperature", "seed", "logit_bias", "stop_token_ids", "prompt", "tokens"} <= {
        name for _, _, name in _cases
    }
    assert ("/sleep", {}, "level") in _cases


@given(case=st.sampled_from(_cases), number=_numbers, shape=st.integers(0, 4), stream=st.booleans())
@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_no_number_makes_the_server_fail(app, case, number, shape, stream):
    path, good, name = case
    body = {**good, **({"stream": True} if stream else {}), name: _shapes(number)[shape]}
    async with client_of(app) as client:
        await _assert_served(client, path, body)


@pytest.mark.parametrize("turn", range(5))
async def test_every_field_is_answered_with_each_extreme_number(app, turn):
    """In the five turns it meets each number and each shape."""
    async with client_of(app) as client:
        for at, (path, good, name) in enumerate(_cases):
            number = [10**310, -(10**310), 1e-320, 1.7e308, 2**63][(at + turn) % 5]
            await _assert_served(client, path, {**good, name: _shapes(number)[turn]})


@pytest.mark.parametrize("level", [10**310, -(10**310), 2**64, "1e400", "9" * 4300])
async def test_an_extreme_number_of_a_query_is_answered(app, level):
    async with client_of(app) as client:
        response = await client.post("/sleep", params={"level": str(level)})
        assert response.status_code == 400, response.text


async def _assert_served(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await client.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert response.status_code < 500, response.text
    assert '"internal_server_error"' not in response.text, response.text
    for undo in ("/wake_up", "/resume"):
        assert (await client.post(undo)).status_code < 500
