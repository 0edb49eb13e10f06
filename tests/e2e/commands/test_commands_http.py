"""A command of the engine's control is one method: its endpoint, options and protection follow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal
from unittest import mock

import httpx
import pytest

from prefixcache.engine.commands import between_steps, endpoint
from prefixcache.engine.control import Control, at_once
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.serving import FakeEngine, client_of, fake_app, says


class Extended(Control):
    """A control with one command more."""

    @endpoint("/prefix_cache/count")
    @between_steps
    def count(
        self, start: int, step: int = 1, kinds: Sequence[Literal["free", "held"]] | None = None
    ) -> dict[str, Any]:
        """Counts."""
        return {"start": start, "step": step, "kinds": kinds}


@pytest.fixture
def steps() -> mock.Mock:
    """In the place of the loop: it is called with what runs between two steps."""
    return mock.Mock(side_effect=at_once)


@pytest.fixture
def engine(steps: mock.Mock) -> FakeEngine:
    engine = FakeEngine(lambda request: says(request, "x"))
    engine.control = Extended(*[mock.Mock() for _ in range(5)], run_between_steps=steps)
    return engine


@pytest.fixture
async def client(engine: FakeEngine, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(fake_app(engine, tokenizer)) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/reset_prefix_cache", "/pause?mode=keep", "/prefix_cache/count?start=1"]
)
async def test_a_query_that_nobody_reads_is_an_error(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, params={"tag": "weights", **dict(httpx.URL(path).params)})
    assert answer.headers.get("X-Prefixcache-Warning") == "unknown fields: tag", answer.text


@pytest.mark.parametrize("given", [{"params": {"tags": "weights"}}, {"json": {"tag": "kv_cache"}}])
async def test_a_sleep_of_one_part_is_refused(client, given):
    answer = await client.post("/sleep", **given)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] in ("tag", "tags")


@pytest.mark.parametrize(
    "options",
    [
        {"params": {"start": 3, "kinds": ["free", "held"]}},
        {"json": {"start": 3, "kinds": ["free", "held"], "step": None}},
        {"params": {"start": 9, "kinds": "free"}, "json": {"start": 3, "kinds": ["free", "held"]}},
    ],
)
async def test_options_are_arguments_and_the_result_is_the_answer(client, steps, options):
    response = await client.post("/prefix_cache/count", **options)
    assert response.json() == {"start": 3, "step": 1, "kinds": ["free", "held"]}
    assert steps.call_count == 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "start"),
        ({"json": {"start": None}}, "start"),
        ({"json": {"start": "3"}}, "start"),
        ({"params": {"start": "three"}}, "start"),
        ({"json": {"start": 3, "step": True}}, "step"),
        ({"json": {"start": 3, "kinds": ["free", "lost"]}}, "kinds[1]"),
        ({"params": {"start": 3, "kinds": "lost"}}, "kinds[0]"),
    ],
)
async def test_wrong_options_are_named(client, steps, options, param):
    response = await client.post("/prefix_cache/count", **options)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert steps.call_count == 0


async def test_only_administrators_may_call_it(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async with client_of(fake_app(engine, tokenizer), address="192.0.2.7") as client:
        response = await client.post("/prefix_cache/count", json={"start": 3})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "admin_only"


async def test_it_is_described(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()["paths"]["/prefix_cache/count"]["post"]
    assert (described["summary"], described["description"]) == ("Counts.", "Counts.")
