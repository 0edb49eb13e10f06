"""Pages of other origins: let in by name alone, and never as this machine's administrator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from starlette.applications import Starlette

from prefixcache.cli.main import app as command
from prefixcache.config.model_config import GenerationDefaults
from prefixcache.server.app import create_app
from prefixcache.server.http.access import AccessRules
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.options.serve_options import CrossOrigin, ServeOptions
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Request, RequestOutput
from support.serving import MODEL, FakeEngine, client_of, says

PAGE = "https://app.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
ALLOW_ORIGIN = "access-control-allow-origin"


@pytest.fixture
def make_app(tokenizer: Tokenizer) -> Callable[..., Starlette]:
    served = ServedModel(names=(MODEL,), generation=GenerationDefaults(), tokenizer=tokenizer)

    def make(*origins: str, script: Any = lambda request: says(request, "hi"), **rules: Any) -> Any:
        cross_origin = CrossOrigin(allowed_origins=origins)
        return create_app(
            FakeEngine(script), served, rules=AccessRules(cross_origin=cross_origin, **rules)
        )

    return make


async def ask(app: Starlette, headers: dict[str, str], method: str = "POST") -> httpx.Response:
    async with client_of(app) as client:
        path, body = "/v1/completions", {"prompt": [5, 6], "max_tokens": 2}
        return await client.request(method, path, json=body, headers=headers)


async def test_a_preflight_needs_no_key_and_the_request_after_it_does(make_app) -> None:
    app = make_app(PAGE, api_keys=("key",))
    preflight = await ask(app, PREFLIGHT, "OPTIONS")
    assert preflight.status_code == 200
    assert preflight.headers[ALLOW_ORIGIN] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = await ask(app, {"Origin": PAGE})
    assert (refused.status_code, refused.headers[ALLOW_ORIGIN]) == (401, PAGE)
    answer = await ask(app, {"Origin": PAGE, "Sec-Fetch-Site": "cross-site", "x-api-key": "key"})
    assert answer.json()["choices"][0]["text"] == "hi"
    assert answer.headers[ALLOW_ORIGIN] == PAGE
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("origins", "origin"),
    [
        ((), PAGE),
        ((PAGE,), "https://evil.example"),
        ((PAGE,), "http://app.example.com"),
        ((PAGE,), f"{PAGE}.evil.example"),
        ((PAGE,), f"{PAGE}:8443"),
        ((PAGE,), "null"),
    ],
)
async def test_other_pages_learn_nothing_and_do_nothing(make_app, origins, origin) -> None:
    app = make_app(*origins)
    for method in ("OPTIONS", "POST"):
        answer = await ask(app, {**PREFLIGHT, "Origin": origin}, method)
        assert answer.status_code in (400, 403)
        assert ALLOW_ORIGIN not in answer.headers


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
async def test_an_allowed_page_on_this_machine_is_a_client_and_no_administrator(
    make_app, origins
) -> None:
    """Its author is not who sits at this machine; a key that it was given is another matter."""
    async with client_of(make_app(*origins)) as client:
        page = {"Origin": PAGE}
        assert (await client.get("/v1/models", headers=page)).is_success
        assert (await client.post("/reset_prefix_cache", headers=page)).status_code == 403
        assert (await client.get("/metrics", headers={})).is_success
        rebound = await client.get("/v1/models", headers={**page, "Host": "evil.example"})
        assert rebound.status_code == 403
    async with client_of(make_app(*origins, admin_api_keys=("root",))) as client:
        with_key = {**page, "Authorization": "Bearer root"}
        assert (await client.get("/metrics", headers=with_key)).is_success


async def test_a_page_may_read_why_its_request_failed(make_app) -> None:
    async def breaks(request: Request) -> AsyncIterator[RequestOutput]:
        raise ZeroDivisionError
        yield

    failed = await ask(make_app(PAGE, script=breaks), {"Origin": PAGE})
    assert (failed.status_code, failed.headers[ALLOW_ORIGIN]) == (500, PAGE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--allowed-origins", "app.example.com"], "--allowed-origins must be * or an origin"),
        (["--allowed-origins", f"{PAGE}/"], "--allowed-origins must be"),
        (["--allowed-origins", f"{PAGE}/path"], "--allowed-origins must be"),
        (["--allowed-origins", f"{PAGE}:443"], "--allowed-origins must be"),
        (["--allowed-origins", f"{PAGE}:99999"], "--allowed-origins must be"),
        (["--allowed-origins", "https://*.example.com"], "--allowed-origins must be"),
        (["--allowed-origins", "https://user@example.com"], "--allowed-origins must be"),
        (["--allowed-origins", "https://App.example.com"], "--allowed-origins must be"),
        (["--allowed-origins", "null"], "--allowed-origins must be"),
        (["--allowed-origins", ""], "--allowed-origins must be"),
        (["--allowed-origins", f'["{PAGE}"'], "--allowed-origins is not a JSON list"),
        (["--allowed-origins", "[5]"], "--allowed-origins must be a valid string"),
        (["--allowed-origins", PAGE, "--allowed-methods", "GET;POST"], "--allowed-methods must"),
        (["--allowed-origins", PAGE, "--allowed-headers", "a b:"], "--allowed-headers must"),
        (["--allowed-origins", "*", "--allow-credentials"], "--allow-credentials needs"),
        (["--allow-credentials"], "--allow-credentials needs --allowed-origins"),
    ],
)
def test_what_no_browser_could_match_is_refused(flags, message) -> None:
    result = CliRunner().invoke(command, ["serve", "/no/such/model", *flags])
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_origins_come_as_vllm_spells_them_and_otherwise(monkeypatch, tmp_path) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr("prefixcache.server.serve.serve", lambda _, options: seen.append(options))
    file = tmp_path / "server.yaml"
    file.write_text(f"allowed_origins: ['{PAGE}', 'http://[::1]:3000']\n")
    both = f'["{PAGE}", "http://[::1]:3000"]'
    for arguments in (
        ["--allowed-origins", both],
        ["--allowed-origins", PAGE, "--allowed-origins", "http://[::1]:3000"],
        ["--allowed-origins", f"{PAGE},http://[::1]:3000"],
        ["--config", str(file)],
    ):
        assert CliRunner().invoke(command, ["serve", *arguments]).exit_code == 0
    variable = {"PREFIXCACHE_ALLOWED_ORIGINS": both}
    assert CliRunner(env=variable).invoke(command, ["serve"]).exit_code == 0
    origins = {options.cross_origin.allowed_origins for options in seen}
    assert (len(seen), origins) == (5, {(PAGE, "http://[::1]:3000")})
