"""Who may use the server, who may control it, and that web pages may do neither."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import Response

from prefixcache.config.model_config import GenerationDefaults
from prefixcache.exceptions import ConfigError
from prefixcache.server import dashboard
from prefixcache.server.admin.model_dirs import ModelDirs
from prefixcache.server.app import create_app
from prefixcache.server.http.access import AccessRules
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.serving import MODEL, FakeEngine, client_of, says, served_folder

MakeApp = Callable[..., Starlette]
CLIENTS = AccessRules(api_keys=("first", "zweiter-schlüssel"))
ADMINS = AccessRules(admin_api_keys=("root",))
BOTH = AccessRules(api_keys=("first",), admin_api_keys=("root",))
REMOTE = "10.0.0.7"
FOR_CLIENTS = {
    "/detokenize",
    "/load",
    "/openapi.json",
    "/prefix_cache/explain",
    "/prefix_cache/probe",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{name:path}",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items",
    "/v1/rerank",
    "/v1/score",
    "/v2/rerank",
    "/version",
}
PAGE = Path(dashboard.__file__).with_name("page")
FOR_ALL = {"/", "/chat", "/dashboard", "/docs", "/health", "/ping", "/ready"} | {
    f"/dashboard/assets/{file.name}" for file in PAGE.iterdir() if file.suffix != ".html"
}
CONTROL = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/update_weights_from_disk"),
    ("GET", "/weights/status"),
    *(("POST", f"/weights/{path}") for path in ("begin", "chunk", "end", "abort")),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/prefix_cache/misses"),
    ("GET", "/prefix_cache/snapshot"),
    ("GET", "/prefix_cache/stats"),
    ("POST", "/prefix_cache/resize"),
    ("POST", "/prefix_cache/warm"),
    ("GET", "/metrics"),
    ("GET", "/dashboard/events"),
    ("GET", "/server_info"),
]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(lambda request: says(request, "hello"))


@pytest.fixture(scope="module")
def make_app(engine: FakeEngine, tokenizer: Tokenizer) -> MakeApp:
    """One application for all tests of the same rules."""
    served = ServedModel(names=(MODEL,), generation=GenerationDefaults(), tokenizer=tokenizer)
    return cache(lambda rules=None: create_app(engine, served, rules=rules))


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


async def answer(
    app: Starlette,
    path: str = "/metrics",
    *,
    method: str = "GET",
    headers: Any = None,
    address: str = "127.0.0.1",
) -> httpx.Response:
    async with client_of(app, address) as client:
        return await client.request(method, path, headers=headers)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("key", ["first", "zweiter-schlüssel"])
async def test_each_key_gets_in(make_app: MakeApp, key: str) -> None:
    assert (await answer(make_app(CLIENTS), "/v1/models", headers=bearer(key))).is_success


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Basic first", "first"]
)
@pytest.mark.parametrize("rules", [CLIENTS, BOTH])
async def test_strangers_are_refused_everywhere(make_app, engine, rules, value):
    headers = {} if value is None else {"Authorization": value}
    num_before = len(engine.requests)
    async with client_of(make_app(rules)) as client:
        for method, path in [
            ("POST", "/v1/completions"),
            ("POST", "/prefix_cache/probe"),
            ("GET", "/no/such/path"),
            *CONTROL,
        ]:
            response = await client.request(method, path, headers=headers, content=b"{not json")
            assert code_of(response) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
    assert len(engine.requests) == num_before


async def test_the_official_client_brings_its_key(make_app: MakeApp) -> None:
    async with client_of(make_app(CLIENTS)) as http:
        options = {"base_url": "http://localhost/v1", "http_client": http, "max_retries": 0}
        client = openai.AsyncOpenAI(api_key="first", **options)
        answer = await client.completions.create(model=MODEL, prompt="hi")
        assert answer.choices[0].text == "hello"
        stranger = openai.AsyncOpenAI(api_key="none", **options)
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await stranger.completions.create(model=MODEL, prompt="hi")


@pytest.mark.parametrize("rules", [None, CLIENTS, ADMINS, BOTH])
@pytest.mark.parametrize("address", ["127.0.0.1", REMOTE])
async def test_a_health_check_needs_nothing(make_app, rules, address):
    headers = {"Host": "any.example", "Origin": "http://any.example"}
    response = await answer(make_app(rules), "/health", headers=headers, address=address)
    assert response.status_code == 200


async def test_every_path_but_the_declared_ones_is_the_administrators(make_app: MakeApp) -> None:
    """A route that somebody adds is closed until it is declared open."""
    app = make_app()
    for path in ("/added/later", "/v1/added/later"):
        app.add_route(path, lambda _: Response("secret"))
    paths = {route.path for route in app.routes}
    assert paths > FOR_CLIENTS
    assert paths - FOR_CLIENTS - FOR_ALL == {
        "/added/later",
        "/v1/added/later",
        *(path for _, path in CONTROL),
    }
    async with client_of(app, REMOTE) as client:
        for path in paths:
            refused = (await client.get(path)).status_code == 403
            assert refused == (path not in FOR_CLIENTS | FOR_ALL), path


@pytest.mark.parametrize(
    ("rules", "key", "address", "expected"),
    [
        (None, None, REMOTE, (403, "admin_only")),
        (None, "first", REMOTE, (403, "admin_only")),
        (CLIENTS, "first", "127.0.0.1", (403, "admin_only")),
        (ADMINS, None, "127.0.0.1", (401, "invalid_api_key")),
        (ADMINS, "first", "127.0.0.1", (401, "invalid_api_key")),
        (BOTH, "first", "127.0.0.1", (403, "admin_only")),
        (BOTH, None, "127.0.0.1", (401, "invalid_api_key")),
    ],
)
async def test_control_is_refused(make_app, rules, key, address, expected):
    async with client_of(make_app(rules), address) as client:
        for method, path in CONTROL:
            response = await client.request(method, path, headers=bearer(key) if key else None)
            assert code_of(response) == expected, path


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
async def test_without_keys_this_machine_controls(make_app: MakeApp, address: str) -> None:
    assert (await answer(make_app(), address=address)).is_success


@pytest.mark.parametrize("rules", [ADMINS, BOTH])
@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
async def test_an_administrator_may_do_anything_from_anywhere(make_app, rules, path):
    headers = {**bearer("root"), "X-Forwarded-For": "1.2.3.4"}
    response = await answer(make_app(rules), path, headers=headers, address=REMOTE)
    assert response.is_success


async def test_an_admin_key_alone_leaves_clients_without_one(make_app: MakeApp) -> None:
    assert (await answer(make_app(ADMINS), "/v1/models", address=REMOTE)).is_success


@pytest.mark.parametrize(
    "header",
    ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via"],
)
async def test_behind_a_proxy_nobody_is_this_machine(make_app: MakeApp, header: str) -> None:
    response = await answer(make_app(), headers={header: "127.0.0.1"})
    assert code_of(response) == (403, "admin_only")
    assert "--admin-api-key" in response.json()["error"]["message"]
    assert (await answer(make_app(), "/v1/models", headers={header: "x"})).is_success


@pytest.mark.parametrize(
    "scope", [{"client": None}, {"client": ("", 0)}, {"http_version": "1.0"}, {}]
)
async def test_a_unix_socket_and_nginx_are_not_this_machine(make_app, scope):
    app = make_app()

    async def changed(old: Any, receive: Any, send: Any) -> None:
        await app({**old, **scope}, receive, send)

    async with client_of(changed) as client:
        response = await client.get("/metrics")
    assert response.status_code == (403 if scope else 200)


async def test_what_does_not_exist_is_not_found(make_app: MakeApp) -> None:
    paths = ["/v1/moderations", "/pause/", "//pause", "/PAUSE"]
    for path in paths:
        response = await answer(make_app(CLIENTS), path, headers=bearer("first"))
        assert response.status_code == 404
        assert (await answer(make_app(), path, address=REMOTE)).status_code == 404


async def test_metrics_are_public_by_choice(make_app: MakeApp) -> None:
    app = make_app(AccessRules(api_keys=("first",), public_metrics=True))
    assert (await answer(app, address=REMOTE)).is_success
    assert (await answer(app, "/prefix_cache/stats", address=REMOTE)).status_code == 401


FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://localhost.evil.example"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
    {"Host": "evil.example"},
    {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "localhost@evil.example"},
    {"Host": "foo@127.0.0.1"},
    {"Host": "127.0.0.1/evil"},
    {"Host": "127.0.0.1#x"},
    {"Host": "127.0.0.1?x"},
    {"Host": "127.0.0.1:80:80"},
    {"Host": "127.0.0.1:x"},
    {"Host": "localhost", "Origin": "https://localhost"},
    {"Host": "localhost", "Origin": "x://localhost", "Sec-Fetch-Site": "same-origin"},
    {"Host": "[::1"},
    {"Host": ""},
]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("rules", [None, BOTH])
async def test_pages_of_other_sites_reach_nothing(make_app, rules, headers):
    async with client_of(make_app(rules)) as client:
        for method, path in [*CONTROL, ("GET", "/v1/models"), ("POST", "/v1/completions")]:
            sent = {**bearer("root"), **headers}
            status, code = code_of(await client.request(method, path, headers=sent))
            assert (status, code in ("foreign_origin", "unknown_host")) == (403, True), path


async def test_of_two_hosts_none_is_known(make_app: MakeApp) -> None:
    headers = [("Host", "127.0.0.1"), ("Host", "localhost")]
    assert code_of(await answer(make_app(), headers=headers)) == (403, "unknown_host")


async def test_who_asks_for_the_root_alone_hears_that_somebody_is_there(make_app: MakeApp) -> None:
    assert (await answer(make_app(CLIENTS), "/", method="HEAD")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8000"},
        {"Host": "LOCALHOST"},
        {"Host": "a.localhost:1"},
        {"Host": "127.0.0.1:8000"},
        {"Host": "192.168.0.3"},
        {"Host": "[::1]:8000"},
        {"Host": "llm.example.com:8000"},
        {"Host": "a.llm.example.org"},
        {"Host": "localhost:8000", "Origin": "http://localhost:8000"},
        {
            "Host": "llm.example.com",
            "Origin": "https://LLM.example.com",
            "Sec-Fetch-Site": "same-origin",  # behind a proxy that ends TLS
        },
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
)
async def test_the_servers_own_names_are_known(make_app: MakeApp, headers: dict[str, str]) -> None:
    rules = AccessRules(allowed_hosts=("LLM.example.com", "*.example.org"))
    assert (await answer(make_app(rules), headers=headers)).is_success


@pytest.mark.parametrize(
    "rules",
    [
        {"api_keys": ("good", "")},
        {"api_keys": ("good\n",)},
        {"admin_api_keys": ("",)},
        {"api_keys": ("a", "b"), "admin_api_keys": ("b",)},
        {"allowed_hosts": ("http://example.com",)},
        {"allowed_hosts": ("example.com:80",)},
        {"allowed_hosts": ("a.com,b.com",)},
        {"allowed_hosts": ("",)},
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rules: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError):
        AccessRules(**rules)


# What one key learns of another's prompts.

PROMPT = list(range(10, 90))


async def _counts(client: httpx.AsyncClient, path: str, key: str, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
    response = await client.post(path, json=body, headers=bearer(key))
    if response.status_code != 200:
        return response.json()["error"]["param"]
    answer = response.json()
    return answer.get("cached_tokens", answer.get("usage"))


async def test_a_probe_tells_a_key_of_its_own_salt_alone(tiny_checkpoint):
    rules = AccessRules(api_keys=("mine", "yours"), admin_api_keys=("root",))
    probe, complete = "/prefix_cache/probe", "/v1/completions"
    async with served_folder(tiny_checkpoint(), access={"rules": rules}) as (client, _):
        assert await _counts(client, probe, "mine") == "cache_salt"
        for fields in ({"cache_salt": "s"}, {"cache_salt": ""}):
            await _counts(client, complete, "mine", **fields)
            assert await _counts(client, probe, "mine", **fields) == 80
            assert await _counts(client, probe, "yours", **fields) == 0
            usage = await _counts(client, complete, "yours", **fields, cache_write=False)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert await _counts(client, probe, "root") == 0
        await _counts(client, complete, "mine")
        assert await _counts(client, probe, "root") == 80
        usage = await _counts(client, complete, "yours")
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


# Where new weights may come from.


async def _update(client: httpx.AsyncClient, path: object) -> tuple[int, str]:
    response = await client.post("/update_weights_from_disk", json={"model_path": str(path)})
    body = response.json()
    return response.status_code, body["error"]["message"] if "error" in body else ""


async def test_no_error_tells_which_paths_exist(tiny_checkpoint, tmp_path, caplog):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["Other"]}')
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "text").write_text("no model")
    paths = [tmp_path, tmp_path / "none", tmp_path / "other", *tmp_path.glob("text*"), "a b"]
    async with served_folder(tiny_checkpoint()) as (client, _):
        found = {await _update(client, path) for path in paths}
        assert len(found) == 1
        assert next(iter(found))[0] == 400
        assert "Other" in caplog.text
        assert (await _update(client, tiny_checkpoint(seed=8)))[0] == 200


async def test_weights_come_from_the_allowed_folders_alone(tiny_checkpoint, tmp_path):
    outside, allowed = tiny_checkpoint(seed=8), tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "loop").symlink_to("loop")
    (tmp_path / "back").symlink_to(allowed)
    refused = [
        outside,
        tmp_path / "none",
        f"{allowed}/../none",
        allowed / "link",
        allowed / "loop",
        tmp_path / "back",
        f"{allowed}/a\0b",
        f"{allowed}er",
        "owner/name",
        "smollm2-135m-instruct",
        "~root",
        "",
        "/" * 4000,
    ]
    dirs = ModelDirs([allowed, outside.parent / outside.name / ".." / outside.name])
    access = {"model_dirs": ModelDirs([allowed])}
    async with served_folder(tiny_checkpoint(), access=access) as (client, _):
        found = {await _update(client, path) for path in refused}
        assert found == {(400, "model_path must lie in a folder of --allowed-model-dirs.")}
        assert "config.json" in (await _update(client, allowed))[1]
        assert str(allowed / "none") in (await _update(client, allowed / "none"))[1]
    with dirs.checked(f"{outside}/./") as found:
        assert found == str(outside)
    with pytest.raises(ConfigError, match="--allowed-model-dirs"):
        ModelDirs([tmp_path / "none"])
