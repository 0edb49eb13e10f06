"""`prefixcache explain` and `/prefix_cache/misses`: what a real server's clients did wrong."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from prefixcache.cli.main import app as command
from prefixcache.scheduler import loading
from prefixcache.scheduler.step_time import StepTimeModel
from prefixcache.server.http.access import AccessRules
from prefixcache.server.options.header_lines import HeaderLines
from support.repeatable import bounded
from support.serving import running, serve_folder

CHAT, MISSES = "/v1/chat/completions", "/prefix_cache/misses"
RULES = "Answer in one word, be polite, and use tools where there are any. " * 2
Messages = list[dict[str, Any]]


@contextmanager
def server(
    folder: Path,
    *,
    memory: int = 2**24,
    keys: tuple[str, ...] = (),
    lines: tuple[str, ...] = (),
    **flags: Any,
) -> Generator[httpx.Client, None, None]:
    application, engine = serve_folder(
        folder,
        served={"header_lines": HeaderLines(lines)},
        access={"rules": AccessRules(api_keys=keys, admin_api_keys=("root",) if keys else ())},
        diagnostics_memory=memory,
        **{"num_blocks": 4000, **flags},
    )
    try:
        with running(application) as address, httpx.Client(base_url=address, timeout=240) as client:
            yield client
    finally:
        asyncio.run(engine.shutdown())


def say(client: httpx.Client, messages: Messages, **fields: Any) -> int:
    """The tokens that hit."""
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, **fields}
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def explained(client: httpx.Client, *arguments: str, **options: Any) -> Result:
    address = str(client.base_url)
    return CliRunner().invoke(command, ["explain", "--url", address, *arguments], **options)


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=2**15)


def test_an_agent_whose_header_varies_is_explained_in_one_line(long_checkpoint: Path) -> None:
    turns = bounded(8, 300)
    talk: Messages = []
    with server(long_checkpoint, memory=2**26) as client:
        for turn in range(turns):
            talk.append(user(f"{turn}?"))
            say(client, [system(f"It is 14:{turn // 60:02}:{turn % 60:02} now. {RULES}"), *talk])
        total, *lines = explained(client).output.splitlines()
    assert total.startswith(f"{turns} prompts remembered")
    assert len(lines) == 1
    assert f"by {turns - 1} requests: message 0, system, differs at character 1" in lines[0]
    last, before = (f"14:{turn // 60:02}:{turn % 60:02}" for turn in (turns - 1, turns - 2))
    assert f"`{last}` was `{before}`" in lines[0]
    assert "a date or time in the first 200 tokens; move it after the stable part" in lines[0]
    computed = int(lines[0].split()[1])
    assert computed > 0.8 * int(total.split()[3]) * (turns - 2) / turns


def test_a_billing_header_is_named_and_may_be_left_out(long_checkpoint: Path) -> None:
    def talk(number: int) -> Messages:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number * 7919:05x};"
        return [system(f"{header}\n{RULES}"), user("Go on.")]

    with server(long_checkpoint) as client:
        assert [say(client, talk(number)) for number in range(2)][1] < 64
        (_, line) = explained(client).output.splitlines()
    assert "a provider's billing header" in line
    pattern = line.split("--strip-header-pattern '")[1].split("'")[0]
    with server(long_checkpoint, lines=(pattern,)) as client:
        plain = say(client, [system(RULES), user("Go on.")])
        assert plain == 0
        cached = [say(client, talk(number)) for number in range(2)]
        assert min(cached) > 64
        completed = {"prompt": f"x-billing-header: 1\n{RULES}", "max_tokens": 1}
        bare = {**completed, "prompt": RULES}
        sizes = [
            client.post("/v1/completions", json=one).json()["usage"]["prompt_tokens"]
            for one in (completed, bare)
        ]
        assert sizes[0] == sizes[1]
        assert "No avoidable recomputation found." in explained(client).output


def test_one_prompt_is_explained_and_not_computed(long_checkpoint: Path, tmp_path: Path) -> None:
    body = {"messages": [system(f"It is 14:05:11 now. {RULES}"), user("Why?")]}
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    with server(long_checkpoint) as client:
        say(client, [system(f"It is 14:04:37 now. {RULES}"), user("Why?")])
        for arguments, options in (((str(file),), {}), (("-",), {"input": json.dumps(body)})):
            (line,) = explained(client, *arguments, **options).output.splitlines()
            assert "message 0, system, differs at character 10: `14:05:11` was `14:04:37`" in line
        (line,) = explained(client, str(file), "--url", f"{client.base_url}/v1").output.splitlines()
        assert "message 0, system, differs at character 10: `14:05:11` was `14:04:37`" in line
        assert client.get(MISSES).json()["num_requests"] == 1
        file.write_text('{"messages": 3}')
        wrong = explained(client, str(file))
        file.write_text(json.dumps(body | {"model": "unknown"}))
        unknown = explained(client, str(file))
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "messages" in wrong.stderr
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "answers 404: The model 'unknown' does not exist." in unknown.stderr


def test_the_advice_is_for_administrators_and_limits_are_checked(long_checkpoint: Path) -> None:
    rng = random.Random(1)
    with server(long_checkpoint, keys=("mine",)) as client:
        for name, status in (("mine", 403), ("root", 200), ("other", 401)):
            headers = {"Authorization": f"Bearer {name}"}
            assert client.get(MISSES, headers=headers).status_code == status
        refused = explained(client, "--api-key", "mine")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "403" in refused.stderr
        headers = {"Authorization": "Bearer root"}
        for limit in ("0", "-1", "1001", "x", "", "9" * 400, "\u0663"):
            response = client.get(MISSES, params={"limit": limit}, headers=headers)
            assert response.json()["error"]["param"] == "limit"
        client.headers["Authorization"] = "Bearer mine"
        for _ in range(4):
            say(client, [system(f"Session {rng.getrandbits(64):016x}. {RULES}"), user("Why?")])
        printed = explained(client, "--api-key", "root", "--json", "--limit", "1").output
    answer = json.loads(printed)
    assert (answer["num_findings"], answer["findings"][0]["offender"]) == (1, "id")


@pytest.mark.parametrize(
    "answer",
    [
        lambda: httpx.Response(404, json={"detail": "Not Found"}),
        lambda: httpx.Response(404, json={"error": {"message": "Not Found", "code": None}}),
        lambda: httpx.Response(200, text="<html>"),
        lambda: httpx.Response(200, json={"hello": 1}),
        lambda: httpx.Response(500, json=[]),
    ],
    ids=["404", "error", "html", "other", "list"],
)
def test_other_servers_are_recognized(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[], httpx.Response]
) -> None:
    def get(*_arguments: object, **_options: object) -> httpx.Response:
        return answer()

    monkeypatch.setattr(httpx.Client, "get", get)
    result = CliRunner().invoke(command, ["explain", "--url", "http://127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: http://127.0.0.1:1 is not a prefixcache server")


def test_a_server_that_is_not_there_is_one_line() -> None:
    for url in ("http://127.0.0.1:1", "nowhere", "http://[", "http://\ud800"):
        result = CliRunner().invoke(command, ["explain", "--url", url])
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1


def test_clients_see_what_lies_on_a_disk(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(StepTimeModel, "seconds", lambda *_: 0.0)  # Loads are never late.
    monkeypatch.setattr(loading, "_MOST_SECONDS", 600)
    body = {"model": "tiny", "max_tokens": 1, "ignore_eos": True}
    prompt, other = list(range(10, 160)), list(range(140, 370))
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body | {"prompt": prompt}))
    disk = {"disk_cache_memory": "64MiB", "disk_cache_dir": tmp_path / "disk"}
    flags = {"num_blocks": 16, "max_model_len": 240}
    with server(tiny_checkpoint("qwen3"), **disk, **flags) as client:

        def asked(**fields: Any) -> dict[str, Any]:
            answer = client.post("/v1/completions", json=body | fields).raise_for_status().json()
            return answer | answer.pop("choices")[0]

        asked(prompt=prompt)
        asked(prompt=other)
        on_disk = "0 of 150 tokens are cached, the next 144 on the disk: "
        while on_disk not in (said := explained(client, str(file)).output):
            assert "are cached" in said, said
        refused = asked(prompt=prompt, cache_hit_threshold=0.9)
        assert refused["finish_reason"] == "cache_threshold"
        taken = asked(
            prompt=prompt, cache_hit_threshold=0.9, cache_hit_threshold_tiers="memory,disk"
        )
        assert taken["finish_reason"] == "length"
        assert taken["usage"]["prompt_tokens_details"]["disk_cached_tokens"] == 144
        assert client.get("/prefix_cache/stats").json()["disk_cached_tokens"] == 144
        said = explained(client).output
    assert "530 tokens: 27.2 % from the cache (27.2 % from its disk)" in said
