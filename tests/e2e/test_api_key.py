"""`--api-key`: who gets in, and what strangers may see."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from prefixcache.config import GenerationDefaults
from prefixcache.exceptions import ConfigError
from prefixcache.server.app import create_app
from prefixcache.server.backend import ServedModel
from prefixcache.server.serve import ServeOptions
from prefixcache.tokenization.tokenizer import Tokenizer
from serving import MODEL, FakeEngine, client_of, says
from tiny_models import save_tokenizer


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lambda request: says(request, "hello"))


@pytest.fixture
def app(engine: FakeEngine, tmp_path: Path):
    save_tokenizer(tmp_path)
    served = ServedModel(
        names=(MODEL,),
        generation=GenerationDefaults(),
        tokenizer=Tokenizer.from_folder(tmp_path),
    )
    return create_app(engine, served, api_keys=("first", "zweiter-schlüssel"))


@pytest.mark.parametrize("key", ["first", "zweiter-schlüssel"])
async def test_each_key_gets_in(app, key):
    headers = {"Authorization": f"Bearer {key}".encode()}
    async with client_of(app) as client:
        assert (await client.get("/v1/models", headers=headers)).is_success


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Basic first", "first"]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/sleep"),
        ("POST", "/prefix_cache/probe"),
        ("GET", "/prefix_cache/stats"),
        ("GET", "/no/such/path"),
    ],
)
async def test_strangers_are_refused_everywhere(app, engine, method, path, value):
    headers = {} if value is None else {"Authorization": value}
    async with client_of(app) as client:
        response = await client.request(method, path, headers=headers, content=b"{not json")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert not engine.requests


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="must not be empty"):
        ServeOptions(api_keys=("good", ""))


async def test_what_watches_the_server_needs_no_key(app):
    async with client_of(app) as client:
        for path in ("/health", "/metrics", "/version"):
            assert (await client.get(path)).is_success


async def test_the_official_client_brings_its_key(app):
    async with client_of(app) as http:
        options = {"base_url": "http://server/v1", "http_client": http, "max_retries": 0}
        client = openai.AsyncOpenAI(api_key="first", **options)
        answer = await client.completions.create(model=MODEL, prompt="hi")
        assert answer.choices[0].text == "hello"
        stranger = openai.AsyncOpenAI(api_key="none", **options)
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await stranger.completions.create(model=MODEL, prompt="hi")
